"""The engine over vLLM with a fake of vLLM: the queue, the classes and the ends are ours."""

import pytest

from engine.config import EngineConfig
from engine.errors import DuplicateRequest, RequestRejected
from engine.fake_runner import fake_generation
from engine.port import RequestOutput
from engine.request import Activity, FinishReason, Priority, Request, RequestState
from engine.sampling_params import SamplingParams
from engine.vllm.engine import VllmEngine
from engine.vllm.row import GuardedConstraint
from tests.engine.vllm.fake_vllm import VOCAB_SIZE, FakeVllm

EOS_ID = 0
NEVER = (EOS_ID,)


def engine_with(*, num_blocks: int = 64, max_num_seqs: int = 4) -> tuple[VllmEngine, FakeVllm]:
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=200,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS_ID}),
        block_size=4,
        max_num_seqs=max_num_seqs,
        check_invariants=True,
    )
    backend = FakeVllm(num_blocks, 4)
    return VllmEngine(config, backend), backend


def request(
    name: str, *, max_tokens: int = 6, output=(), arrival: float = 0.0, **fields
) -> Request:
    return Request(
        name,
        [1, 2, 3],
        SamplingParams(max_tokens=max_tokens),
        arrival_time=arrival,
        output_token_ids=list(output),
        **fields,
    )


def expected(num_tokens: int) -> list[int]:
    return list(
        fake_generation(
            [1, 2, 3], num_tokens=num_tokens, seed=0, vocab_size=VOCAB_SIZE, never=NEVER
        )
    )


def run(engine: VllmEngine, *, steps: int = 100) -> list[RequestOutput]:
    outputs = []
    while engine.has_work() and steps:
        outputs += engine.step(lambda: 1.0)
        steps -= 1
    return outputs


def test_each_token_is_reported_once_and_the_last_output_has_the_reason():
    engine, _ = engine_with()
    engine.add_request(request("a"))
    outputs = run(engine)
    assert [id_ for output in outputs for id_ in output.token_ids] == expected(6)
    assert [output.start for output in outputs] == [0, 1, 2, 3, 4, 5]
    assert [output.finish_reason for output in outputs] == [None] * 5 + [FinishReason.LENGTH]
    assert engine.snapshot().generated_tokens == 6
    assert engine.violations() == []


def test_a_request_with_published_tokens_continues_behind_them():
    engine, _ = engine_with()
    engine.add_request(request("a", output=expected(6)[:4]))
    outputs = run(engine)
    assert [(output.start, output.token_ids) for output in outputs] == [
        (4, (expected(6)[4],)),
        (5, (expected(6)[5],)),
    ]


def test_a_complete_output_ends_without_a_token_and_never_reaches_vllm():
    engine, backend = engine_with()
    engine.add_request(request("a", output=expected(6)))
    (output,) = run(engine)
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.LENGTH)
    assert backend.added == []


def test_an_abort_frees_the_slot_and_reports_no_token_after_it():
    engine, backend = engine_with(max_num_seqs=1)
    engine.add_request(request("a", max_tokens=100))
    engine.add_request(request("b"))
    assert len(engine.step(lambda: 1.0)) == 1
    engine.abort("a")
    engine.abort("a")
    outputs = run(engine)
    assert outputs[0].finish_reason is FinishReason.CANCELLED
    assert {output.request_id for output in outputs[1:]} == {"b"}
    assert backend.requests == {}


def test_a_deadline_ends_a_waiting_and_a_running_request():
    engine, _ = engine_with(max_num_seqs=1)
    engine.add_request(request("a", max_tokens=100, deadline=5.0))
    engine.add_request(request("b", deadline=5.0))
    engine.step(lambda: 1.0)
    ended = {output.request_id: output.finish_reason for output in engine.step(lambda: 5.0)}
    assert ended == dict.fromkeys("ab", FinishReason.DEADLINE)


