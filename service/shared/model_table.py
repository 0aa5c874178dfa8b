"""The table of models: which queue serves which model, read from a TOML file.

    [models.qwen-7b]
    queue = "qwen"
    shards = 2
    aliases = ["gpt-4o-mini"]
    max_open_answers = 200
    source = "/srv/models/qwen-7b"
    settings = {max_num_seqs = 64, kv_cache_memory_bytes = 4000000000}

Gateways, batchers and workers of several models read the same file. Knows no Redis and no HTTP.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quire.wire.adapters import ADAPTER_SEPARATOR
from service.shared.settings.fields import QueueName
from service.shared.settings.sources import ConfigurationError, faults

#: The most models of a table. A search for the queue of a request asks the queue of each.
MAX_MODELS = 256

#: The longest name of a model or alias, in characters.
MAX_NAME_LENGTH = 256


class _Row(BaseModel):
    """An entry of the file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    queue: QueueName
    shards: int = Field(default=1, ge=1, le=1024)
    aliases: list[str] = Field(default_factory=list, max_length=64)
    max_open_answers: int | None = Field(default=None, ge=1)
    #: For workers: the model to load, and their settings for it. Gateways ignore both.
    source: str | None = Field(default=None, min_length=1)
    settings: dict[str, Any] = Field(default_factory=dict)


class ModelRoute(_Row):
    """One model: the queue whose workers serve it, and how many shards that queue has.

    `max_open_answers` is the most calls of the model that one gateway answers at once; None means
    no limit of its own.
    """

    name: str


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    models: dict[str, _Row] = Field(min_length=1, max_length=MAX_MODELS)


class ModelTable:
    """The models by name and alias. A name may also have an adapter: `<model>:<adapter>`."""

    def __init__(self, routes: Mapping[str, ModelRoute]) -> None:
        self.routes = tuple(routes.values())
        self._by_name = {**routes}
        for route in self.routes:
            self._by_name |= dict.fromkeys(route.aliases, route)

    @property
    def names(self) -> list[str]:
        """All names and aliases."""
        return list(self._by_name)

    def find(self, name: str) -> tuple[ModelRoute, str] | None:
        """The model of a name, and the name that its workers know; None if there is none."""
        if route := self._by_name.get(name):
            return route, route.name
        base, separator, adapter = name.rpartition(ADAPTER_SEPARATOR)
        if separator and (route := self._by_name.get(base)):
            return route, f"{route.name}{separator}{adapter}"
        return None


def read_models(path: Path | None) -> ModelTable | None:
    """The table in a file; None without a file.

    Raises:
        ConfigurationError: the file cannot be read, an entry is wrong, or two entries contradict
            each other.
    """
    if path is None:
        return None
    try:
        rows = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).models
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"models_file: cannot read {path}: {error}") from error
    except ValidationError as error:
        raise ConfigurationError(f"models_file: {path}: {faults(error)[0]}") from error
    routes = {name: ModelRoute(name=name, **dict(row)) for name, row in rows.items()}
    _check(routes, f"models_file: {path}")
    return ModelTable(routes)


def _check(routes: Mapping[str, ModelRoute], where: str) -> None:
    owners: dict[str, str] = {}
    shards: dict[str, int] = {}
    for route in routes.values():
        for name in (route.name, *route.aliases):
            if not 0 < len(name) <= MAX_NAME_LENGTH:
                message = f"a name must have 1 to {MAX_NAME_LENGTH} characters"
                raise ConfigurationError(f"{where}: models.{route.name}: {message}")
            if name in owners:
                message = f"{name!r} also names {owners[name]!r}"
                raise ConfigurationError(f"{where}: models.{route.name}: {message}")
            owners[name] = route.name
        if shards.setdefault(route.queue, route.shards) != route.shards:
            message = f"the queue {route.queue!r} has another number of shards in another entry"
            raise ConfigurationError(f"{where}: models.{route.name}.shards: {message}")
