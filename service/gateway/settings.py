"""Every setting of the gateway. Flags, variables and the page of settings are derived from it.

Imports no module of the worker, and therefore no module of the engine.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field
from pydantic_settings import SettingsConfigDict

from quire.cli.sources import ENV_PREFIX
from quire.openai.tools.reasoning import ReasoningSetting
from service.gateway.http.cors import ORIGIN_PATTERN
from service.shared.batches.settings import FileSettings
from service.shared.settings.fields import (
    HTTP_HOST,
    LOG_FORMAT,
    LOG_LEVEL,
    MAX_QUEUE_SECONDS,
    RETENTION_SECONDS,
    SHARDS,
    LogFormat,
    LogLevel,
    QueueName,
    port,
    setting,
    split_or_none,
)
from service.shared.settings.reading import ProcessSettings

#: The next port after those of the worker and the exporter.
GATEWAY_PORT = 10_402

#: The shortest timeout for a caller, and the reason.
MIN_PATIENCE_SECONDS = 0.05
PATIENCE_REASON = "the way over a network may take as long"

Origin = Annotated[str, Field(pattern=ORIGIN_PATTERN)]


class GatewaySettings(FileSettings):
    """All settings of a gateway."""

    model_config = SettingsConfigDict(env_prefix=f"{ENV_PREFIX}GATEWAY_")
    program: ClassVar[str] = "python -m service.gateway"
    purpose: ClassVar[str] = "Serve OpenAI's API in front of a queue. Run as many as you like."
    file_table: ClassVar[str] = "gateway"
    least_seconds: ClassVar[Mapping[str, tuple[float, str]]] = {
        "body_timeout_seconds": (MIN_PATIENCE_SECONDS, PATIENCE_REASON),
        "patience_seconds": (MIN_PATIENCE_SECONDS, PATIENCE_REASON),
        **ProcessSettings.least_seconds,
    }

    queue: QueueName = setting("Queue", "Queue to submit to.", default="default")
    shards: int = SHARDS
    durable: bool = setting(
        "Queue",
        "A call is accepted once it is on the disk of Redis (WAITAOF, or `appendfsync always`).",
        default=False,
    )
    max_queue_seconds: float = MAX_QUEUE_SECONDS
    retention_seconds: float = RETENTION_SECONDS

    keys_file: Path | None = setting(
        "Callers",
        "File of API keys, one line `key tenant [priority]` for each; read again at SIGHUP. Unset: "
        "no key is needed.",
        default=None,
    )
    allowed_origins: Annotated[tuple[Origin, ...], BeforeValidator(split_or_none)] = setting(
        "Callers",
        "Origins whose pages may call and read, as `https://page.example`, separated by commas; "
        "`*` is every origin. Unset: pages of other origins can read nothing.",
        default=(),
        max_length=64,
    )
    max_body_bytes: int = setting("Callers", "Longest body of a call.", default=4 << 20, ge=1)
    max_open_answers: int = setting(
        "Callers", "Most answers open at once; more are refused with 503.", default=1000, ge=1
    )
    max_open_answers_per_tenant: int | None = setting(
        "Callers",
        "Most answers of one tenant open at once; more are refused with 429. Unset: one tenant "
        "may have all.",
        default=None,
        ge=1,
    )
    body_timeout_seconds: float = setting(
        "Callers", "How long a caller may take to send its body.", default=30.0, gt=0.0
    )
    patience_seconds: float = setting(
        "Callers",
        "How long a caller may read nothing of what it was sent; then it counts as gone.",
        default=60.0,
        gt=0.0,
    )
    drain_seconds: float = setting(
        "Callers",
        "After SIGTERM, how long open answers may go on. Those that remain are broken off, so that "
        "their callers can continue at another gateway.",
        default=30.0,
        ge=0.0,
    )

    max_files: int = setting(
        "Files and batches", "Most files of one tenant; more are refused.", default=10_000, ge=1
    )
    max_open_batches: int = setting(
        "Files and batches",
        "Most batches of one tenant that have not ended; more are refused.",
        default=100,
        ge=1,
    )
    max_batches: int = setting(
        "Files and batches",
        "Most batches of one tenant, ended ones included; more are refused.",
        default=10_000,
        ge=1,
    )

    reasoning: ReasoningSetting = setting(
        "Answers",
        "Which reasoning of a chat is sent as `reasoning_content`: that of all formats (`auto`), "
        "of none, or of one.",
        default="auto",
    )

    http_host: str = HTTP_HOST
    http_port: int = port("the API, `/livez`, `/readyz` and `/metrics`", default=GATEWAY_PORT)
    log_level: LogLevel = LOG_LEVEL
    log_format: LogFormat = LOG_FORMAT
