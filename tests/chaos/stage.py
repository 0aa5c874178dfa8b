"""Where a schedule plays: one private Redis, a lossy wire before it, worker processes, callers.

A context manager that leaves nothing behind. Every wait is for something that can be seen in Redis
or in a process, never for time to pass.
"""

import contextlib
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire import Client
from quire.broker import Broker
from quire.connection import connect
from quire.errors import BrokerUnavailable, OutputRewound, QuireError, UnknownRequest
from quire.keys import GROUP
from quire.local_redis import LocalRedis
from tests.chaos.audit import Expected, first_difference, log_violations, read_log
from tests.chaos.callers import Caller, Wanted
from tests.chaos.proxy import Wire
from tests.chaos.worker import ChaosWorker

#: How long anything may take on a busy machine before it counts as never.
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.005
QUEUE = "chaos"
#: What the log lines of the workers are counted as.
EVENTS = {"claim lost": "fenced_commits", "log rewound": "rewinds", "leases reaped": "reaps"}


class Stuck(Exception):
    """Something that had to come never came."""


@dataclass(frozen=True, slots=True)
class Cast:
    """The workers of a stage: their flags, and how long a step takes; None is the real model."""

    flags: tuple[str, ...]
    lease_seconds: float
    max_attempts: int
    step_seconds: float | None


@dataclass(slots=True)
class Outcome:
    """What a schedule came to."""

    figures: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


