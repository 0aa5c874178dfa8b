"""Runs a process that computes for the worker of another machine.

It has no Redis, no requests and no pages; what it says of itself is in its log.
"""

import structlog

from engine.errors import DeviceFailed, ModelRefused
from service.worker.model.node import follow_first
from service.worker.process.worker import EXIT_FAILED, EXIT_REFUSED
from service.worker.settings.config import Settings

_log = structlog.get_logger("service.worker.process.follower")


def run_follower(settings: Settings) -> int:
    """Compute until this machine fails or the first one ends; returns the exit code."""
    try:
        follow_first(settings)
    except ModelRefused as error:
        _log.critical("worker cannot serve", reason=str(error))
        return EXIT_REFUSED
    except DeviceFailed as error:
        _log.critical("the model has lost a machine", reason=str(error))
        return EXIT_FAILED