def test_an_urgent_request_takes_the_slot_of_a_bulk_one_which_later_ends_with_the_same_tokens():
    engine, backend = engine_with(max_num_seqs=2)
    bulk = [request(name, priority=Priority.LOW, max_tokens=8) for name in ("a", "b")]
    for one in bulk:
        engine.add_request(one)
    outputs = engine.step(lambda: 1.0)
    engine.add_request(request("c", priority=Priority.HIGH, max_tokens=2, arrival=1.0))
    outputs += engine.step(lambda: 1.0)
    assert bulk[1].state is RequestState.PREEMPTED
    assert engine.snapshot().num_preempted == 1
    outputs += run(engine)
    assert backend.added == ["a", "b", "c", "b"]
    for one in bulk:
        assert one.output_token_ids == expected(8)
    ends = [output.request_id for output in outputs if output.finish_reason]
    assert ends[0] == "c"


def test_what_requests_do_is_told_when_it_changes():
    engine, _ = engine_with(max_num_seqs=1)
    engine.add_request(request("a", priority=Priority.LOW, max_tokens=4))
    assert engine.take_activities() == {}
    engine.step(lambda: 1.0)
    assert engine.take_activities() == {"a": Activity.DECODING}
    engine.step(lambda: 1.0)
    assert engine.take_activities() == {}
    engine.add_request(request("b", priority=Priority.HIGH, max_tokens=3, arrival=1.0))
    engine.step(lambda: 1.0)
    assert engine.take_activities() == {"a": Activity.PREEMPTED, "b": Activity.DECODING}


def test_a_request_of_the_same_class_preempts_nobody():
    engine, backend = engine_with(max_num_seqs=1)
    engine.add_request(request("a", max_tokens=4))
    engine.step(lambda: 1.0)
    engine.add_request(request("b"))
    engine.step(lambda: 1.0)
    assert backend.added == ["a"]


def test_an_urgent_request_takes_the_blocks_of_a_bulk_one():
    engine, backend = engine_with(num_blocks=3, max_num_seqs=4)
    engine.add_request(request("a", priority=Priority.LOW, max_tokens=9))
    for _ in range(6):
        engine.step(lambda: 1.0)
    assert backend.num_free_blocks == 0
    urgent = request("b", priority=Priority.CRITICAL, max_tokens=2, arrival=1.0)
    engine.add_request(urgent)
    outputs = run(engine)
    ends = [output.request_id for output in outputs if output.finish_reason]
    assert ends == ["b", "a"]
    assert backend.added == ["a", "b", "a"]


def test_a_row_without_a_token_ends_its_request_alone():
    engine, backend = engine_with()
    engine.add_request(request("a"))
    engine.add_request(request("b"))
    backend.failing = {"a": "no finite logit to choose from"}
    outputs = run(engine)
    failed = [output for output in outputs if output.request_id == "a"]
    assert [(one.token_ids, one.finish_reason, one.error) for one in failed] == [
        ((), FinishReason.ERROR, "no finite logit to choose from")
    ]
    assert [id_ for one in outputs if one.request_id == "b" for id_ in one.token_ids] == expected(6)


def test_what_can_never_be_served_and_what_is_alive_are_refused():
    engine, _ = engine_with()
    engine.add_request(request("a"))
    with pytest.raises(DuplicateRequest):
        engine.add_request(request("a"))
    with pytest.raises(RequestRejected, match="there is no adapter"):
        engine.add_request(request("b", adapter="none"))


def test_an_error_of_a_constraint_forbids_every_token_and_is_no_exception():
    class Broken:
        field = "regex"
        failure = None

        def allowed(self, output_token_ids):
            raise KeyError("a defect")

    guarded = GuardedConstraint(Broken(), vocab_size=VOCAB_SIZE)
    assert not guarded.allowed([]).any()
    assert guarded.failure is not None
    assert "a defect" in guarded.failure.message
