"""A thread that hangs: who notices, what becomes of its claims, and how the process ends."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest

from service.worker.observe import vitals
from service.worker.observe.vitals import LOOP_PASS_SECONDS, Vitals, WorkerState
from service.worker.process.watch import EXIT_HUNG, Watch
from tests.service.builders import (
    CHECKOUT,
    PATIENCE_SECONDS,
    SHORT_LEASE_SECONDS,
    Clock,
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
    private_redis,
)
from tests.service.fake_worker import TREACLE, TREACLE_TOKENS
from tests.service.processes import WorkerProcess

STALL_SECONDS = 120.0
HOURS = 36_000.0  # How long a machine may sleep.


class Watched:
    """Vitals and their watch, on a clock that a test turns, one look a second."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.ended: list[str] = []
        self.vitals = Vitals(stall_timeout_seconds=STALL_SECONDS, clock=clock)
        self.vitals.state = WorkerState.READY
        self.watch = Watch(self.vitals, end=self.ended.append)

    def run(self, seconds: float) -> None:
        """Time in which the process runs, and nothing shows a sign of life."""
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            self.watch.check()

    def sleep(self, seconds: float) -> None:
        """Time in which the process stands still: it is stopped, or its machine is asleep."""
        self.clock.now += seconds

    @property
    def overdue(self) -> list[str]:
        return [silence.thread for silence in self.vitals.overdue]


@pytest.fixture
def watched(clock: Clock) -> Watched:
    return Watched(clock)


# -- what counts as a hang ------------------------------------------------------------------------


def test_a_thread_that_goes_round_no_more_is_named_and_the_worker_is_not_alive(watched: Watched):
    watched.vitals.beat("publisher")
    watched.run(vitals.THREAD_PASS_SECONDS)
    assert (watched.overdue, watched.vitals.is_alive) == ([], True)
    watched.run(1)
    assert (watched.overdue, watched.vitals.is_alive) == (["publisher"], False)
    watched.vitals.beat("publisher")
    assert (watched.overdue, watched.vitals.is_alive) == ([], True)


def test_a_rest_that_was_told_of_is_no_hang_and_what_is_longer_is(watched: Watched):
    watched.vitals.beat("heartbeat", rest_seconds=5000.0)
    watched.run(5000.0 + vitals.THREAD_PASS_SECONDS)
    assert watched.overdue == []
    watched.run(1)
    assert watched.overdue == ["heartbeat"]


def test_a_turn_of_many_calls_shows_a_sign_of_life_before_each(watched: Watched):
    for _ in watched.vitals.each("keeper", range(5)):
        watched.run(vitals.THREAD_PASS_SECONDS)
        assert watched.overdue == []
    watched.run(1)
    assert watched.overdue == ["keeper"]


@pytest.mark.parametrize("error", [None, ValueError("it died")])
def test_a_thread_that_has_ended_is_waited_for_no_more(watched: Watched, error: Exception | None):
    def live() -> None:
        watched.vitals.passed(is_busy=True)
        watched.run(STALL_SECONDS + 1)
        assert watched.overdue == ["engine"]
        if error is not None:
            raise error

    with contextlib.suppress(ValueError):
        watched.vitals.during("engine", live)
    # As while the last commits wait for Redis, after a drain.
    watched.run(HOURS)
    assert (watched.overdue, watched.ended) == ([], [])


# -- when it ends the process ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thread", "is_busy", "limit"),
    [
        ("engine", True, STALL_SECONDS),
        ("engine", False, LOOP_PASS_SECONDS),
        ("intake-3", False, vitals.THREAD_PASS_SECONDS),
    ],
)
def test_what_is_silent_for_twice_its_limit_ends_the_process(
    watched: Watched, thread: str, is_busy: bool, limit: float
):
    if thread == "engine":
        watched.vitals.passed(is_busy=is_busy)
    else:
        watched.vitals.beat(thread)
    watched.run(2 * limit)
    assert watched.ended == []
    watched.run(1)
    assert watched.ended == [thread]


def test_a_step_that_is_long_or_a_model_that_loads_ends_no_process(watched: Watched):
    watched.run(HOURS)
    watched.vitals.passed(is_busy=False)
    watched.vitals.passed(is_busy=True)
    for _ in range(5):
        watched.run(2 * STALL_SECONDS - 1)
        watched.vitals.progressed()
    assert watched.ended == []


def test_an_engine_late_at_every_look_and_yet_going_on_ends_no_process(clock: Clock):
    vitals, ended = Vitals(stall_timeout_seconds=0.1, clock=clock), list[str]()
    watch = Watch(vitals, end=ended.append)
    vitals.passed(is_busy=True)
    for _ in range(100):
        clock.now += 1.0
        assert not vitals.is_alive
        watch.check()
        vitals.progressed()
    assert ended == []


