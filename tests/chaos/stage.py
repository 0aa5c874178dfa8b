"""Where a schedule plays: one private Redis, a lossy wire before it, worker and client processes.

A context manager that leaves nothing behind. Every wait is for something that can be seen in Redis
or in a process, never for time to pass.
"""

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import BrokerUnavailable, UnknownRequest
from quire.queue.broker import Broker
from quire.transport.connection import connect
from quire.transport.local_redis import LocalRedis
from service.worker.settings.config import EMBEDDED_MODEL
from tests.chaos import adapters, append_only, hybrid
from tests.chaos.callers import Caller, Cancellation, Wanted
from tests.chaos.clients import ClientProcess, Event
from tests.chaos.judge import judge, left_over
from tests.chaos.processes import LoggedProcess
from tests.chaos.worker import ChaosWorker
from tests.quire.proxy import Wire

#: How long anything may take on a busy machine before it counts as never.
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.005
QUEUE = "chaos"
#: Client processes that share the requests of a schedule.
NUM_CLIENTS = 2


class Stuck(Exception):
    """Something that had to come never came."""


@dataclass(frozen=True, slots=True)
class Cast:
    """The workers of a stage: their flags, and how long a step takes; None is the real model.

    `vllm_workers` says of each worker, in the order of their starts and again from the beginning,
    whether it has vLLM; such a one gets `vllm_flags`. With `is_hybrid` the real model is the hybrid
    one, and not the embedded one.
    """

    flags: tuple[str, ...]
    lease_seconds: float
    max_attempts: int
    step_seconds: float | None
    vllm_flags: tuple[str, ...] = ()
    vllm_workers: tuple[bool, ...] = ()
    is_hybrid: bool = False

    def has_vllm(self, number: int) -> bool:
        """Whether the worker of this number has vLLM."""
        kinds = self.vllm_workers
        return bool(kinds) and kinds[number % len(kinds)]


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
        self._data = Path(self._folder.name) / "redis"
        self._data.mkdir()
        self._adapters = Path(self._folder.name) / "adapters"
        model = EMBEDDED_MODEL if cast.step_seconds is None else None
        self._model_flags: tuple[str, ...] = ()
        if cast.is_hybrid:
            model = hybrid.save(Path(self._folder.name))
            self._model_flags = ("--model", str(model))
        adapters.lay_out(self._adapters, model=model)
        # Only the machine's own death takes what was written and not yet synced, and it lives. Left
        # to sync once a second, Redis would answer before it has written while the disk is slow.
        options = ("--dir", str(self._data), "--appendfsync", "no")
        self.server = LocalRedis.start(append_only=True, options=options)
        if self.server.kind in ("url", "fake"):
            raise Stuck("chaos kills its Redis: it needs a redis-server or valkey-server to start")
        self.wire = Wire(self.server.url)
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
        self.callers = [Caller(item) for item in wanted]
        self._caller_of = {caller.request_id: caller for caller in self.callers}
        self.workers: list[ChaosWorker] = []
        #: Those that live; a dead one is replaced at once.
        self.clients: list[ClientProcess] = []
        self._groups: dict[str, list[Caller]] = {}
        self._num_clients = 0
        #: How often Redis has lost data.
        self.num_losses = 0

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.kill()
        for worker in self.workers:
            if worker.is_alive:
                worker.kill()
        self.server.stop()
        self.wire.close()
        self.connection.close()
        self._folder.cleanup()

    # -- workers ------------------------------------------------------------------------------

    def start_worker(self, *doctored: str) -> ChaosWorker:
        """A new worker process, broken in the ways named."""
        name, has_vllm = f"worker-{len(self.workers)}", self.cast.has_vllm(len(self.workers))
        lease = ("--lease-seconds", str(self.cast.lease_seconds))
        attempts = ("--max-attempts", str(self.cast.max_attempts))
        flags = self.cast.vllm_flags if has_vllm else self.cast.flags
        served = ("--adapters", str(self._adapters), *self._model_flags, *flags)
        worker = ChaosWorker(
            ("--redis-url", self.wire.url, "--queue", QUEUE, *lease, *attempts, *served),
            name=name,
            log=self._log_of(name),
            step_seconds=self.cast.step_seconds,
            doctored=doctored,
            has_vllm=has_vllm,
        )
        self.workers.append(worker)
        self.outcome.figures["vllm_workers"] += has_vllm
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

    def kill_worker(self, worker: ChaosWorker) -> None:
        worker.scrape()
        worker.kill()
        self.outcome.figures["kills"] += 1
        self.outcome.figures["vllm_kills"] += worker.has_vllm

    def drain_worker(self, worker: ChaosWorker) -> None:
        """Asks a worker to end, and returns when it has."""
        worker.terminate()
        self.until(lambda: not worker.is_alive, f"the drain of {worker.name}")
        self.outcome.figures["drains"] += 1

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

    # -- clients --------------------------------------------------------------------------------

    def start_clients(self, callers: Sequence[Caller] | None = None) -> None:
        """Submits all requests, or those of these callers, and follows them, in a few processes."""
        for share in range(NUM_CLIENTS):
            if part := list(self.callers if callers is None else callers)[share::NUM_CLIENTS]:
                self._start_client(part)

    def kill_client(self, client: ClientProcess) -> None:
        """Kills a client process; another takes its requests over, as far as it had come."""
        client.kill()
        self.clients.remove(client)
        self.outcome.figures["client_kills"] += 1
        self._start_client(self._groups.pop(client.name))

    def submit_again(self, caller: Caller, broker: Broker) -> None:
        """Somebody says a request again that the queue has already."""
        answer = broker.submit(caller.wanted.request)
        self.outcome.figures["duplicate_submits"] += not answer.created
        if answer.created and not self.has_lost_data:
            self.outcome.violations.append(f"{caller.request_id}: a second submit made a second")

    def cancel(self, caller: Caller, broker: Broker) -> None:
        """Somebody wants a request to end. UnknownRequest when Redis does not have it."""
        answer = broker.cancel(caller.request_id)
        entries = tuple(self.connection.xrange(self.keys.output(caller.request_id)))
        claims = self.claims_of(caller)
        caller.cancellations.append(Cancellation(answer, entries, claims, self.num_losses))
        self.outcome.figures["cancels"] += 1

    def claims_of(self, caller: Caller) -> tuple[bytes | None, ...]:
        """The fields of its record that change with every claim of a request."""
        record = self.keys.request(caller.request_id)
        return tuple(self.connection.hmget(record, "attempts", "resumes"))

    def _start_client(self, callers: list[Caller]) -> None:
        name = f"client-{self._num_clients}"
        self._num_clients += 1
        self._groups[name] = callers
        client = ClientProcess(
            self.wire.url,
            QUEUE,
            tasks=[caller.task for caller in callers if not caller.is_through],
            hear=self._hear,
            name=name,
            log=self._log_of(name),
        )
        self.clients.append(client)

    def _hear(self, event: Event) -> None:
        self._caller_of[event.request_id].hear(event)

    # -- Redis ----------------------------------------------------------------------------------

    def trim(self, *, is_deletion: bool) -> None:
        """Somebody empties the ingress streams; or deletes them with their groups and the ranks."""
        keys = self.broker.keys
        if is_deletion:
            self.connection.delete(*keys.all_ranks)
        for stream in keys.all_ingress:
            if is_deletion:
                self.connection.delete(stream)
            elif self.connection.exists(stream):
                self.connection.xtrim(stream, maxlen=0, approximate=False)
        # Whoever looks next begins a pass; a schedule has no time for the rest between two.
        self.connection.delete(keys.survey)

    def crash_redis(self, keep: Callable[[int], int]) -> None:
        """Kills Redis, cuts its log to the size that `keep` makes of its own, and restarts it."""
        self.server.kill()
        self.outcome.figures["redis_kills"] += 1
        size = self.log_size
        kept = keep(size)
        if kept < size:
            append_only.cut(append_only.log_file(self._data), kept)
            self.num_losses += 1
            self.outcome.figures["lost_bytes"] += size - kept
        self.server.restart()

    def stall_redis(self, seconds: float) -> None:
        """Redis stands still for so long: by its clock leases run out that nobody could renew."""
        pid = self.server.pid
        assert pid is not None
        self.outcome.figures["redis_stalls"] += 1
        os.kill(pid, signal.SIGSTOP)
        try:
            # The length is the fault itself; there is nothing to see that could be waited for.
            threading.Event().wait(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    @property
    def has_lost_data(self) -> bool:
        return self.num_losses > 0

    @property
    def log_size(self) -> int:
        """Bytes of the append-only file: what was answered so far is in it."""
        return append_only.log_file(self._data).stat().st_size

    @property
    def everybody(self) -> Sequence[LoggedProcess | ClientProcess]:
        """Whoever may know why something does not come."""
        return (*self.workers, *self.clients)

    # -- watching -------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens that callers have seen."""
        return sum(len(caller.notes.token_ids) for caller in self.callers)

    @property
    def has_ended(self) -> bool:
        """There is nothing more to come for any caller who has come."""
        groups = self._groups.values()
        return bool(groups) and all(caller.is_through for group in groups for caller in group)

    def until(
        self, condition: Callable[[], bool], what: str, *, seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Returns when the condition is true. Stuck when it never is, with everybody's words."""
        pause, give_up = threading.Event(), time.monotonic() + seconds
        while time.monotonic() < give_up:
            with contextlib.suppress(BrokerUnavailable):
                if condition():
                    return
            pause.wait(POLL_SECONDS)
        words = "\n".join(f"-- {p.name} --\n{p.log_tail()}" for p in self.everybody)
        raise Stuck(f"never came: {what}\n{words}")

    # -- the end --------------------------------------------------------------------------------

    def finish(self, *, seconds: float = PATIENCE_SECONDS) -> None:
        """Waits for every end and for rest, drains the workers, and judges what is left."""
        self.resume_all()
        self.until(lambda: self.has_ended, "the end of every reader", seconds=seconds)
        self.until(self._all_have_ended, "a terminal state of every request", seconds=seconds)
        with contextlib.suppress(Stuck):
            # What is left over is named below.
            self.until(lambda: not list(left_over(self)), "rest", seconds=seconds)
        self._drain()
        self.outcome.violations += left_over(self)
        judge(self)

    def _all_have_ended(self) -> bool:
        states = set()
        for caller in self.callers:
            try:
                states.add(self.broker.status(caller.request_id).state)
            except UnknownRequest:
                # Redis has lost the submit after the reader had seen the end. Somebody else comes
                # and says it again.
                self.broker.submit(caller.wanted.request)
                return False
        return all(state.is_terminal for state in states)

    def _drain(self) -> None:
        alive = [worker for worker in self.workers if worker.is_alive]
        for worker in alive:
            worker.terminate()
        for worker in self.workers:
            code = worker.wait(PATIENCE_SECONDS)
            if code not in (0, -9):
                words = worker.log_tail(600)
                self.outcome.violations.append(f"{worker.name} ended with {code}: ...{words}")
            self.outcome.violations += worker.contradictions()

    def _log_of(self, name: str) -> Path:
        return Path(self._folder.name) / f"{name}.log"
