"""vLLM tells the same log-probabilities of prompts and choices as the native engine.

Needs vLLM, which has an environment of its own: `make test-vllm`.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RequestRejected
from engine.logprobs import Logprobs
from engine.port import RequestOutput, TokenEngine
from engine.request import FinishReason, Pooling, Priority, Request
from engine.sampling_params import SamplingParams
from quire import Client
from service.worker.model.served import ServedModel, load_model
from service.worker.settings.config import EMBEDDED_MODEL, Settings
from tests.chaos.adapters import NAMES, lay_out
from tests.service.builders import Queue, WorkerThread
from tests.service.worker.vllm.builders import BLOCK_SIZE, generate

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` has it")

#: Loading takes longer than most tests.
pytestmark = pytest.mark.timeout(900)

#: Of float32 on both sides.
TOLERANCE = 1e-4
#: Also the most tokens that are scored at once.
MAX_NUM_SEQS = 4
#: The most tokens of one prompt in a step beside others: prompts are computed in several steps.
CHUNK = 16
TEXT = "reverse: " + "pear plum fig " * 8
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (TEXT + "=", {"prompt_logprobs": 3}),
    ("12+34=", {"prompt_logprobs": 0, "temperature": 1.3}),
    ("sort: 5 3 9 1=", {}),
    (TEXT + "kiwi=", {"prompt_logprobs": 2, "prompt_logprobs_from": 70, "logprobs": 2}),
    ("count: 86 to 97=", {"prompt_logprobs": 20, "temperature": 1.3, "top_p": 0.9}),
    ("json: a=1 b=2=", {"temperature": 1.3, "logprobs": 1}),
)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    lay_out(folder, model=EMBEDDED_MODEL)
    return folder


@pytest.fixture(scope="module")
def vllm_model(adapters: Path) -> ServedModel:
    return load_model(
        Settings(
            engine="vllm",
            dtype="float32",
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_SEQS * CHUNK,
            long_prefill_token_threshold=CHUNK,
            check_invariants=True,
            kv_cache_memory_bytes=64 << 20,
            adapters=adapters,
            vllm={"enforce_eager": True, "max_model_len": 512, "block_size": BLOCK_SIZE},
        )
    )


@pytest.fixture(scope="module")
def native_model(adapters: Path) -> ServedModel:
    return load_model(Settings(dtype="float32", max_num_seqs=16, device="cpu", adapters=adapters))


def requests(model: ServedModel, name: str = "", **fields: Any) -> list[Request]:
    return [
        Request(
            f"{name} {number}",
            model.tokenizer.encode_prompt(prompt),
            SamplingParams(max_tokens=12, seed=number, **{"temperature": 0.0, **sampling}),
            arrival_time=0.0,
            **fields,
        )
        for number, (prompt, sampling) in enumerate(ASKED)
    ]


def run(engine: TokenEngine, made: list[Request]) -> list[RequestOutput]:
    for request in made:
        engine.add_request(request)
    outputs = []
    while engine.has_work():
        outputs += engine.step(time.monotonic)
    return outputs


def told(outputs: list[RequestOutput], made: list[Request]) -> list[tuple[Logprobs, ...]]:
    """What was said of each prompt, checked to come with the first token only."""
    found = []
    for request in made:
        own = [one for one in outputs if one.request_id == request.request_id]
        assert not any(one.prompt_logprobs for one in own[1:])
        number, first = request.sampling.prompt_logprobs, request.sampling.prompt_logprobs_from
        wanted = 0 if number is None else request.num_prompt_tokens - first
        assert len(own[0].prompt_logprobs) == wanted
        assert all(len(one.top) == number for one in own[0].prompt_logprobs)
        found.append(own[0].prompt_logprobs)
    return found


def largest_error(expected: list[tuple[Logprobs, ...]], found: list[tuple[Logprobs, ...]]) -> float:
    """Of the tokens, and of the best alternatives at each index, whatever their order."""
    errors = []
    for one, other in zip(expected, found, strict=True):
        for wanted, got in zip(one, other, strict=True):
            errors.append(abs(wanted.logprob - got.logprob))
            values = zip(wanted.top, got.top, strict=True)
            errors += [abs(value - other_value) for (_, value), (_, other_value) in values]
            same = dict(wanted.top)
            errors += [abs(value - same[id_]) for id_, value in got.top if id_ in same]
    assert len(errors) > 300
    return max(errors)


def test_both_say_the_same_of_prompts_in_one_batch_and_choose_the_tokens_they_chose_before(
    native_model, vllm_model
):
    native, other = requests(native_model), requests(vllm_model)
    assert other[0].num_prompt_tokens > 2 * CHUNK * MAX_NUM_SEQS - CHUNK
    expected = told(run(native_model.engine, native), native)
    found = told(run(vllm_model.engine, other), other)
    assert largest_error(expected, found) < TOLERANCE
    # The control: what is said of the prompt is far from what is said of the place behind.
    shifted = [one[:1] + one[:-1] for one in expected]
    assert largest_error(shifted, found) > 100 * TOLERANCE
    plain = requests(vllm_model)
    for request in plain:
        request.sampling = SamplingParams(
            max_tokens=12,
            seed=request.sampling.seed,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
        )
    tokens = [one.output_token_ids for one in other]
    assert list(generate(vllm_model.engine, plain).values()) == tokens
    assert [one.output_token_ids for one in native] == tokens


def test_a_prompt_in_the_prefix_cache_is_scored_whole(native_model, vllm_model):
    generate(vllm_model.engine, [requests(vllm_model, "before")[0]])
    expected_of, made = requests(native_model)[:1], requests(vllm_model)[:1]
    silent = requests(vllm_model, "silent")[:1]
    silent[0].sampling = SamplingParams(max_tokens=2)
    expected = told(run(native_model.engine, expected_of), expected_of)
    assert largest_error(expected, told(run(vllm_model.engine, made), made)) < TOLERANCE
    assert made[0].num_cached_tokens == 0
    # The control: the blocks are in the cache.
    generate(vllm_model.engine, silent)
    assert silent[0].num_cached_tokens >= 3 * BLOCK_SIZE


def test_prompts_of_adapters_are_scored_with_them(native_model, vllm_model):
    found = []
    for model in (native_model, vllm_model):
        made = [
            one
            for name in NAMES
            for one in requests(model, name, adapter=name)[:2] + requests(model, f"no {name}")[:1]
        ]
        found.append(told(run(model.engine, made), made))
    assert largest_error(*found) < TOLERANCE
    # The control: an adapter makes a difference.
    without = [one for index, one in enumerate(found[0]) if index % 3 == 2]
    with_it = [one for index, one in enumerate(found[0]) if index % 3 == 0]
    assert largest_error(without, with_it) > 100 * TOLERANCE


def test_a_prompt_that_gives_way_half_way_is_told_of_once_and_whole(native_model, vllm_model):
    engine = vllm_model.engine
    expected_of = requests(native_model)[:1]
    expected = told(run(native_model.engine, expected_of), expected_of)
    low = [
        requests(vllm_model, f"low {number}", priority=Priority.LOW)[0]
        for number in range(MAX_NUM_SEQS)
    ]
    for one in low:
        engine.add_request(one)
    outputs = engine.step(time.monotonic)
    outputs += engine.step(time.monotonic)
    assert outputs == [] and all(one.prompt_logprobs for one in low)
    outputs += run_with_urgent(vllm_model)
    victims = [one for one in low if one.num_preemptions]
    assert len(victims) == 1
    found = told(outputs, low)
    assert largest_error(expected * MAX_NUM_SEQS, found) < TOLERANCE
    assert [one.output_token_ids for one in low] == [expected_of[0].output_token_ids] * len(low)


def run_with_urgent(model: ServedModel) -> list[RequestOutput]:
    urgent = requests(model, "urgent", priority=Priority.CRITICAL)[2]
    outputs = run(model.engine, [urgent])
    assert urgent.is_finished
    return outputs


def test_one_that_gives_way_after_its_first_token_is_not_told_of_again(vllm_model):
    engine = vllm_model.engine
    low = [
        requests(vllm_model, f"low {number}", priority=Priority.LOW)[1]
        for number in range(MAX_NUM_SEQS)
    ]
    for one in low:
        engine.add_request(one)
    outputs: list[RequestOutput] = []
    while not all(one.output_token_ids for one in low):
        outputs += engine.step(time.monotonic)
    outputs += run_with_urgent(vllm_model)
    assert any(one.num_preemptions for one in low)
    told(outputs, low)


def test_of_a_resumed_request_nothing_is_told_again(vllm_model):
    whole, resumed = requests(vllm_model, "whole"), requests(vllm_model, "resumed")
    run(vllm_model.engine, whole)
    for one, other in zip(whole, resumed, strict=True):
        other.output_token_ids = one.output_token_ids[:2]
        other.__post_init__()
    outputs = run(vllm_model.engine, resumed)
    assert len(outputs) >= len(resumed)
    assert not any(one.prompt_logprobs for one in outputs)
    for one, other in zip(whole, resumed, strict=True):
        assert other.output_token_ids == one.output_token_ids


def test_an_abort_before_the_first_token_leaves_nothing_behind(native_model, vllm_model):
    engine = vllm_model.engine
    gone = requests(vllm_model)[0]
    engine.add_request(gone)
    while not gone.prompt_logprobs:
        assert engine.step(time.monotonic) == []
    engine.abort(gone.request_id)
    (ended,) = engine.step(time.monotonic)
    assert ended.finish_reason is FinishReason.CANCELLED and not ended.prompt_logprobs
    expected_of, again = requests(native_model)[:1], requests(vllm_model)[:1]
    expected = told(run(native_model.engine, expected_of), expected_of)
    found = told(run(engine, again), again)
    assert largest_error(expected, found) < TOLERANCE


def test_choices_have_the_likelihoods_of_the_native_engine_and_share_their_text(
    native_model, vllm_model
):
    found = []
    for model in (native_model, vllm_model):
        text = model.tokenizer.encode_prompt("sort: " + "9 3 5 1 " * 12 + "=")
        ends = [model.tokenizer.encode_prompt(end) for end in ("1 1 1", "9", "3 5 9 3 5 9 1")]
        made = [
            Request(
                f"choice {number}",
                [*text, *end],
                SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_from=len(text)),
                arrival_time=0.0,
                pooling=Pooling(),
            )
            for number, end in enumerate(ends)
        ]
        beside = requests(model, "beside")[:3]
        outputs = run(model.engine, made[:1] + beside) + run(model.engine, made[1:])
        for request, end in zip(made, ends, strict=True):
            (ended,) = [one for one in outputs if one.request_id == request.request_id]
            assert ended.finish_reason is FinishReason.POOLED and not ended.token_ids
            assert request.output_token_ids == [] and len(request.vector) == len(end)
        found.append([request.vector.tolist() for request in made])
        block = BLOCK_SIZE if model is vllm_model else 16
        assert [one.num_cached_tokens for one in made] == [0] + [
            (len(text) - 1) // block * block
        ] * 2
    for expected, got in zip(*found, strict=True):
        assert got == pytest.approx(expected, abs=TOLERANCE)
    flat = [sum(one) for one in found[0]]
    assert max(flat) - min(flat) > 1


def test_a_choice_that_leaves_vllm_no_room_is_refused_by_name(vllm_model):
    model_len = vllm_model.engine.config.max_model_len
    for length, is_refused in ((model_len, True), (model_len - 1, False)):
        request = Request(
            f"long {length}",
            [50 + index % 7 for index in range(length)],
            SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_from=length - 3),
            arrival_time=0.0,
            pooling=Pooling(),
        )
        if is_refused:
            with pytest.raises(RequestRejected, match="leave no room"):
                vllm_model.engine.add_request(request)
        else:
            run(vllm_model.engine, [request])
            assert request.finish_reason is FinishReason.POOLED and len(request.vector) == 3


def test_a_worker_with_vllm_publishes_what_one_with_the_native_engine_does(
    queue: Queue, native_model, vllm_model
):
    found = []
    for model in (native_model, vllm_model):
        settings = queue.settings(
            served_model_name=Path(EMBEDDED_MODEL).name, max_num_seqs=MAX_NUM_SEQS
        )
        with (
            WorkerThread(settings, load=lambda _, model=model: model),
            Client(queue.url, queue=queue.name) as client,
        ):
            sampling = {"max_tokens": 8, "temperature": 0.0, "prompt_logprobs": 2}
            handle = client.submit(TEXT + "=", sampling=sampling)
            completion = handle.result(timeout=60)
            chunks = list(handle.stream())
            assert not any(one.prompt_tokens for one in chunks[1:])
            likelihoods = client.likelihoods("12+34=", ("46", "47", "5"), timeout=60)
            found.append((completion, likelihoods))
    (native, choices), (other, other_choices) = found
    assert native.token_ids == other.token_ids
    assert [one.token_id for one in native.prompt_tokens] == [
        one.token_id for one in other.prompt_tokens
    ]
    assert other.prompt_tokens[0].logprob is None
    for one, another in zip(native.prompt_tokens[1:], other.prompt_tokens[1:], strict=True):
        assert another.logprob == pytest.approx(one.logprob, abs=TOLERANCE)
        assert another.text == one.text and len(another.top) == len(one.top) == 2
    for one, another in zip(choices, other_choices, strict=True):
        assert list(another.logprobs) == pytest.approx(list(one.logprobs), abs=TOLERANCE)


def test_one_that_vllm_itself_takes_the_blocks_of_is_told_of_once(native_model, monkeypatch):
    """The last test of this file: vLLM has one engine in a process, and this one replaces it."""
    model = load_model(
        Settings(
            engine="vllm",
            dtype="float32",
            max_num_seqs=MAX_NUM_SEQS,
            check_invariants=True,
            num_blocks=14,
            vllm={"enforce_eager": True, "max_model_len": 384, "block_size": BLOCK_SIZE},
        )
    )
    preempted = []
    scheduler = model.engine._backend._scheduler  # type: ignore[attr-defined]
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler,
        "_preempt_request",
        lambda *given, **options: (preempted.append(given), preempt(*given, **options)),
    )

    def made(of: ServedModel) -> list[Request]:
        found = [requests(of, str(number))[0] for number in range(3)]
        for number, request in enumerate(found):
            request.prompt_token_ids = request.prompt_token_ids[number:]
            request.sampling = SamplingParams(max_tokens=60, ignore_eos=True, prompt_logprobs=1)
            request.__post_init__()
        return found

    native, other = made(native_model), made(model)
    expected = told(run(native_model.engine, native), native)
    assert largest_error(expected, told(run(model.engine, other), other)) < TOLERANCE
    assert preempted
    assert [one.output_token_ids for one in other] == [one.output_token_ids for one in native]


def test_where_vllm_leaves_out_states_of_prompts_both_are_refused_by_name():
    vllm = {"enforce_eager": True, "max_model_len": 128, "kv_sharing_fast_prefill": True}
    model = load_model(Settings(engine="vllm", dtype="float32", max_num_seqs=4, vllm=vllm))
    asking, choice, plain = requests(model)[1], requests(model)[1], requests(model)[2]
    choice.pooling = Pooling()
    for request in (asking, choice):
        with pytest.raises(RequestRejected) as refused:
            model.engine.add_request(request)
        assert refused.value.field == "prompt_logprobs"
    run(model.engine, [plain])
    assert plain.num_output_tokens
