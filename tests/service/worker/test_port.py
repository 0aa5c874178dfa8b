"""A worker needs no more of an engine than `engine.port` says: another engine can serve a queue."""

from collections import deque
from dataclasses import replace
from functools import partial

import pytest

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import DuplicateRequest
from engine.fake_runner import fake_next_token
from engine.output.stopping import finish_reason_of
from engine.port import Clock, RequestOutput
from engine.request import Activity, FinishReason, Request, RequestState, take_text
from engine.stats import EngineSnapshot
from service.worker.model.served import ServedModel
from service.worker.settings.config import Settings
from tests.service.builders import (
    Queue,
    StepGate,
    WorkerThread,
    expected_tokens,
    fake_model,
    text_of,
)
from tests.service.fake_model import NEVER, VOCAB_SIZE

VOCABULARY = [token_id for token_id in range(VOCAB_SIZE) if token_id not in NEVER]


#: What the gate of a test records in place of a batch.
NOTHING = Batch(step=0)


class OneByOne:
    """An engine with nothing but the port: a list of requests, each of which gets one token a step.

    It shares no scheduler, no cache and no runner with the native one; the tokens are those of the
    fake model.
    """

    def __init__(self, config: EngineConfig, before_step: StepGate) -> None:
        self.config = config
        self._before_step = before_step
        self._requests: dict[str, Request] = {}
        self._aborts: deque[tuple[str, FinishReason, str | None]] = deque()
        self._steps = self._generated = 0

    def add_request(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise DuplicateRequest(request.request_id)
        if request.text is not None:
            for token_id in request.output_token_ids:
                request.text.append(token_id)
            request.text.take_text(final=False)
        self._requests[request.request_id] = request

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        *,
        error: str | None = None,
    ) -> None:
        self._aborts.append((request_id, reason, error))

    def step(self, clock: Clock) -> list[RequestOutput]:
        outputs = []
        while self._aborts:
            request_id, reason, error = self._aborts.popleft()
            request = self._requests.get(request_id)
            if request is not None:
                outputs.append(self._end(request, reason, error))
        if self._requests:
            self._before_step(NOTHING)
            self._steps += 1
        outputs += [self._advance(request, clock) for request in [*self._requests.values()]]
        return outputs

    def has_work(self) -> bool:
        return bool(self._requests or self._aborts)

    def alive_request_ids(self) -> list[str]:
        return list(self._requests)

    def take_activities(self) -> dict[str, Activity]:
        return {}

    def snapshot(self) -> EngineSnapshot:
        zero = dict.fromkeys(EngineSnapshot.__slots__, 0)
        known = {
            "max_num_seqs": self.config.max_num_seqs,
            "max_num_batched_tokens": self.config.max_num_batched_tokens,
            "num_running": len(self._requests),
            "num_blocks": 1,
            "generated_tokens": self._generated,
            "steps": self._steps,
            "last_step": None,
        }
        return EngineSnapshot(**(zero | known))

    def violations(self) -> list[str]:
        return []

    def _advance(self, request: Request, clock: Clock) -> RequestOutput:
        times = request.times
        times.first_scheduled = times.first_scheduled or clock()
        start = request.num_output_tokens
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        token_id = fake_next_token(tokens, request.sampling.seed, VOCABULARY)
        request.output_token_ids.append(token_id)
        self._generated += 1
        stops = request.text is not None and request.text.append(token_id)
        times.first_token = times.first_token or clock()
        reason = finish_reason_of(request, self.config, stop_string_found=stops)
        if reason is not None:
            times.finished = clock()
            del self._requests[request.request_id]
        text = take_text(request, final=reason is not None)
        request.finish_reason = reason
        return RequestOutput(request, start, (token_id,), text, reason)

    def _end(self, request: Request, reason: FinishReason, error: str | None) -> RequestOutput:
        del self._requests[request.request_id]
        request.state, request.finish_reason = RequestState.FINISHED, reason
        text = "" if reason is FinishReason.RELEASED else take_text(request, final=True)
        return RequestOutput(request, request.num_output_tokens, (), text, reason, error)


def native_model(settings: Settings, gate: StepGate) -> ServedModel:
    served = fake_model(settings, before_run=gate)
    assert isinstance(served.engine, Engine)
    return served


def other_model(settings: Settings, gate: StepGate) -> ServedModel:
    """The fake model, whose tokens the other engine computes."""
    served = fake_model(settings)
    return replace(served, engine=OneByOne(served.engine.config, gate))


def test_another_engine_serves_a_queue_with_the_tokens_of_the_native_one(queue: Queue):
    ids = {queue.submit((n, 2, 3), max_tokens=12): (n, 2, 3) for n in range(1, 6)}
    with WorkerThread(queue.settings(), load=partial(other_model, gate=StepGate())):
        for request_id, prompt in ids.items():
            output = queue.result(request_id)
            expected = expected_tokens(prompt, max_tokens=12)
            assert output.completion.finish_reason == "length"
            assert output.token_ids == expected
            assert output.text == text_of(expected)


@pytest.mark.parametrize(
    ("first", "second"), [(native_model, other_model), (other_model, native_model)]
)
def test_each_engine_continues_what_the_other_has_begun(queue: Queue, first, second):
    """A drain releases the request in the middle; the second worker has the other engine."""
    request_id = queue.submit((7, 2, 3), max_tokens=900)
    gate = StepGate(steps=8)
    with WorkerThread(queue.settings(drain_seconds=0.0), load=partial(first, gate=gate)) as worker:
        queue.wait_for_tokens(request_id, 5)
        worker.worker.stop()
        gate.step_to_end_of(worker)
    assert 5 <= queue.published(request_id) < 900
    with WorkerThread(queue.settings(), load=partial(second, gate=StepGate())):
        output = queue.result(request_id)
    assert output.completion.resumes == 1
    assert output.token_ids == expected_tokens((7, 2, 3), max_tokens=900)


def test_a_request_that_another_engine_computes_can_be_cancelled(queue: Queue):
    request_id = queue.submit((1, 2, 3), max_tokens=900)
    gate = StepGate(steps=1)
    with WorkerThread(queue.settings(), load=partial(other_model, gate=gate)):
        queue.wait_for_tokens(request_id, 1)
        queue.broker.cancel(request_id)
        gate.step_until(lambda: queue.broker.status(request_id).state == "cancelled")
    assert (
        queue.result(request_id).token_ids
        == expected_tokens((1, 2, 3), max_tokens=900)[: queue.published(request_id)]
    )
