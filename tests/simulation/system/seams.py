"""Puts virtual time, tasks and seeded randomness under the real modules of Quire, for a while.

The modules take their clock, threads and randomness from the standard library, by name. While the
seams are in, those names mean the simulated ones in every loaded module of `quire` and `service`:
nothing is subclassed or rewritten, and a module that comes tomorrow is covered as well. Two things
are simulated beside: the health server listens on no port, and log lines are counted.
"""

from __future__ import annotations

import contextlib
import copy
import queue
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

import service.worker.process.parts
from service.worker.observe.metrics import Metrics
from tests.simulation.system import threads
from tests.simulation.system.threads import active

#: The rooms whose modules run on virtual time.
ROOMS = ("quire", "service")


def _seeded() -> random.Random:
    return random.Random(active().random.getrandbits(64))


class _LateRandom(random.Random):
    """Draws from the timeline of the moment: for sources made before there was one."""

    def random(self) -> float:
        return active().random.random()

    def getrandbits(self, k: int) -> int:
        return active().random.getrandbits(k)


_TIME = SimpleNamespace(
    monotonic=lambda: active().now,
    perf_counter=lambda: active().now,
    time=lambda: active().unix_seconds(),
    time_ns=lambda: int(active().unix_seconds() * 1e9),
    sleep=lambda seconds: active().sleep(seconds),
)

_THREADING = SimpleNamespace(
    Event=threads.Event,
    Lock=threads.Lock,
    RLock=threads.RLock,
    Condition=threads.Condition,
    Thread=threads.Thread,
)


def _randbits(bits: int) -> int:
    return active().random.getrandbits(bits)


def _randbelow(bound: int) -> int:
    return active().random.randrange(bound)


_SECRETS = SimpleNamespace(
    token_hex=lambda count: _randbits(8 * count).to_bytes(count, "big").hex(),
    randbits=_randbits,
    randbelow=_randbelow,
)

_RANDOM = SimpleNamespace(SystemRandom=_seeded, Random=random.Random)

_QUEUE = SimpleNamespace(SimpleQueue=threads.SimpleQueue, Empty=queue.Empty)


class EventLog:
    """A logger that counts events by name; see `Timeline.note`."""

    def bind(self, **_: Any) -> EventLog:
        return self

    def log(self, event: str, *_: Any, **facts: Any) -> None:
        facts.pop("exc_info", None)
        active().note(event, str(facts.pop("request_id", "")), **facts)

    debug = info = warning = error = critical = exception = log


class SilentHealth:
    """Stands in for the health server, whose port no schedule asks."""

    port = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...


@cache
def _template() -> Metrics:
    return Metrics(model="simulated", queue="simulated")


def metrics_of_a_worker(**_: Any) -> Metrics:
    """The real metrics, their children shared: to make them anew takes a tenth of a schedule."""
    metrics = copy.copy(_template())
    metrics._snapshot, metrics.registry = None, CollectorRegistry()
    return metrics


_REPLACED: tuple[tuple[object, object], ...] = (
    (time, _TIME),
    (time.monotonic, _TIME.monotonic),
    (time.sleep, _TIME.sleep),
    (threading, _THREADING),
    (queue, _QUEUE),
    (secrets, _SECRETS),
    (random, _RANDOM),
)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """All seams are in while the context lasts; `threads.activate` chooses the timeline."""
    undo: list[Callable[[], None]] = []
    replacements = {id(old): new for old, new in _REPLACED}
    try:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in ROOMS:
                _replace_in(module, replacements, undo)
        # Last: what was made in the life of a worker may not be found and taken for its source.
        _set(service.worker.process.parts, "HealthServer", SilentHealth, undo)
        _set(service.worker.process.parts, "Metrics", metrics_of_a_worker, undo)
        yield
    finally:
        for step in reversed(undo):
            step()


def _replace_in(
    module: ModuleType, replacements: dict[int, object], undo: list[Callable[[], None]]
) -> None:
    for name, value in list(vars(module).items()):
        if id(value) in replacements:
            _set(module, name, replacements[id(value)], undo)
        elif name == "_log":
            _set(module, name, EventLog(), undo)
        elif getattr(value, "__module__", None) == module.__name__:
            if isinstance(value, FunctionType):
                _replace_defaults(value, replacements, undo)
            elif isinstance(value, type):
                _replace_in_class(value, replacements, undo)


def _replace_in_class(
    owner: type, replacements: dict[int, object], undo: list[Callable[[], None]]
) -> None:
    if threading.Thread in owner.__bases__:
        bases = tuple(threads.Thread if b is threading.Thread else b for b in owner.__bases__)
        _set(owner, "__bases__", bases, undo)
    for name, value in list(vars(owner).items()):
        if isinstance(value, FunctionType):
            _replace_defaults(value, replacements, undo)
        elif isinstance(value, random.SystemRandom):
            _set(owner, name, _LateRandom(), undo)


def _replace_defaults(
    function: FunctionType, replacements: dict[int, object], undo: list[Callable[[], None]]
) -> None:
    given = function.__kwdefaults__ or {}
    changed = {name: replacements.get(id(value), value) for name, value in given.items()}
    if any(changed[name] is not value for name, value in given.items()):
        _set(function, "__kwdefaults__", changed, undo)


def _set(owner: object, name: str, value: object, undo: list[Callable[[], None]]) -> None:
    before = getattr(owner, name)
    undo.append(lambda: setattr(owner, name, before))
    setattr(owner, name, value)
