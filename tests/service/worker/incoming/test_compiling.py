"""Requests that wait for their constraints: nobody waits with them, and they can end meanwhile."""

import contextlib
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.constraint import Constraint as EngineConstraint
from engine.constraint import TokenBitmask
from engine.request import FinishReason, Priority, Request
from engine.sampling_params import SamplingParams
from quire.client.client import Client
from quire.errors import InvalidRequest, RequestFailed
from quire.wire.constraints import Constraint
from service.worker.constraints.grammars import CompiledGrammars
from service.worker.incoming.compiling import REPLAY_TOKENS, Compiling
from service.worker.observe.vitals import Vitals
from service.worker.outgoing.outbox import Outbox
from tests.service.builders import (
    PATIENCE_SECONDS,
    VOCAB_SIZE,
    Queue,
    WorkerThread,
    eventually,
    expected_tokens,
    make_settings,
    stays,
)
from tests.service.processes import WorkerProcess
from tests.service.worker.constraints.test_probe import BOMB, is_running
from tests.service.worker.outgoing.test_delivery import make_delivery

WANTED = Constraint("regex", "[a-z]*", "body.regex")


class AnyToken:
    """Allows everything; notes how far it was asked."""

    def __init__(self, asked: list[tuple[str, int]] | None = None, name: str = "") -> None:
        self._asked = asked if asked is not None else []
        self._name = name

    def allowed(self, output_token_ids: Sequence[int]) -> TokenBitmask:
        return np.full((VOCAB_SIZE + 7) // 8, 255, dtype=np.uint8)

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        self._asked.append((self._name, len(output_token_ids)))
        return False

    def draft(self, output_token_ids: Sequence[int], guess: Sequence[int]) -> Sequence[int]:
        return ()

    def assuming(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> EngineConstraint:
        return self

    failure = None


class SlowGrammars:
    """Compiles nothing before a test opens the gate. Each constraint's value is its name."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun: list[str] = []
        self.asked: list[tuple[str, int]] = []

    def is_ready(self, wanted: Constraint, /) -> bool:
        return False

    def constraint(self, wanted: Constraint, output: Sequence[int], /) -> EngineConstraint:
        self.begun.append(wanted.value)
        assert self.gate.wait(PATIENCE_SECONDS), "a closed gate was forgotten"
        if wanted.value == "refused":
            raise InvalidRequest(wanted.field, "no")
        if wanted.value == "broken":
            raise OSError("no")
        self.asked.append((wanted.value, len(output)))
        return AnyToken(self.asked, wanted.value)


class Mailbox:
    """What an engine loop was handed."""

    def __init__(self) -> None:
        self.mail: list[tuple[str, FinishReason | None]] = []
        self.requests: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.mail.append((request.request_id, None))

    def add_aborted(self, request: Request, reason: FinishReason) -> None:
        self.mail.append((request.request_id, reason))

    def abort(self, key: str, reason: FinishReason) -> None:
        self.mail.append((f"abort {key}", reason))


class Bench:
    """A Compiling with its thread, between nothing and nobody."""

    def __init__(self, clock: Any = time.monotonic) -> None:
        self.outbox, self.engine, self.grammars = Outbox(), Mailbox(), SlowGrammars()
        self.compiling = Compiling(
            self.outbox,
            engine=self.engine,
            vitals=Vitals(stall_timeout_seconds=60.0),
            settings=make_settings("redis://127.0.0.1:1/0", "none"),
            clock=clock,
        )
        self.compiling.serve(self.grammars)
        self._thread = threading.Thread(target=self.compiling.run)

    def __enter__(self) -> "Bench":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.grammars.gate.set()
        self.compiling.stop()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def begin(self, name: str, *, value: str = "", output: int = 0, **fields: Any) -> None:
        self.outbox.open(make_delivery(name))
        request = Request(
            request_id=name,
            prompt_token_ids=[1],
            sampling=SamplingParams(max_tokens=9),
            arrival_time=0.0,
            output_token_ids=[7] * output,
            **fields,
        )
        self.compiling.begin(request, Constraint("regex", value or name, "body.regex"))


def test_a_request_reaches_the_engine_with_its_constraint():
    with Bench() as bench:
        bench.begin("a")
        eventually(lambda: bench.grammars.begun == ["a"])
        assert bench.engine.mail == []
        assert bench.compiling.num_waiting(Priority.LOW) == 1
        bench.grammars.gate.set()
        eventually(lambda: bench.engine.mail == [("a", None)])
        assert isinstance(bench.engine.requests["a"].constraint, AnyToken)
        assert bench.compiling.num_waiting(Priority.LOW) == 0


@pytest.mark.parametrize(
    ("value", "code", "field"),
    [("refused", "invalid_request", "body.regex"), ("broken", "internal_error", None)],
)
def test_one_that_can_have_no_constraint_ends_and_the_next_goes_on(value, code, field):
    with Bench() as bench:
        bench.grammars.gate.set()
        bench.begin("a", value=value)
        bench.begin("b")
        eventually(lambda: bench.engine.mail == [("b", None)])
        ended, item = bench.outbox.take(timeout=1.0)[0]
        assert ended.key == "a" and item.completion.error.code == code
        assert item.completion.error.field == field


def test_better_classes_come_first_and_each_in_its_order():
    with Bench() as bench:
        bench.begin("first")
        eventually(lambda: bench.grammars.begun == ["first"])
        for name, priority in (("b", 0), ("a", 1), ("d", 3), ("c", 0)):
            bench.begin(name, priority=Priority(priority))
        assert [bench.compiling.num_waiting(least) for least in Priority] == [5, 3, 1, 1]
        bench.grammars.gate.set()
        eventually(lambda: len(bench.engine.mail) == 5)
        assert bench.grammars.begun == ["first", "d", "a", "b", "c"]


def test_long_outputs_are_replayed_by_turns_so_that_no_other_waits_for_the_whole():
    with Bench() as bench:
        bench.begin("long", output=3 * REPLAY_TOKENS + 1)
        eventually(lambda: bench.grammars.begun == ["long"])
        bench.begin("other", output=2 * REPLAY_TOKENS)
        bench.grammars.gate.set()
        eventually(lambda: len(bench.engine.mail) == 2)
        slices = [("long", 1), ("other", 1), ("long", 2), ("other", 2), ("long", 3)]
        assert bench.grammars.asked == [
            *((name, count * REPLAY_TOKENS) for name, count in slices),
            ("long", 3 * REPLAY_TOKENS + 1),
        ]
        assert bench.engine.mail == [("other", None), ("long", None)]


def test_who_is_cancelled_while_waiting_is_ended_by_the_engine_at_once_and_never_computed():
    with Bench() as bench:
        bench.begin("under way")
        eventually(lambda: bench.grammars.begun)
        bench.begin("in line")
        for name in ("under way", "in line", "unknown"):
            bench.compiling.abort(name, FinishReason.CANCELLED)
        told = [(name, FinishReason.CANCELLED) for name in ("under way", "in line")]
        assert bench.engine.mail == [*told, ("abort unknown", FinishReason.CANCELLED)]
        bench.grammars.gate.set()
        bench.begin("next")
        eventually(lambda: bench.engine.mail[3:] == [("next", None)])
        assert bench.grammars.begun == ["under way", "next"]


def test_a_deadline_ends_the_wait(clock):
    with Bench(clock) as bench:
        bench.begin("first")
        eventually(lambda: bench.grammars.begun)
        bench.begin("late", deadline=clock.now + 5.0)
        bench.begin("in time", deadline=clock.now + 50.0)
        clock.now += 6.0
        bench.grammars.gate.set()
        eventually(lambda: len(bench.engine.mail) == 3)
        assert ("late", FinishReason.DEADLINE) in bench.engine.mail
        assert {("first", None), ("in time", None)} < set(bench.engine.mail)


def test_a_stop_releases_all_that_wait_and_all_that_come_after():
    with Bench() as bench:
        bench.begin("under way")
        eventually(lambda: bench.grammars.begun)
        bench.begin("in line")
        bench.compiling.stop()
        bench.begin("late")
        names = ("under way", "in line", "late")
        assert bench.engine.mail == [(name, FinishReason.RELEASED) for name in names]


# -- in a worker ----------------------------------------------------------------------------------


def test_a_worker_claims_and_serves_while_a_constraint_is_compiled(queue: Queue):
    grammars = SlowGrammars()
    with WorkerThread(queue.settings(claim_batch=2), grammars=grammars) as worker:
        waiting = [queue.submit(regex=f"{n}", max_tokens=3) for n in range(3)]
        eventually(lambda: grammars.begun)
        for prompt in range(1, 8):
            request_id = queue.submit((prompt,), max_tokens=4)
            assert queue.result(request_id).token_ids == expected_tokens((prompt,), max_tokens=4)
        assert [queue.published(request_id) for request_id in waiting] == [0, 0, 0]
        # They are held, but no worker takes the whole queue of such requests.
        more = [queue.submit(regex=f"more {n}", max_tokens=3) for n in range(9)]
        held = worker.worker._outbox
        eventually(lambda: held.num_claims >= 4, "a line of its own is filled")
        stays(lambda: held.num_claims <= 5)
        grammars.gate.set()
        for request_id in [*waiting, *more]:
            assert str(queue.result(request_id).completion.finish_reason) == "length"
    assert worker.exit_code == 0
    queue.assert_at_rest()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_caller_need_not_wait_for_the_end_of_a_compilation(queue: Queue, how: str):
    grammars = SlowGrammars()
    with WorkerThread(queue.settings(), grammars=grammars):
        under_way = queue.submit(regex="under way", max_tokens=3)
        eventually(lambda: grammars.begun)
        now_ms = queue.broker.now_ms()
        # Long enough to be claimed before, on a busy machine too.
        deadline = {"deadline_ms": now_ms + 3000} if how == "deadline" else {}
        request_id = queue.submit(regex="in line", max_tokens=3, **deadline)
        queue.wait_for_state(request_id, "running")
        if how == "cancel":
            queue.broker.cancel(request_id)
        else:
            # The thread is at the gate: it looks again when the compilation is done.
            eventually(lambda: queue.broker.now_ms() > now_ms + 3000)
            grammars.gate.set()
        assert (
            str(queue.result(request_id).completion.finish_reason)
            == {
                "cancel": "cancelled",
                "deadline": "deadline",
            }[how]
        )
        grammars.gate.set()
        queue.result(under_way)
    queue.assert_at_rest()


def test_a_drain_releases_what_waits_for_its_constraint(queue: Queue):
    grammars = SlowGrammars()
    with WorkerThread(queue.settings(drain_seconds=0.0), grammars=grammars) as first:
        request_id = queue.submit((1, 2), regex="a", max_tokens=5)
        eventually(lambda: grammars.begun)
        first.worker.stop()
        queue.wait_for_state(request_id, "queued")
        grammars.gate.set()
        assert first.wait() == 0
    assert queue.broker.status(request_id).attempts == 0
    with WorkerThread(queue.settings(), grammars=grammars):
        assert queue.result(request_id).token_ids == expected_tokens((1, 2), max_tokens=5)


# -- in a process ---------------------------------------------------------------------------------


def children_of(process_id: int) -> set[int]:
    children = set[int]()
    for each in Path(f"/proc/{process_id}/task").glob("*/children"):
        # A thread may end before it is asked.
        with contextlib.suppress(OSError):
            children.update(map(int, each.read_text().split()))
    return children


def peak_mib(process_id: int) -> int:
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


@pytest.mark.processes
def test_a_schema_that_would_hang_a_worker_is_refused_while_others_are_served(queue: Queue):
    with (
        WorkerProcess(queue) as worker,
        Client(queue.url, queue=queue.name) as client,
    ):
        client.submit([9], sampling={"max_tokens": 1}).result(timeout=PATIENCE_SECONDS)
        before = peak_mib(worker.process.pid)
        long = client.submit([8, 9], sampling={"max_tokens": 900, "seed": 0})
        queue.wait_for_tokens(long.request_id, 1)
        bomb = client.submit([1, 2], sampling={"max_tokens": 5, "json_schema": BOMB.value})
        queue.wait_for_state(bomb.request_id, "running")
        published, served = queue.published(long.request_id), 0
        while queue.broker.status(bomb.request_id).state == "running":
            one = client.submit([3, served], sampling={"max_tokens": 5, "seed": 0})
            one.result(timeout=PATIENCE_SECONDS)
            served += 1
        with pytest.raises(RequestFailed, match=r"takes more than .* to compile") as refused:
            bomb.result(timeout=PATIENCE_SECONDS)
        assert refused.value.field == "body.json_schema"
        # Some ten are served in the second that it takes; one alone would have waited for it.
        assert served >= 3
        assert queue.published(long.request_id) > published
        assert peak_mib(worker.process.pid) < before + 100
        # The next one is served by another process, and none of them outlives the worker.
        good = client.submit([1, 2], sampling={"max_tokens": 9, "regex": "[0-9]{3}"})
        assert good.result(timeout=PATIENCE_SECONDS).text.isdigit()
        children = children_of(worker.process.pid)
        assert len(children) == 1
        worker.signal(signal.SIGKILL)
        worker.wait()
        eventually(lambda: not any(map(is_running, children)), "its process is gone")


@pytest.mark.processes
def test_a_worker_that_is_told_to_end_leaves_no_compilation_behind(queue: Queue):
    # With less memory, the compilation could end before the signal is heard.
    bounds = ("--constraint-compile-seconds", "60", "--constraint-compile-bytes", str(1 << 32))
    flags = ("--drain-seconds", "0", *bounds)
    with WorkerProcess(queue, *flags) as worker:
        request_id = queue.submit((1, 2), json_schema=BOMB.value)
        children = eventually(lambda: children_of(worker.process.pid), "it compiles")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert not any(map(is_running, children))
    assert queue.broker.status(request_id).state == "queued"
    assert queue.broker.status(request_id).attempts == 0


def test_the_embedded_settings_serve_what_others_send(queue: Queue):
    """The control of the bomb: the real library, in a worker, with a constraint of each kind."""
    with WorkerThread(queue.settings(constraint_compile_seconds=5.0)) as worker:
        grammars = worker.worker._parts.compiling._grammars
        request_id = queue.submit(choice=["yes", "no"], max_tokens=9)
        assert queue.result(request_id).text in ("yes", "no")
        assert not isinstance(grammars, CompiledGrammars), "a probe comes first"
