"""The settings of each model of a worker: one set without a table of models, else one per entry."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quire.wire.refusals import nearest
from service.shared.model_table import ModelRoute, read_models
from service.shared.settings.sources import ConfigurationError, faults
from service.worker.settings.config import Settings
from service.worker.settings.presets import PRESETS

#: An intake that waits in a read ends only after it, and with it a switch.
MAX_BLOCK_SECONDS = 0.1

#: Settings of the table itself, which no model has.
_OF_THE_WORKER = ("models_file", "served_models")


def settings_of_models(settings: Settings) -> list[Settings]:
    """The settings for each model, in the order of the table.

    Raises:
        ConfigurationError: the table is wrong, or has nothing that this worker could serve.
    """
    table = read_models(settings.models_file)
    if table is None:
        return [settings]
    routes = {route.name: route for route in table.routes if route.source is not None}
    for name in settings.served_models:
        if name not in routes:
            message = f"{name!r} has no entry with a source{nearest(name, list(routes))}"
            raise ConfigurationError(f"served_models: {message}")
    chosen = settings.served_models or tuple(routes)
    if not chosen:
        raise ConfigurationError("models_file: no entry has a source, so there is nothing to serve")
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    made = [_settings_for(routes[name], given) for name in dict.fromkeys(chosen)]
    if len({one.queue for one in made}) < len(made):
        raise ConfigurationError("models_file: two models of this worker have the same queue")
    return made


def _settings_for(route: ModelRoute, given: dict[str, Any]) -> Settings:
    where = f"models_file: models.{route.name}.settings"
    known = {name: value for name, value in given.items() if name not in _OF_THE_WORKER}
    own: dict[str, Any] = {
        "model": route.source,
        "served_model_name": route.name,
        "queue": route.queue,
        "shards": route.shards,
    }
    if clash := sorted(set(route.settings) & {*own, *_OF_THE_WORKER}):
        raise ConfigurationError(f"{where}: {clash[0]} is a key of the entry, or of the worker")
    preset = PRESETS.get(str(route.settings.get("preset")), {})
    try:
        made = Settings(**{**preset, **known, **route.settings, **own})
    except ValidationError as error:
        raise ConfigurationError(f"{where}: {faults(error)[0]}") from error
    block = min(made.block_seconds, MAX_BLOCK_SECONDS)
    return made.model_copy(update={"block_seconds": block})


def bytes_of_source(settings: Settings) -> int:
    """The bytes of a model's weight files, without reading them; 0 for a name of the hub."""
    source = Path(settings.model_source)
    files: Iterator[Path] = iter([source]) if source.is_file() else source.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
