"""The native engine and vLLM say the same: whole, resumed, sampled, constrained, and in a fleet.

Needs vLLM, which has an environment of its own: `make test-vllm`.
"""

import re
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.errors import DeviceFailed, ModelRefused
from engine.request import FinishReason, Priority, Request, RequestState
from engine.sampling_params import SamplingParams
from engine.vllm.invariance import refuse_if_batch_variant
from quire.wire.constraints import Constraint
from service.worker.model.served import ServedModel, load_model
from service.worker.settings.config import EMBEDDED_MODEL, Settings
from tests.chaos.adapters import NAMES, lay_out
from tests.engine.model.adapted import save_adapter
from tests.service.builders import Queue, WorkerThread
from tests.service.worker.vllm.builders import BLOCK_SIZE, PROMPTS, generate, requests, text_of

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` has it")

#: Loading takes longer than most tests.
pytestmark = pytest.mark.timeout(900)

#: Adapters whose layers have different ranks and scales.
PATTERNED = {"r": 8, "rank_pattern": {"q_proj": 16, "down_proj": 3}, "use_rslora": True}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    lay_out(folder, model=EMBEDDED_MODEL)
    save_adapter(EMBEDDED_MODEL, folder / "patterned", **PATTERNED)
    return folder


@pytest.fixture(scope="module")
def vllm_model(adapters: Path) -> ServedModel:
    return load_model(
        Settings(
            engine="vllm",
            dtype="float32",
            max_num_seqs=16,
            check_invariants=True,
            kv_cache_memory_bytes=64 << 20,
            adapters=adapters,
            vllm={"enforce_eager": True, "max_model_len": 512, "block_size": BLOCK_SIZE},
        )
    )


@pytest.fixture(scope="module")
def native_model(adapters: Path) -> ServedModel:
    return load_model(Settings(dtype="float32", max_num_seqs=16, device="cpu", adapters=adapters))


def test_both_engines_choose_the_same_tokens_and_end_for_the_same_reason(native_model, vllm_model):
    native, other = requests(native_model), requests(vllm_model)
    assert generate(native_model.engine, native) == generate(vllm_model.engine, other)
    assert [one.finish_reason for one in native] == [one.finish_reason for one in other]
    assert {one.finish_reason for one in other} == {FinishReason.EOS, FinishReason.LENGTH}


def test_what_the_native_engine_began_vllm_continues_with_the_same_tokens(native_model, vllm_model):
    whole = generate(native_model.engine, requests(native_model))
    resumed = requests(vllm_model)
    for request in resumed:
        request.output_token_ids = whole[request.request_id][:7]
        request.__post_init__()
    assert generate(vllm_model.engine, resumed) == whole


def test_requests_for_adapters_share_a_batch_and_get_the_same_tokens_in_both_engines(
    native_model, vllm_model
):
    def adapted(model: ServedModel, *, begun: dict[str, list[int]] | None = None) -> list[Request]:
        return [
            Request(
                name := f"{adapter} {temperature} {prompt}",
                model.tokenizer.encode_prompt(prompt),
                SamplingParams(max_tokens=20, seed=3, temperature=temperature, ignore_eos=True),
                arrival_time=0.0,
                adapter=adapter,
                output_token_ids=list(begun[name][:7]) if begun else [],
            )
            for adapter in (None, *NAMES, "patterned")
            for temperature in (0.0, 1.2)
            for prompt in PROMPTS[:2]
        ]

    native = generate(native_model.engine, adapted(native_model))
    assert generate(vllm_model.engine, adapted(vllm_model)) == native
    assert generate(vllm_model.engine, adapted(vllm_model, begun=native)) == native
    # Each adapter has an effect, and another one than the others.
    greedy = [tuple(tokens) for name, tokens in native.items() if f" 0.0 {PROMPTS[0]}" in name]
    assert len(greedy) == len(set(greedy)) == 4
    assert vllm_model.adapters == native_model.adapters
    assert set(vllm_model.adapters) == {*NAMES, "patterned"}


def test_a_prefix_is_shared_within_a_tenant_and_with_no_other(vllm_model):
    prompt = vllm_model.tokenizer.encode_prompt("reverse: " + "pear " * 20)
    assert len(prompt) > 2 * BLOCK_SIZE

    def cached(name: str, salt: str, **fields: Any) -> int:
        request = Request(
            name, prompt, SamplingParams(max_tokens=2), 0.0, cache_salt=salt, **fields
        )
        generate(vllm_model.engine, [request])
        return request.num_cached_tokens

    assert cached("first of a", "a") == 0
    assert cached("second of a", "a") >= 2 * BLOCK_SIZE
    assert cached("first of b", "b") == 0
    assert cached("second of b", "b") >= 2 * BLOCK_SIZE
    assert cached("with an adapter", "a", adapter=NAMES[0]) == 0


def test_an_error_of_vllm_in_a_step_is_a_failed_device(vllm_model, monkeypatch):
    def fail() -> None:
        raise RuntimeError("out of memory")

    backend = vllm_model.engine._backend  # type: ignore[attr-defined]
    monkeypatch.setattr(backend._llm, "step", fail)
    with pytest.raises(DeviceFailed, match="out of memory"):
        backend.step()


def test_a_constraint_allows_the_same_tokens_in_both_engines(native_model, vllm_model):
    wanted = Constraint("regex", r"[a-c]{3,9}-[0-9]{2,6}", "body.regex")

    def constrained(model: ServedModel, output: list[int]) -> list[Request]:
        return [
            Request(
                f"regex {seed} behind {len(output)}",
                model.tokenizer.encode_prompt("12+34="),
                SamplingParams(max_tokens=20, seed=seed, temperature=1.5),
                arrival_time=0.0,
                output_token_ids=list(output),
                constraint=model.grammars.constraint(wanted, output),
            )
            for seed in range(6)
        ]

    made = constrained(vllm_model, [])
    found = generate(vllm_model.engine, made)
    native = constrained(native_model, [])
    assert generate(native_model.engine, native) == found
    assert [one.finish_reason for one in made] == [one.finish_reason for one in native]
    for one in made:
        assert re.fullmatch(r"[a-c]{3,9}-[0-9]{2,6}(<eos>)?", text_of(vllm_model, one))
    begun = next(iter(found.values()))[:4]
    resumed = generate(vllm_model.engine, constrained(vllm_model, begun)[:1])
    assert list(resumed.values()) == [next(iter(found.values()))]


def test_log_probabilities_are_those_of_the_raw_logits_and_vllm_compiles_nothing_for_them(
    native_model, vllm_model, monkeypatch
):
    def compile_for_seconds(*_: Any) -> None:
        raise AssertionError("vLLM computes ranks, by code that it compiles at its first use")

    monkeypatch.setattr("vllm.v1.sample.sampler.batched_count_greater_than", compile_for_seconds)

    def told(model: ServedModel) -> list[Any]:
        request = requests(model)[-1]
        request.sampling = replace(request.sampling, allowed_token_ids=(), logprobs=3)
        model.engine.add_request(request)
        outputs = []
        while model.engine.has_work():
            outputs += model.engine.step(time.monotonic)
        return [one for output in outputs for one in output.logprobs]

    native, other = told(native_model), told(vllm_model)
    assert len(native) == len(other) > 3
    for expected, found in zip(native, other, strict=True):
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-3)
        assert len(found.top) == 3
        values = [value for _, value in expected.top]
        assert [value for _, value in found.top] == pytest.approx(values, abs=1e-3)


def test_an_urgent_request_preempts_a_running_one_which_then_says_the_same(vllm_model):
    (alone,) = generate(vllm_model.engine, requests(vllm_model, max_tokens=60)[8:9]).values()
    bulk = [
        replace_id(requests(vllm_model, max_tokens=60)[8], f"bulk {number}") for number in range(16)
    ]
    for request in bulk:
        request.priority = Priority.LOW
        vllm_model.engine.add_request(request)
    vllm_model.engine.step(time.monotonic)
    urgent = replace_id(requests(vllm_model)[0], "urgent")
    urgent.priority = Priority.CRITICAL
    vllm_model.engine.add_request(urgent)
    while not urgent.output_token_ids:
        vllm_model.engine.step(time.monotonic)
    assert [one.state for one in bulk].count(RequestState.PREEMPTED) == 1
    while vllm_model.engine.has_work():
        vllm_model.engine.step(time.monotonic)
    assert [one.output_token_ids for one in bulk] == [alone] * 16


def replace_id(request: Request, name: str) -> Request:
    request.request_id = name
    return request


def test_logits_that_are_not_finite_end_the_request_with_an_error(vllm_model):
    request = requests(vllm_model)[0]
    request.sampling = replace(request.sampling, allowed_token_ids=(258,), min_tokens=2)
    request.sampling = replace(request.sampling, stop_token_ids=(258,))
    vllm_model.engine.add_request(request)
    outputs = []
    while vllm_model.engine.has_work():
        outputs += vllm_model.engine.step(time.monotonic)
    assert [output.finish_reason for output in outputs] == [FinishReason.REFUSED]
    assert request.faulty_field == "min_tokens"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enforce_eagr": True}, "did you mean enforce_eager"),
        ({"logits_processors": "x"}, "the sampler is Quire's"),
        ({"gpu_memory_utilization": "much"}, "gpu-memory-utilization"),
        ({"worker_cls": "x.Y"}, "the ranks carry Quire's sampler"),
    ],
)
def test_arguments_that_vllm_or_quire_refuses(given, message):
    with pytest.raises(ModelRefused, match=message):
        load_model(Settings(engine="vllm", vllm=given))


def test_the_fingerprint_names_vllm_and_its_version(native_model, vllm_model):
    assert "-vllm-0." in vllm_model.fingerprint
    assert " " not in vllm_model.fingerprint
    assert vllm_model.fingerprint != native_model.fingerprint


@pytest.mark.parametrize("order", ["native first", "vllm first"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.0},
        {"temperature": 1.2, "seed": 5},
        {"temperature": 1.2, "seed": 5, "logprobs": 2},
        {"temperature": 1.2, "seed": 5, "regex": "[a-z ]{60,100}"},
    ],
    ids=["greedy", "seeded", "logprobs", "regex"],
)
def test_a_worker_of_each_engine_continues_what_the_other_has_begun(
    queue, native_model, vllm_model, order, parameters
):
    """The first worker drains at once in the middle of the request; the other has its engine."""
    models = [native_model, vllm_model]
    if order == "vllm first":
        models.reverse()
    prompt = tuple(native_model.tokenizer.encode_prompt("count: 100 to 400="))
    # A constraint decides where the output ends.
    endless = {} if "regex" in parameters else {"ignore_eos": True}
    submitted = {"prompt": prompt, "max_tokens": 90, **endless, **parameters}
    with WorkerThread(settings_of(queue), load=lambda _: native_model):
        alone = queue.result(queue.submit(**submitted))
    first = queue.submit(**submitted)
    with WorkerThread(settings_of(queue), load=lambda _: Slow(models[0]).model) as worker:
        queue.wait_for_tokens(first, 3)
        worker.stop()
    begun = queue.published(first)
    assert 3 <= begun < 90
    with WorkerThread(settings_of(queue), load=lambda _: models[1]):
        output = queue.result(first)
    assert output.completion.resumes == 1
    assert output.token_ids == alone.token_ids
    assert output.text == alone.text


def settings_of(queue: Queue) -> Settings:
    return queue.settings(
        served_model_name=Path(EMBEDDED_MODEL).name, drain_seconds=0.0, max_num_seqs=16
    )


class Slow:
    """A served model whose engine pauses for a moment in each step, so that a drain hits it."""

    def __init__(self, model: ServedModel) -> None:
        self._engine = model.engine
        self.model = replace(model, engine=self)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, clock: Any) -> Any:
        time.sleep(0.02)
        return self._engine.step(clock)


def test_the_native_engine_here_is_the_native_one(native_model):
    assert isinstance(native_model.engine, Engine)


def test_deterministic_is_refused_where_vllm_has_no_batch_invariant_mode():
    with pytest.raises(ModelRefused, match="deterministic: vLLM has no batch-invariant mode"):
        load_model(Settings(engine="vllm", deterministic=True))


@pytest.mark.parametrize("is_invariant", [True, False])
def test_the_check_of_deterministic_compares_what_vllm_computes(
    vllm_model, monkeypatch, is_invariant
):
    """No two sums are promised to be equal on a CPU, so the logits are replaced."""
    backend, size = vllm_model.engine._backend, vllm_model.engine.config.vocab_size

    def logits(states: torch.Tensor) -> torch.Tensor:
        rounding = 0.0 if is_invariant else 1e-6 * len(states)
        return torch.linspace(0.0, 1.0 + rounding, size).repeat(len(states), 1)

    model = backend._llm.model_executor.driver_worker.worker.model_runner.model
    monkeypatch.setattr(model, "compute_logits", logits)
    refusal = nullcontext() if is_invariant else pytest.raises(ModelRefused, match="its batch")
    with refusal:
        refuse_if_batch_variant(backend, vocab_size=size, max_num_seqs=16, max_model_len=512)
    assert vllm_model.engine.violations() == []