class Stage:
    """See the module's words."""

    def __init__(self, cast: Cast, wanted: Sequence[Wanted]) -> None:
        self.cast = cast
        self.outcome = Outcome()
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-")
        self.server = LocalRedis.start(append_only=True)
        if self.server.kind in ("url", "fake"):
            raise Stuck("chaos kills its Redis: it needs a redis-server or valkey-server to start")
        port = int(self.server.url.rpartition(":")[2].partition("/")[0])
        self.wire = Wire(port)
        self.connection = connect(self.server.url, block_seconds=0.0)
        self.broker = Broker(
            self.connection,
            queue=QUEUE,
            lease_seconds=cast.lease_seconds,
            max_attempts=cast.max_attempts,
            retry_seconds=PATIENCE_SECONDS / 4,
        )
        self.keys = self.broker.keys
        self.broker.ensure_groups()
        self.callers = [Caller(self.wire.url, QUEUE, item) for item in wanted]
        self.workers: list[ChaosWorker] = []
        self._has_lost_data = False

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        for caller in self.callers:
            caller.stop()
        for worker in self.workers:
            if worker.is_alive:
                worker.kill()
        self.server.stop()
        self.wire.close()
        self.connection.close()
        self._folder.cleanup()

    # -- workers ------------------------------------------------------------------------------

    def start_worker(self, *, doctored: str = "") -> ChaosWorker:
        name = f"worker-{len(self.workers)}"
        lease = ("--lease-seconds", str(self.cast.lease_seconds))
        attempts = ("--max-attempts", str(self.cast.max_attempts))
        worker = ChaosWorker(
            ("--redis-url", self.wire.url, "--queue", QUEUE, *lease, *attempts, *self.cast.flags),
            name=name,
            log=Path(self._folder.name) / f"{name}.log",
            step_seconds=self.cast.step_seconds,
            doctored=doctored,
        )
        self.workers.append(worker)
        return worker

    def wait_for_workers(self) -> None:
        """Returns when every worker that lives has signed the registry as ready."""

        def all_ready() -> bool:
            ready = {info.name for info in self.broker.workers() if info.state == "ready"}
            return {worker.name for worker in self.active} <= ready

        self.until(all_ready, "workers ready")

    @property
    def active(self) -> list[ChaosWorker]:
        return [worker for worker in self.workers if worker.is_alive and not worker.is_paused]

    def pause(self, worker: ChaosWorker) -> None:
        """Stops a worker, and returns when every lease it can have held is gone or another's."""
        worker.pause()
        self.outcome.figures["pauses"] += 1
        limit = self.broker.now_ms() + self.cast.lease_seconds * 1000

        def reaped() -> bool:
            lowest = self.connection.zrange(self.keys.lease, 0, 0, withscores=True)
            return not lowest or lowest[0][1] > limit

        self.until(reaped, f"the leases of {worker.name} reaped")

    def resume_all(self) -> None:
        for worker in self.workers:
            if worker.is_paused and worker.is_alive:
                worker.resume()

    # -- Redis ----------------------------------------------------------------------------------

    def crash_redis(self, random_: random.Random, *, most_bytes: int) -> None:
        """Kills Redis, cuts up to so many bytes off its log, wherever they end, and restarts it."""
        self.server.kill()
        self.outcome.figures["redis_kills"] += 1
        (log,) = Path(self.server._directory).glob("appendonlydir/*.incr.aof")
        size = log.stat().st_size
        cut = random_.randrange(0, min(most_bytes, size // 2) + 1)
        if cut:
            truncate_log(log, size - cut)
            self._has_lost_data = True
            self.outcome.figures["lost_bytes"] += cut
        self.server.restart()

    @property
    def has_lost_data(self) -> bool:
        return self._has_lost_data

    # -- watching -------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens that callers have seen."""
        return sum(len(caller.notes.token_ids) for caller in self.callers)

    @property
    def has_ended(self) -> bool:
        return all(caller.notes.ended or caller.notes.violations for caller in self.callers)

    def until(
        self, condition: Callable[[], bool], what: str, *, seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Returns when the condition is true. Stuck when it never is, with the workers' words."""
        pause, give_up = threading.Event(), time.monotonic() + seconds
        while time.monotonic() < give_up:
            with contextlib.suppress(BrokerUnavailable):
                if condition():
                    return
            pause.wait(POLL_SECONDS)
        tails = "\n".join(f"-- {w.name} --\n{w.log_tail()}" for w in self.workers)
        raise Stuck(f"never came: {what}\n{tails}")

    def states(self) -> dict[str, str]:
        """The state of every request; `unknown` where Redis has lost the submit."""
        found = {}
        for caller in self.callers:
            try:
                found[caller.request_id] = str(self.broker.status(caller.request_id).state)
            except UnknownRequest:
                found[caller.request_id] = "unknown"
                caller.submit()
        return found

    # -- the end --------------------------------------------------------------------------------

    def finish(self, *, seconds: float = PATIENCE_SECONDS) -> None:
        """Waits for every end and for rest, drains the workers, and judges what is left."""
        self.resume_all()
        open_states = {"unknown", "scheduled", "queued", "running"}
        self.until(lambda: self.has_ended, "the end of every reader", seconds=seconds)
        self.until(
            lambda: not open_states & set(self.states().values()),
            "a terminal state of every request",
            seconds=seconds,
        )
        with contextlib.suppress(Stuck):
            # What is left over is named below.
            self.until(lambda: not list(self._left_over()), "rest", seconds=seconds)
        self._drain()
        self.outcome.violations += self._left_over()
        self.judge()

    def _drain(self) -> None:
        for worker in self.workers:
            if worker.is_alive:
                worker.terminate()
        for worker in self.workers:
            code = worker.wait(PATIENCE_SECONDS)
            if code not in (0, -9):
                self.outcome.violations.append(f"{worker.name} ended with {code}")

    def judge(self) -> None:
        """Audits every log and every reader; gathers the figures."""
        outcome = self.outcome
        for caller in self.callers:
            outcome.violations += self._judge(caller)
        for worker in self.workers:
            for event in worker.events():
                if name := EVENTS.get(event["event"]):
                    outcome.figures[name] += 1
        outcome.figures["lost_replies"] += self.wire.num_lost

    def _judge(self, caller: Caller) -> Iterator[str]:
        notes, wanted, figures = caller.notes, caller.wanted, self.outcome.figures
        entries = self.connection.xrange(self.keys.output(caller.request_id))
        expected = Expected(
            caller.request_id,
            wanted.tokens,
            wanted.text,
            may_be_cancelled=caller.cancel_answer is not None,
            must_be_cancelled=caller.cancel_answer == "cancelled" and not self._has_lost_data,
        )
        yield from notes.violations
        yield from log_violations(expected, entries, max_attempts=self.cast.max_attempts)
        log = read_log(caller.request_id, entries)
        if first_difference(notes.token_ids, log.token_ids) is not None:
            yield from self._withdrawn(caller)
        elif notes.ended and not self._has_lost_data and len(notes.token_ids) < len(log.token_ids):
            yield f"{caller.request_id}: a reader saw the end before the last tokens"
        figures["tokens"] += len(log.token_ids)
        figures["reader_rewinds"] += notes.rewinds
        figures["reader_deaths"] += notes.deaths
        figures["resubmits"] += notes.resubmits
        figures["requests"] += 1
        if log.completion is not None:
            figures[f"ended_{log.completion.state}"] += 1
            figures["resumed_requests"] += log.completion.resumes > 0
            figures["preemptions"] += log.completion.preemptions

    def _withdrawn(self, caller: Caller) -> Iterator[str]:
        """A reader that has more than the log holds must be told so when it comes back."""
        name, notes = caller.request_id, caller.notes
        if not self._has_lost_data:
            yield f"{name}: what a reader saw is no beginning of the log"
        notes.ended = False
        try:
            with Client(self.server.url, queue=QUEUE) as client:
                caller.follow_once(client)
        except OutputRewound:
            self.outcome.figures["reader_rewinds"] += 1
        except QuireError as error:
            yield f"{name}: a reader ahead of the log was told {error!r}"
        else:
            yield f"{name}: a reader ahead of the log was told nothing"

    def _left_over(self) -> Iterator[str]:
        """Whatever is not at rest."""
        connection, keys = self.connection, self.keys
        for stream in keys.all_ingress:
            if length := connection.xlen(stream):
                yield f"{stream} holds {length} entries at rest"
            if pending := connection.xpending(stream, GROUP)["pending"]:
                yield f"{stream} has {pending} pending entries at rest"
        for key in (keys.lease, keys.delay):
            if count := connection.zcard(key):
                yield f"{key} holds {count} at rest"
        for key in (keys.open, keys.counts):
            if left := connection.hgetall(key):
                yield f"{key} holds {left} at rest"
        queue_keys = {key.encode() for key in (*keys.all_ingress, keys.dead, keys.workers)}
        for key in connection.scan_iter(match=f"{keys.prefix}:*"):
            if key not in queue_keys and connection.ttl(key) == -1:
                yield f"{key} never expires"


def truncate_log(log: Path, size: int) -> None:
    """Cut an append-only file to `size` bytes, and then back to the last whole transaction.

    A server that loads a file which ends inside of a transaction leaves the beginning of it in the
    file, and the load after the next crash runs that half as a part of the next transaction. Such a
    server has not lost its tail, it has made one up; no client can mend that.
    """
    data = log.read_bytes()[:size]
    end = whole = 0
    is_open = False
    while (command := read_command(data, end)) is not None:
        name, end = command
        is_open = (is_open or name == b"MULTI") and name != b"EXEC"
        whole = whole if is_open else end
    with log.open("r+b") as file:
        file.truncate(whole)


def read_command(data: bytes, start: int) -> tuple[bytes, int] | None:
    """(name, end) of the command at `start` of an append-only file; None if it is not whole."""
    line_end = data.find(b"\r\n", start)
    if line_end < 0 or data[start : start + 1] not in (b"*", b"#"):
        return None
    if data[start : start + 1] == b"#":
        return b"", line_end + 2
    name, end = b"", line_end + 2
    for _ in range(int(data[start + 1 : line_end])):
        line_end = data.find(b"\r\n", end)
        if line_end < 0:
            return None
        begin = line_end + 2
        end = begin + int(data[end + 1 : line_end]) + 2
        if end > len(data):
            return None
        name = name or data[begin : end - 2].upper()
    return name, end
