"""Tells in the log that a model is loaded, what it is, and how far that is.

An event `loading` at the beginning, then one every few seconds until the model is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Event, Thread
from time import monotonic
from typing import Any, Self

import structlog

from service.shared.logs import take_over_libraries
from service.worker.settings.config import Settings
from service.worker.settings.several import bytes_of_source

#: How often the log says how far it is.
INTERVAL_SECONDS = 5.0

#: How transformers describes the bar over the tensors that it reads.
_TENSORS = "Loading weights"

_log = structlog.get_logger("service.worker.model")


class Loading:
    """The load of one model, as a context. Tensors are counted after `follow_transformers`."""

    def __init__(self, settings: Settings, *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._settings = settings
        self._interval_seconds = interval_seconds
        self._began = monotonic()
        self._is_over = Event()
        self._teller = Thread(target=self._tell, name="loading", daemon=True)
        self._set_hook: Callable[[Any], Any] | None = None
        #: The tensors that were read, of all; 0 while that is not known.
        self.num_read = self.num_tensors = 0

    def __enter__(self) -> Self:
        settings = self._settings
        _log.info(
            "loading",
            model=settings.model_name,
            source=settings.model_source,
            bytes=bytes_of_source(settings),
        )
        self._teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._teller.join()
        if self._set_hook is not None:
            self._set_hook(None)

    def follow_transformers(self) -> None:
        """Count the tensors that transformers reads, and let it and others log as we do.

        Call it after the import of all libraries that load.
        """
        from transformers.utils import logging

        # The log has one event per line, so that programs can read it.
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        logging.set_tqdm_hook(self._bar)
        self._set_hook = logging.set_tqdm_hook
        take_over_libraries()

    def _bar(
        self, factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        if options.get("desc") != _TENSORS or not args:
            return factory(*args, **options)
        self.num_read, self.num_tensors = 0, len(args[0])
        return self._counted(args[0])

    def _counted(self, tensors: Any) -> Iterator[Any]:
        for tensor in tensors:
            yield tensor
            self.num_read += 1

    def _tell(self) -> None:
        while not self._is_over.wait(self._interval_seconds):
            told: dict[str, Any] = {"seconds": round(monotonic() - self._began, 1)}
            if self.num_tensors:
                told |= {"tensors": self.num_read, "of": self.num_tensors}
            _log.info("loading", model=self._settings.model_name, **told)
