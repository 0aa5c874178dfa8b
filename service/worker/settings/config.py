"""The settings of a worker, read, checked together, and completed by what follows from them."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import model_validator

from quire.cli.sources import ENV_PREFIX
from quire.errors import InvalidRequest
from service.worker.settings.combinations import refusal
from service.worker.settings.presets import PRESETS
from service.worker.settings.serving import WorkerSettings

#: The model that ships with the checkout.
EMBEDDED_MODEL = Path(__file__).resolve().parents[3] / "models" / "abacus"

#: The prefix of the variables that are arguments of vLLM.
VLLM_PREFIX = "QUIRE_VLLM_"


class Settings(WorkerSettings):
    """All settings of a worker. Frozen: an "auto" value is resolved into another object."""

    program: ClassVar[str] = "python -m service"
    purpose: ClassVar[str] = (
        "Run a worker: claim requests from Redis, generate, publish every token."
    )
    table: ClassVar[str] = "worker"
    prefix: ClassVar[str] = ENV_PREFIX

    @classmethod
    def values_by_source(cls, flags: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """See `ProcessSettings`; the last source is the preset that one of the others chooses.

        Arguments of vLLM are merged, one by one, over all sources.
        """
        sources = super().values_by_source(flags)
        _merge_vllm(sources)
        chosen = next((values["preset"] for values in sources.values() if "preset" in values), "")
        # A name that is no preset is refused by the field.
        return sources | {"preset": dict(PRESETS.get(str(chosen), {}))}

    @model_validator(mode="after")
    def _agree(self) -> "Settings":
        if (reason := refusal(self)) is not None:
            raise ValueError(reason)
        return self

    @property
    def own_shards(self) -> tuple[int, ...]:
        """The shards this worker serves."""
        return self.served_shards or tuple(range(self.shards))

    @property
    def model_source(self) -> str:
        """The model to load: the folder, file or name that was set, or the embedded model."""
        return self.model if self.model is not None else str(EMBEDDED_MODEL)

    @property
    def model_name(self) -> str:
        """The served name: as set, or the last part of the model's folder, file or name."""
        return self.served_model_name or Path(self.model_source).name

    @property
    def worker(self) -> str:
        """The worker's name: as set, or host name and process id."""
        return self.worker_name or f"{socket.gethostname()}-{os.getpid()}"


def _merge_vllm(sources: Mapping[str, dict[str, Any]]) -> None:
    """Give each source the arguments of vLLM of the sources below it, too."""
    variables = {
        name.removeprefix(VLLM_PREFIX).lower(): text
        for name, text in os.environ.items()
        if name.startswith(VLLM_PREFIX)
    }
    merged: dict[str, Any] = {}
    for source in ("file", "variable", "flag"):
        values, named = sources[source], variables if source == "variable" else {}
        if "vllm" in values or named:
            merged = merged | _table_of(values.get("vllm", {})) | named
            values["vllm"] = merged


def _table_of(value: Any) -> dict[str, Any]:
    """A table, or what `NAME=VALUE` texts say: a list, as flags have it, or one text with commas.

    InvalidRequest if a text has no name or no value.
    """
    if isinstance(value, dict):
        return value
    texts = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    pairs = [str(text).partition("=") for text in texts] if isinstance(texts, list) else [("",) * 3]
    for key, equals, _ in pairs:
        if not key.strip() or not equals:
            raise InvalidRequest("vllm", "must be NAME=VALUE")
    return {key.strip().replace("-", "_"): text.strip() for key, _, text in pairs}
