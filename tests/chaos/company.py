"""Plays many schedules and controls at once, each in one of a few processes.

A schedule mostly waits, for leases and for processes; so several share a core well. Those with the
embedded model are played by a process of their own, whose workers find torch imported, and those
with the hybrid model by another one; those with vLLM by two, whose workers find vLLM loaded; and
those with a batch by two.
"""

import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context

from quire.transport.local_redis import URL_VARIABLE
from tests.chaos import forking
from tests.chaos.controls import run_control
from tests.chaos.hybrid import HYBRID
from tests.chaos.real import VLLM
from tests.chaos.schedules import draw_plan, is_real, play
from tests.chaos.sinks.controls import SINKS_LIVE, run_sinks_control
from tests.chaos.sinks.schedules import draw_batch, has_batch, play_batch
from tests.chaos.stage import Outcome, Stuck

#: The kinds of plays: a drawn schedule, a control with its law broken, the same with it intact.
SCHEDULE, CONTROL, INTACT = "schedule", "control", "intact"
#: What workers are forked with: a fake model, the embedded one, that and vLLM, or a hybrid one; or
#: beside a fake model gateways, batchers and notifiers.
FAKE, REAL, SINKS = "fake", "real", "sinks"
#: Processes that play at once. One that waits for a real model uses a core, and vLLM takes memory.
MOST_PROCESSES = {FAKE: 64, REAL: 1, HYBRID: 1, VLLM: 2, SINKS: 2}


@dataclass(frozen=True, slots=True)
class Play:
    """One thing to play: the seed of a schedule, or the name of a control.

    With the engine `vllm` workers of a schedule have vLLM, some or all, and those of a control all;
    with `hybrid` all have the hybrid model.
    """

    kind: str
    name: str
    engine: str = ""

    @property
    def stock(self) -> str:
        """What the processes of its workers are forked with."""
        if self.engine:
            return self.engine
        if self.has_batch:
            return SINKS
        return REAL if self.is_real else FAKE

    @property
    def is_real(self) -> bool:
        """It is played with the embedded model."""
        if self.engine:
            return self.engine == VLLM
        return self.kind == SCHEDULE and is_real(int(self.name))

    @property
    def has_batch(self) -> bool:
        """It is played with a batch over HTTP, its batchers and notifiers."""
        if self.engine:
            return False
        return has_batch(int(self.name)) if self.kind == SCHEDULE else self.name in SINKS_LIVE

    @property
    def replay(self) -> str:
        """The command that plays it again."""
        flag = f"--seed {self.name}" if self.kind == SCHEDULE else f"--control '{self.name}'"
        engine = f" --engine {self.engine}" if self.engine else ""
        return f"python -m tests.chaos {flag}{engine}"


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a play.

    For a control `violations` is what it was caught by; for all else there must be none. One that
    broke down shows nothing, and a control that did was not caught.
    """

    play: Play
    seconds: float
    violations: tuple[str, ...]
    figures: Counter[str] = field(default_factory=Counter)
    breakdown: str = ""

    @property
    def has_failed(self) -> bool:
        return bool(self.sentences)

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is wrong with it."""
        if self.breakdown:
            return (self.breakdown,)
        if self.play.kind != CONTROL:
            return self.violations
        return () if self.violations else ("the audit did not name the broken law",)


class Company:
    """A few processes that play. A context manager; what is under way at its exit is played out."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pools: dict[str, ProcessPoolExecutor] = {}

    def __enter__(self) -> "Company":
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def perform(self, plays: Sequence[Play], *, seconds: float = 0.0) -> Iterator[Report]:
        """The reports as they come; with `seconds`, no play is begun after them."""
        give_up = time.monotonic() + seconds if seconds else None
        futures: list[Future[Report]] = [
            self._pool(play.stock).submit(perform, play) for play in plays
        ]
        for future in as_completed(futures):
            if future.cancelled():
                continue
            yield future.result()
            if give_up is not None and time.monotonic() > give_up:
                for waiting in futures:
                    waiting.cancel()

    def _pool(self, stock: str) -> ProcessPoolExecutor:
        if stock not in self._pools:
            self._pools[stock] = ProcessPoolExecutor(
                max_workers=min(self._jobs, MOST_PROCESSES[stock]),
                mp_context=get_context("spawn"),
                initializer=_begin,
                initargs=(stock,),
            )
        return self._pools[stock]


def perform(play: Play) -> Report:
    """Plays it, and says how it went."""
    began, breakdown = time.monotonic(), ""
    try:
        outcome = _outcome_of(play)
    except Stuck as error:
        outcome, breakdown = Outcome(), str(error)
    except Exception:  # noqa: BLE001 - one play that breaks down must not take the others along.
        outcome, breakdown = Outcome(), f"the play broke down: {traceback.format_exc()}"
    seconds = time.monotonic() - began
    return Report(play, seconds, tuple(outcome.violations), outcome.figures, breakdown)


def _outcome_of(what: Play) -> Outcome:
    if what.has_batch:
        if what.kind == SCHEDULE:
            return play_batch(draw_batch(int(what.name)))
        return run_sinks_control(what.name, intact=what.kind == INTACT)
    if what.kind == SCHEDULE:
        return play(draw_plan(int(what.name), what.engine))
    return run_control(what.name, intact=what.kind == INTACT, engine=what.engine)


def _begin(stock: str) -> None:
    """What a playing process does first."""
    # Whoever ends the company ends every play, and a play leaves nothing behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    forking.end_with_parent(signal.SIGTERM)
    # A play kills its Redis, so it starts one, even where one is named.
    os.environ.pop(URL_VARIABLE, None)
    if stock in (REAL, HYBRID):
        forking.prepare_for_the_model(is_hybrid=stock == HYBRID)
    elif stock == VLLM:
        forking.prepare_for_vllm()
    elif stock == SINKS:
        forking.prepare_for_sinks()
