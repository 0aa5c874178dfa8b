"""vLLM with a model in two parts, each in a process of its own: the native engine's tokens.

Needs vLLM, which has an environment of its own: `make test-vllm`.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest

from engine.errors import DeviceFailed
from engine.logprobs import Logprobs
from engine.request import FinishReason, Pooling, Request
from engine.sampling_params import SamplingParams
from quire.wire.constraints import Constraint
from service.worker.model.served import ServedModel, load_model
from service.worker.settings.config import Settings
from tests.service.builders import CHECKOUT
from tests.service.worker.vllm.builders import BLOCK_SIZE, generate, requests, text_of

envs = pytest.importorskip(
    "vllm.envs", reason="vLLM is not installed here; `make test-vllm` has it"
)

#: Loading takes longer than most tests.
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores"),
]

#: The most tokens of one prompt in a step beside others.
CHUNK = 16
TENSOR_PARALLEL = {"tensor_parallel_size": 2, "enforce_eager": True}
#: On CPUs, vLLM's later stages fail without the runs that it makes for compiling and profiling.
PIPELINE_PARALLEL = {"pipeline_parallel_size": 2}


@contextmanager
def loaded(sizes: dict[str, Any]) -> Iterator[ServedModel]:
    """The embedded model in two ranks, with one core each."""
    one, other, *_ = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{one}|{other}")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        # vLLM remembers its variables once an engine has started in this process.
        envs.disable_envs_cache()
        model = load_model(
            Settings(
                engine="vllm",
                dtype="float32",
                max_num_seqs=16,
                long_prefill_token_threshold=CHUNK,
                check_invariants=True,
                vllm={"max_model_len": 512, "block_size": BLOCK_SIZE, **sizes},
            )
        )
    try:
        yield model
    finally:
        model.engine._backend._llm.engine_core.shutdown()  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=[TENSOR_PARALLEL, PIPELINE_PARALLEL], ids=["tp", "pp"])
def model(request: pytest.FixtureRequest) -> Iterator[ServedModel]:
    with loaded(request.param) as model:
        yield model


@pytest.fixture(scope="module")
def native_model() -> ServedModel:
    return load_model(Settings(dtype="float32", max_num_seqs=16, device="cpu"))


def test_two_ranks_choose_the_tokens_of_the_native_engine(model, native_model):
    native, ranks = requests(native_model), requests(model)
    assert generate(native_model.engine, native) == generate(model.engine, ranks)
    assert [one.finish_reason for one in native] == [one.finish_reason for one in ranks]


def test_what_was_begun_is_continued_with_the_same_tokens(model, native_model):
    whole = generate(native_model.engine, requests(native_model))
    resumed = requests(model)
    for request in resumed:
        request.output_token_ids = whole[request.request_id][:7]
        request.__post_init__()
    assert generate(model.engine, resumed) == whole


def test_masks_go_to_the_ranks_with_each_step(model, native_model):
    wanted = Constraint("regex", r"[a-c]{3,9}-[0-9]{2,6}", "body.regex")

    def constrained(model: ServedModel) -> list[Request]:
        return [
            Request(
                f"regex {seed}",
                model.tokenizer.encode_prompt("12+34="),
                SamplingParams(max_tokens=20, seed=seed, temperature=1.5),
                arrival_time=0.0,
                constraint=model.grammars.constraint(wanted, []),
            )
            for seed in range(6)
        ]

    made = constrained(model)
    assert generate(model.engine, made) == generate(native_model.engine, constrained(native_model))
    for one in made:
        assert re.fullmatch(r"[a-c]{3,9}-[0-9]{2,6}(<eos>)?", text_of(model, one))


def test_log_probabilities_come_back_from_the_ranks(model, native_model):
    def told(model: ServedModel) -> list[float]:
        request = requests(model)[-1]
        request.sampling = replace(request.sampling, allowed_token_ids=(), logprobs=3)
        model.engine.add_request(request)
        outputs = []
        while model.engine.has_work():
            outputs += model.engine.step(time.monotonic)
        return [one.logprob for output in outputs for one in output.logprobs]

    expected = told(native_model)
    assert len(expected) > 3
    assert told(model) == pytest.approx(expected, abs=1e-3)


def asking(model: ServedModel, *, prefix: str = "reverse: ") -> list[Request]:
    """Two prompts of several chunks, a choice, and one that asks for nothing."""
    text = model.tokenizer.encode_prompt(prefix + "pear plum fig " * 3 + "=")
    params = SamplingParams(max_tokens=9, temperature=1.2, seed=4, prompt_logprobs=2)
    scores = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_from=len(text))
    return [
        Request("long", text, params, arrival_time=0.0),
        Request("short", text[:21], params, arrival_time=0.0),
        Request("choice", [*text, *text[:5]], scores, arrival_time=0.0, pooling=Pooling()),
        Request("silent", text, SamplingParams(max_tokens=9), arrival_time=0.0),
    ]


def numbers_of(model: ServedModel, made: list[Request]) -> dict[str, list[float]]:
    """What the engine tells of each prompt, and the vectors of choices."""
    for request in made:
        model.engine.add_request(request)
    told: dict[str, list[Logprobs]] = {one.request_id: [] for one in made}
    while model.engine.has_work():
        for output in model.engine.step(time.monotonic):
            told[output.request_id] += output.prompt_logprobs
    found = {
        name: [number for one in each for number in (one.logprob, *dict(one.top).values())]
        for name, each in told.items()
    }
    vectors = {one.request_id: one.vector for one in made if one.vector is not None}
    return found | {name: vector.tolist() for name, vector in vectors.items()}


def test_log_probabilities_of_prompts_come_back_from_the_ranks(model, native_model):
    native, made = asking(native_model), asking(model)
    expected, found = numbers_of(native_model, native), numbers_of(model, made)
    assert [len(one) for one in expected.values()] == [
        3 * (made[0].num_prompt_tokens - 1),
        3 * 20,
        5,
        0,
    ]
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(numbers, abs=1e-4)
    assert made[2].finish_reason is FinishReason.POOLED
    assert [one.output_token_ids for one in made] == [one.output_token_ids for one in native]


def test_scores_of_an_ended_request_are_not_those_of_the_next_with_its_id(model, native_model):
    """With stages, a chunk is on its way when its request ends."""
    for request in asking(model):
        model.engine.add_request(request)
    model.engine.step(time.monotonic)
    model.engine.step(time.monotonic)
    for request_id in model.engine.alive_request_ids():
        model.engine.abort(request_id)
    model.engine.step(time.monotonic)
    found, expected = (
        numbers_of(of, asking(of, prefix="sort: 3 1 ")) for of in (model, native_model)
    )
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(numbers, abs=1e-4)


def test_a_row_without_a_token_ends_its_request_alone(model):
    broken, sound = requests(model)[:2]
    broken.sampling = replace(broken.sampling, allowed_token_ids=(258,), min_tokens=2)
    broken.sampling = replace(broken.sampling, stop_token_ids=(258,))
    generate(model.engine, [broken, sound])
    assert (broken.finish_reason, broken.faulty_field) == (FinishReason.REFUSED, "min_tokens")
    assert sound.finish_reason in (FinishReason.EOS, FinishReason.LENGTH)


def test_the_fingerprint_names_the_sizes(model, native_model):
    assert re.search(r"-(tp2-pp1|tp1-pp2)$", model.fingerprint)


def test_a_killed_rank_is_a_failed_device():
    before = set(psutil.Process().children(recursive=True))
    with loaded(TENSOR_PARALLEL) as model:
        model.engine.add_request(requests(model, max_tokens=200)[1])
        model.engine.step(time.monotonic)
        ranks = set(psutil.Process().children(recursive=True)) - before
        victim = next(one for one in ranks if "Worker_TP1" in " ".join(one.cmdline()))
        victim.send_signal(signal.SIGKILL)
        with pytest.raises(DeviceFailed):
            generate(model.engine, [])


def test_the_ranks_of_a_killed_worker_end():
    program = (
        "import time, tests.service.worker.vllm.test_ranks as ranks\n"
        "if __name__ == '__main__':\n"
        "    with ranks.loaded(ranks.TENSOR_PARALLEL): print('loaded', flush=True); time.sleep(600)"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", program], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert worker.stdout is not None
        assert any(line == "loaded\n" for line in worker.stdout)
        ranks = psutil.Process(worker.pid).children(recursive=True)
        assert sum("Worker_TP" in " ".join(one.cmdline()) for one in ranks) == 2
    finally:
        worker.kill()
        worker.wait()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
