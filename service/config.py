"""The worker's settings: flags, before `QUIRE_*` variables, before `quire.toml`, before defaults.

The fields of `Settings` are the only list of settings there is: flags, variables, file keys and
docs/configuration.md are all derived from them. Importing this module costs no torch, so that
`--help` answers at once.
"""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engine.config import PolicyName, PreemptionMode
from service.sources import (
    DEFAULT_FILE,
    ENV_PREFIX,
    SHARED_KEYS,
    ConfigurationError,
    read_environment,
    read_file,
)

#: The model that ships with the checkout.
EMBEDDED_MODEL = Path(__file__).resolve().parent.parent / "models" / "abacus"


def setting(section: str, description: str, *, default: Any, **constraints: Any) -> Any:
    """One field of Settings with the section of docs/configuration.md it stands in."""
    extra: JsonDict = {"section": section}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


class Settings(BaseSettings):
    """Everything a worker is told at start. Frozen: "auto" values resolve into other objects."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=ENV_PREFIX)

    config_file: Path | None = setting(
        "Files", f"TOML file to read; unset: `{DEFAULT_FILE}` if it exists here.", default=None
    )

    redis_url: str = setting(
        "Queue",
        "Where Redis is: `redis://`, `rediss://` or `unix://`.",
        default="redis://127.0.0.1:6379/0",
        pattern=r"^(redis|rediss|unix)://",
        repr=False,
    )
    redis_password: SecretStr | None = setting(
        "Queue",
        "Password, if it is not part of the URL. Has no flag: `ps` shows flags.",
        default=None,
    )
    queue: str = setting(
        "Queue", "Queue to serve.", default="default", pattern=r"^[A-Za-z0-9._-]{1,64}$"
    )
    shard: int = setting("Queue", "Shard of the queue to serve.", default=0, ge=0)
    worker_name: str = setting(
        "Queue",
        "Name in the worker registry and of the stream consumer; keep it stable over restarts. "
        "Unset: host name and process id.",
        default="",
    )
    claim_batch: int = setting(
        "Queue",
        "Requests claimed at once, and the longest line that may wait in front of the engine; "
        "everything else waits in Redis, where every worker can see it.",
        default=16,
        ge=1,
        le=256,
    )
    block_seconds: float = setting(
        "Queue", "How long one read waits for new requests.", default=1.0, gt=0.0, le=2.0
    )
    burst: bool = setting(
        "Queue",
        "Exit with 0 as soon as the queue is empty and all work is done.",
        default=False,
    )

    lease_seconds: float = setting(
        "Leases",
        "A claim that is not renewed for so long is taken over. It is renewed every third of it.",
        default=10.0,
        gt=0.0,
    )
    max_attempts: int = setting(
        "Leases",
        "Claims of one request before it is given up as a dead letter. All workers of a queue "
        "should agree on this and the next two.",
        default=5,
        ge=1,
    )
    max_queue_seconds: float = setting(
        "Leases", "Longest time a request may wait in the queue.", default=86_400.0, gt=0.0
    )
    retention_seconds: float = setting(
        "Leases", "How long the output of a finished request can be read.", default=3600.0, gt=0.0
    )
    stall_timeout_seconds: float = setting(
        "Leases",
        "With requests running and no step for so long the engine counts as stalled: leases are "
        "no longer renewed and `/livez` fails.",
        default=120.0,
        gt=0.0,
    )
    drain_seconds: float = setting(
        "Leases",
        "After SIGTERM, how long running requests may go on before they are released to other "
        "workers, their tokens kept.",
        default=30.0,
        ge=0.0,
    )
    flush_seconds: float = setting(
        "Leases",
        "After the drain, how long the last commits and releases may wait for Redis.",
        default=10.0,
        ge=0.0,
    )
    publish_interval_seconds: float = setting(
        "Leases",
        "Least time between two commits; 0 commits as fast as Redis answers. A longer interval "
        "makes longer chunks.",
        default=0.0,
        ge=0.0,
        le=5.0,
    )

    model: str | None = setting(
        "Model",
        "Folder or Hugging Face name; unset: the checkout's own `models/abacus`.",
        default=None,
    )
    served_model_name: str | None = setting(
        "Model",
        "Name in metrics, logs and completions; a request that names another model is rejected. "
        "Unset: the last part of `model`.",
        default=None,
        min_length=1,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "Model", "Data type of weights and KV cache.", default="auto"
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "Model", "Where the model runs.", default="auto"
    )
    attention_backend: Literal["auto", "reference", "cpu", "cuda"] = setting(
        "Model", "Implementation of paged attention.", default="auto"
    )
    max_model_len: int | None = setting(
        "Model", "Longest prompt plus output in tokens; unset: the model's.", default=None, ge=1
    )

    block_size: int = setting("KV cache", "Tokens per block.", default=16, ge=1)
    num_blocks: int | None = setting(
        "KV cache", "Blocks on the device; unset: as many as fit the memory.", default=None, ge=1
    )
    kv_cache_memory_bytes: int | None = setting(
        "KV cache",
        "Memory for blocks on the device; unset: what is really free after the weights.",
        default=None,
        ge=1,
    )
    num_host_blocks: int = setting(
        "KV cache", "Blocks in host memory for requests preempted by swap.", default=0, ge=0
    )
    enable_prefix_caching: bool = setting(
        "KV cache", "Share the blocks of equal prompt beginnings within a tenant.", default=True
    )

    max_num_seqs: int = setting("Scheduler", "Requests running at once.", default=64, ge=1)
    max_num_batched_tokens: int = setting(
        "Scheduler", "Tokens computed per step, prefill and decode together.", default=512, ge=1
    )
    long_prefill_token_threshold: int = setting(
        "Scheduler", "Most tokens of one request per step; 0: only the budget.", default=0, ge=0
    )
    policy: PolicyName = setting("Scheduler", "Who runs first.", default="priority")
    aging_seconds: float = setting(
        "Scheduler", "Seconds of waiting that are worth one priority class.", default=30.0, gt=0.0
    )
    preemption_mode: PreemptionMode = setting(
        "Scheduler", "What becomes of the KV of a preempted request.", default="auto"
    )
    check_invariants: bool = setting(
        "Scheduler",
        "Check the engine's laws after every step; idle engines always do.",
        default=False,
    )

    http_host: str = setting("Observability", "Address of the health server.", default="127.0.0.1")
    http_port: int = setting(
        "Observability",
        "Port of `/livez`, `/readyz` and `/metrics`; 0 takes a free one and logs it when ready.",
        default=9100,
        ge=0,
        le=65_535,
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "Observability", "Least severe event that is logged.", default="info"
    )
    log_format: Literal["auto", "json", "console"] = setting(
        "Observability", "`auto` is console on a terminal and JSON elsewhere.", default="auto"
    )

    @model_validator(mode="after")
    def _agree(self) -> "Settings":
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("set num_blocks or kv_cache_memory_bytes, not both")
        return self

    @property
    def connection_url(self) -> str:
        """The Redis URL with the password in it."""
        if self.redis_password is None:
            return self.redis_url
        scheme, _, rest = self.redis_url.partition("://")
        user, at, place = rest.rpartition("@")
        user = user.partition(":")[0]
        secret = quote(self.redis_password.get_secret_value(), safe="")
        return f"{scheme}://{user}:{secret}@{place if at else rest}"

    @property
    def model_source(self) -> str:
        """What to load: the folder or name given, or the embedded model."""
        return self.model if self.model is not None else str(EMBEDDED_MODEL)

    @property
    def model_name(self) -> str:
        """The served name: as set, or the last part of the model's folder or name."""
        return self.served_model_name or Path(self.model_source).name

    @property
    def worker(self) -> str:
        """The worker's name as others see it."""
        return self.worker_name or f"{socket.gethostname()}-{os.getpid()}"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take the flags, which come as arguments, and our own strict readers of the rest."""
        # Pydantic's readers ignore names that they do not know.
        del env_settings, dotenv_settings, file_secret_settings
        environment = read_environment(os.environ, settings_cls.model_fields)
        named = init_settings().get("config_file") or environment.get("config_file")
        file = read_file(named, settings_cls.model_fields)
        return (
            init_settings,
            InitSettingsSource(settings_cls, init_kwargs=dict(environment)),
            InitSettingsSource(settings_cls, init_kwargs=file),
        )


def load_settings(argv: Sequence[str] | None = None) -> Settings:
    """The settings of this process, from `argv`, `os.environ` and the file.

    Raises:
        ConfigurationError: a key is unknown or a value is wrong.
        SystemExit: `--help`, or a flag argparse cannot read.
    """
    flags = vars(build_parser().parse_args(argv))
    try:
        return Settings(**flags)
    except ValidationError as error:
        raise ConfigurationError(_describe(error)) from error


def build_parser() -> argparse.ArgumentParser:
    """The command line: one flag per field, absent from the result unless given."""
    parser = argparse.ArgumentParser(
        prog="python -m service",
        description="Run a worker: claim requests from Redis, generate, publish every token.",
        epilog="Each flag can also be set as QUIRE_<NAME> or in quire.toml; flags win.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in Settings.model_fields.items():
        if SecretStr in get_args(field.annotation):
            continue
        section = _section(field)
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        flag = "--" + name.replace("_", "-")
        text = f"{field.description} [{_default_text(field)}]".replace("%", "%%")
        if field.annotation is bool:
            groups[section].add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            choices = _choices(field) or None
            metavar = None if choices else _type_text(field).upper()
            groups[section].add_argument(flag, choices=choices, metavar=metavar, help=text)
    return parser


def render_markdown() -> str:
    """docs/configuration.md, whole."""
    shared = ", ".join(f"`{name}`" for name in sorted(SHARED_KEYS))
    lines = [
        "# Configuration of the worker",
        "",
        "Generated from `service/config.py` by `python -m service.config`; do not edit.",
        "",
        "A setting is looked up as a flag, then as a `QUIRE_*` variable, then in `quire.toml`,",
        "and has its default otherwise. A flag is the name with dashes (`--max-num-seqs 8`), a",
        "variable the name in capitals (`QUIRE_MAX_NUM_SEQS=8`), a file key the name in the",
        f"table `[worker]`; these may also stand above all tables: {shared}.",
        "`QUIRE_<NAME>_FILE` names a file that holds the value, for secrets. Unknown names are",
        "refused in all three places.",
    ]
    section = ""
    for name, field in Settings.model_fields.items():
        if _section(field) != section:
            section = _section(field)
            lines += ["", f"## {section}", ""]
            lines += ["| name | type | default | meaning |", "|---|---|---|---|"]
        row = [f"`{name}`", _type_text(field), _default_text(field), field.description]
        lines.append(f"| {' | '.join(str(cell) for cell in row)} |")
    return "\n".join(lines) + "\n"


def _section(field: FieldInfo) -> str:
    assert isinstance(field.json_schema_extra, dict)
    return str(field.json_schema_extra["section"])


def _default_text(field: FieldInfo) -> str:
    if field.default is None or field.default == "":
        return "unset"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return str(field.default)


def _choices(field: FieldInfo) -> tuple[str, ...]:
    """The words a Literal allows; empty for every other type."""
    options = get_args(field.annotation)
    return options if options and all(isinstance(option, str) for option in options) else ()


def _type_text(field: FieldInfo) -> str:
    if choices := _choices(field):
        return ", ".join(choices)
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    kind: Any = kinds[0] if kinds else field.annotation
    names = {SecretStr: "secret", bool: "flag", int: "integer", float: "number", str: "text"}
    return names.get(kind, "path")


def _describe(error: ValidationError) -> str:
    """One clause per wrong setting. Values are left out: one of them may be a secret."""
    clauses = []
    for item in error.errors(include_input=False, include_url=False):
        name = ".".join(str(part) for part in item["loc"])
        clauses.append(f"{name}: {item['msg']}" if name else str(item["msg"]))
    return "; ".join(clauses)


if __name__ == "__main__":
    sys.stdout.write(render_markdown())