@pytest.mark.parametrize("num_naps", [1, 20])
def test_a_process_that_stood_still_is_given_the_time_that_it_did_not_have(
    watched: Watched, num_naps: int
):
    """A step that takes nearly the stall timeout by itself, and any sleep in the middle of it."""
    watched.vitals.passed(is_busy=True)
    watched.vitals.beat("publisher")
    for _ in range(num_naps):
        watched.sleep(HOURS)
        watched.run((STALL_SECONDS - 1) // num_naps)
        watched.vitals.beat("publisher")
    assert (watched.overdue, watched.ended) == (["engine"], [])
    watched.vitals.progressed()
    watched.run(STALL_SECONDS)
    assert watched.ended == []
    # The control: it does hang after the sleep.
    watched.sleep(HOURS)
    watched.run(STALL_SECONDS + 1)
    assert watched.ended == ["engine"]


# -- the threads of a worker ----------------------------------------------------------------------


class Hang:
    """A call that does not return before it is let go."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self._is_over, self.has_begun = call, threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.has_begun.set()
        assert self._is_over.wait(4 * PATIENCE_SECONDS), "a hang was forgotten"
        return self._call(*args, **kwargs)

    def let_go(self) -> None:
        self._is_over.set()


#: What each thread hangs in: which object of the worker, and which of its methods.
CALLS = {
    "main": (lambda worker: worker, "_open"),
    "intake-0": (lambda worker: worker._parts.places[0].reading, "peek"),
    "publisher": (lambda worker: worker._parts.brokers[0], "commit"),
    "heartbeat": (lambda worker: worker._parts.brokers[0], "heartbeat"),
    "keeper": (lambda worker: worker._parts.brokers[0], "beat_worker"),
}


@contextlib.contextmanager
def hanging(worker: WorkerThread, thread: str) -> Iterator[Hang]:
    owner, method = CALLS[thread][0](worker.worker), CALLS[thread][1]
    hang = Hang(getattr(owner, method))
    setattr(owner, method, hang)
    try:
        yield hang
    finally:
        hang.let_go()


def offset_clock(worker: WorkerThread) -> Clock:
    """Lets the worker's vitals be read as if more time had passed."""
    offset = Clock()
    worker.worker.vitals._clock = lambda: monotonic() + offset.now
    for silence in worker.worker.vitals.overdue:
        worker.worker.vitals.beat(silence.thread)
    return offset


def overdue(worker: WorkerThread) -> list[str]:
    return [silence.thread for silence in worker.worker.vitals.overdue]


@pytest.mark.parametrize("thread", CALLS)
def test_a_thread_that_hangs_is_told_by_livez_and_ends_the_process(queue: Queue, thread: str):
    request_id = queue.submit((4, 4), max_tokens=30)
    gate = StepGate(steps=3)
    worker = WorkerThread(queue.settings(stall_timeout_seconds=HOURS), before_run=gate)
    clock = offset_clock(worker)
    ended: list[str] = []
    watch = Watch(worker.worker.vitals, end=ended.append)
    with worker, hanging(worker, thread) as hang:
        assert hang.has_begun.wait(PATIENCE_SECONDS)
        assert worker.get("/livez")[0] == 200
        clock.now += vitals.THREAD_PASS_SECONDS + 1.0
        # The others have not shown a sign of life in that time either, and do at once.
        eventually(lambda: overdue(worker) == [thread])
        status, body = worker.get("/livez")
        assert (status, f'"overdue": ["{thread}"]' in body) == (503, True)
        assert worker.metric("quire_threads_overdue", thread=thread.partition("-")[0]) == 1
        for _ in range(int(vitals.THREAD_PASS_SECONDS)):
            watch.check()
        assert ended == []
        watch.check()
        assert ended == [thread]
        hang.let_go()
        gate.open()
        eventually(lambda: worker.get("/livez")[0] == 200)
        assert queue.result(request_id).token_ids == expected_tokens((4, 4), max_tokens=30)


def test_a_publisher_that_hangs_loses_its_claims_and_another_worker_goes_on(queue: Queue):
    request_id = queue.submit((4, 5), max_tokens=20)
    short = {"lease_seconds": SHORT_LEASE_SECONDS}
    worker = WorkerThread(queue.settings(stall_timeout_seconds=HOURS, **short))
    clock = offset_clock(worker)
    with worker, hanging(worker, "publisher") as hang:
        assert hang.has_begun.wait(PATIENCE_SECONDS)
        clock.now += vitals.THREAD_PASS_SECONDS + 1.0
        with WorkerThread(queue.settings(**short)):
            output = queue.result(request_id)
        assert output.token_ids == expected_tokens((4, 5), max_tokens=20)
        hang.let_go()
        worker.wait_for_end("lost")
    assert queue.result(request_id) == output


def test_a_redis_that_is_away_is_no_hang_however_long_it_is():
    """Every thread has something to do there: to read, to commit, to renew, to sign."""
    gate, ended = StepGate(steps=5), list[str]()
    with private_redis() as server:
        queue = Queue.at(server.url)
        request_id = queue.submit((4, 6), max_tokens=30)
        worker = WorkerThread(queue.settings(stall_timeout_seconds=1e8), before_run=gate)
        clock, watch = offset_clock(worker), Watch(worker.worker.vitals, end=ended.append)
        with worker:
            queue.wait_for_tokens(request_id, 4)
            server.kill()
            gate.allow(1)
            failed = {"op": "commit", "kind": "connection"}
            eventually(lambda: worker.metric("quire_redis_errors_total", **failed) >= 1)
            # Who compiles constraints asks nothing of Redis, and is watched like the others.
            assert set(worker.worker.vitals._signs) == {*CALLS, "engine", "compiler"}
            for _ in range(5):
                clock.now += HOURS
                watch.check()
                # Each finds Redis away, and goes round.
                eventually(lambda: worker.get("/livez")[0] == 200)
            server.restart()
            gate.open()
            assert queue.result(request_id).token_ids == expected_tokens((4, 6), max_tokens=30)
    assert ended == []


def test_a_worker_that_waits_for_redis_at_its_end_does_not_hang_either():
    gate, ended = StepGate(steps=5), list[str]()
    with private_redis() as server:
        queue = Queue.at(server.url)
        request_id = queue.submit((4, 7), max_tokens=30)
        settings = queue.settings(flush_seconds=600.0, stall_timeout_seconds=1e8)
        worker = WorkerThread(settings, before_run=gate)
        clock, watch = offset_clock(worker), Watch(worker.worker.vitals, end=ended.append)
        with worker:
            queue.wait_for_tokens(request_id, 4)
            server.kill()
            gate.open()
            worker.worker.stop()
            worker.worker.stop()
            eventually(lambda: "engine" not in worker.worker.vitals._signs, "its end")
            for _ in range(3):
                clock.now += HOURS
                watch.check()
                eventually(lambda: overdue(worker) == [])
            server.restart()
            assert worker.wait() == 0
        assert ended == []
        whole = expected_tokens((4, 7), max_tokens=30)
        with WorkerThread(queue.settings()):
            assert queue.result(request_id).token_ids == whole


# -- the process ----------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_worker_whose_device_hangs_ends_by_itself_and_its_request_goes_on_elsewhere(queue: Queue):
    request_id = queue.submit(TREACLE, max_tokens=30)
    with WorkerProcess(queue, "--stall-timeout-seconds", "1") as hung:
        assert hung.wait() == EXIT_HUNG
    (told,) = [line for line in hung.log if line["event"] == "worker hangs"]
    assert (told["thread"], told["level"]) == ("engine", "critical")
    assert "tests/service/fake_worker.py" in told["stack"]
    # It held the request to the end: what it had published is there, and nothing was given back.
    status = queue.broker.status(request_id)
    assert (status.published, status.resumes) == (TREACLE_TOKENS, 0)
    queue.take_all_away()
    with WorkerThread(queue.settings()):
        output = queue.result(request_id)
    assert output.token_ids == expected_tokens(TREACLE, max_tokens=30)
    assert (output.completion.resumes, output.completion.attempts) == (1, 1)
    queue.assert_at_rest()


@pytest.mark.processes
def test_a_worker_that_drains_while_its_device_hangs_ends_as_well(queue: Queue):
    request_id = queue.submit(TREACLE, max_tokens=30)
    flags = ("--stall-timeout-seconds", "1", "--drain-seconds", "3600")
    with WorkerProcess(queue, *flags) as hung:
        queue.wait_for_tokens(request_id, TREACLE_TOKENS)
        hung.signal(signal.SIGTERM)
        assert hung.wait() == EXIT_HUNG


@pytest.mark.processes
def test_a_worker_that_was_stopped_for_long_goes_on(queue: Queue):
    request_id = queue.submit((7, 8), max_tokens=60)
    with WorkerProcess(queue, "--stall-timeout-seconds", "1", held_at=5) as stopped:
        queue.wait_for_tokens(request_id, 5)
        stopped.signal(signal.SIGSTOP)
        queue.take_all_away()
        long_enough = monotonic() + 3.0  # The process may be silent for two while it runs.
        with WorkerProcess(queue, "--burst") as heir:
            assert heir.wait() == 0
        eventually(lambda: monotonic() > long_enough)
        stopped.signal(signal.SIGCONT)
        later = queue.submit((7, 9), max_tokens=10)
        assert queue.result(later).token_ids == expected_tokens((7, 9), max_tokens=10)
        stopped.signal(signal.SIGTERM)
        assert stopped.wait() == 0
    assert queue.result(request_id).token_ids == expected_tokens((7, 8), max_tokens=60)


@pytest.mark.processes
def test_a_log_that_takes_no_line_does_not_keep_the_process_from_its_end():
    program = (
        "import os\n"
        "from service.shared.logs import configure_logs\n"
        "from service.worker.process.watch import end_process\n"
        "configure_logs(style='json')\n"
        "def fill():\n"
        "    os.set_blocking(2, False)\n"
        "    try:\n"
        "        while True: os.write(2, b'x')\n"
        "    except BlockingIOError:\n"
        "        os.set_blocking(2, True)\n"
        "fill()\n"
        "end_process('main')"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=CHECKOUT, stderr=subprocess.PIPE) as process:
        assert process.wait(PATIENCE_SECONDS) == EXIT_HUNG
        assert process.stderr is not None
        assert set(process.stderr.read()) == {ord("x")}
