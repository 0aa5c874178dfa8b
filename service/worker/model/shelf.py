"""Keeps loaded models in memory, within a budget. Only the engine thread uses it.

A model counts with the bytes of its weight files and those of its KV cache. The one that was served
longest ago is dropped first, before the next one is loaded, so that both never need memory at once
unless both fit. The pages of weight files stay in the cache of the operating system, which the
workers of a machine share, so a model that was dropped is usually not read from the disk again.
"""

import gc
from collections import OrderedDict
from collections.abc import Callable

import structlog

from service.worker.model.served import ServedModel
from service.worker.settings.config import Settings
from service.worker.settings.several import bytes_of_source

_log = structlog.get_logger("service.worker.model")


class Shelf:
    """The loaded models of a worker, by name.

    `budget_bytes` is for all of them together; None keeps only the one that was taken last.
    """

    def __init__(
        self, load: Callable[[Settings], ServedModel], *, budget_bytes: int | None
    ) -> None:
        self._load = load
        self._budget = budget_bytes
        #: The model that was taken last comes last.
        self._models: OrderedDict[str, ServedModel] = OrderedDict()
        #: The bytes of each model that was ever loaded.
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._models)

    def holds(self, name: str) -> bool:
        """Whether a model is loaded."""
        return name in self._models

    def take(self, settings: Settings) -> ServedModel:
        """The model of these settings, loaded if it is not. What does not fit beside it is dropped.

        Raises:
            ModelRefused: it cannot be served here.
        """
        name = settings.model_name
        if name not in self._models:
            self._make_room(name, self._sizes.get(name) or bytes_of_source(settings))
            self._models[name] = self._load(settings)
            cache = self._models[name].cache_bytes
            self._sizes[name] = bytes_of_source(settings) + cache["device"] + cache["host"]
        self._models.move_to_end(name)
        # The size of a model is known only after its first load.
        self._make_room(name, 0)
        return self._models[name]

    def _make_room(self, name: str, num_bytes: int) -> None:
        has_dropped = False
        while others := [one for one in self._models if one != name]:
            used = num_bytes + sum(self._sizes[one] for one in self._models)
            if self._budget is not None and used <= self._budget:
                break
            # By its name only: a local variable would keep the model until the next round.
            del self._models[others[0]]
            has_dropped = True
            _log.info("model dropped from memory", model=others[0], bytes=self._sizes[others[0]])
        if has_dropped:
            # A loaded model is excluded from garbage collection, and its parts refer to each other.
            gc.unfreeze()
            gc.collect()
