"""Requests with a target latency are counted by whether they met it."""

import pytest

from quire.wire.output import Completion, FinishReason, State
from service.worker.outgoing.completions import latency_of
from tests.service.builders import Queue, StepGate, WorkerThread, eventually


def test_requests_with_a_target_are_counted_by_whether_they_met_it(queue: Queue):
    gate = StepGate(steps=0)
    late = queue.submit((1, 2), max_tokens=2, target_latency_ms=1)
    early = queue.submit((3, 4), max_tokens=2, target_latency_ms=600_000)
    plain = queue.submit((5, 6), max_tokens=2)
    with WorkerThread(queue.settings(), before_run=gate) as worker:
        gate.step_until(
            lambda: all(queue.broker.status(n).state.is_terminal for n in (late, early, plain))
        )
        assert [queue.result(n).completion.state for n in (late, early)] == ["completed"] * 2

        def counted(latency: str) -> float:
            name = "quire_requests_targeted_total"
            return worker.metric(name, model="fake", latency=latency)

        eventually(lambda: (counted("met"), counted("missed")) == (1, 1), "both are counted")


@pytest.mark.parametrize(
    ("reason", "state", "now", "expected"),
    [
        (FinishReason.STOP, State.COMPLETED, 9.0, "met"),
        (FinishReason.LENGTH, State.COMPLETED, 11.0, "missed"),
        (FinishReason.DEADLINE, State.EXPIRED, 9.0, "missed"),
        (FinishReason.ERROR, State.FAILED, 9.0, "missed"),
        (FinishReason.CANCELLED, State.CANCELLED, 11.0, None),
        (FinishReason.REJECTED, State.FAILED, 11.0, None),
    ],
)
def test_what_each_end_says_of_the_target(reason, state, now, expected):
    completion = Completion("a", state, reason)
    assert latency_of(completion, due=10.0, now=now) == expected
    assert latency_of(completion, due=None, now=now) is None
