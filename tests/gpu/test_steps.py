"""Right before fast: on the device, steps, samples and swaps are what they are on a CPU."""

import contextlib
import subprocess
import sys

import pytest
import torch

from engine.batch import BlockCopy
from engine.errors import ModelRefused
from engine.model.attention.reference import ReferenceAttention
from engine.model.checks.own_attention import TOLERANCES
from engine.model.device.copy_lane import CudaLane
from engine.model.device.kv_pool import KVPool, LayerShape
from engine.model.load.fast_path import WORST_TOLERANCES
from engine.model.load.load_runner import load_runner
from engine.model.run.graphs import DecodeGraphs
from engine.model.run.model_runner import ModelRunner
from engine.model.step import compute_logits, lay_out
from tests.engine.model.builders import (
    CONFIGS,
    ROOT,
    Chooser,
    generate,
    make_prompt,
    make_request,
    make_row,
    run_rows,
    save_model,
    with_seers,
)
from tests.engine.model.decoders import FAMILIES
from tests.engine.model.load.test_fused import FUSED
from tests.engine.model.sampling.test_likelihoods import drawn, with_logprobs
from tests.engine.model.sampling.test_sampler import EOS, make_logits, make_rows

DEVICE = torch.device("cuda")
DTYPES = ["float32", "float16", "bfloat16"]
MAX_NUM_SEQS, NUM_BLOCKS = 20, 160
#: Steps of every captured size and between them, in an order in which one could harm the next.
STEPS = ((9, 3, 16), (1,), (5, 6, 7, 8, 9), (120, 12), (16,) * 16, (100, *range(3, 22)), (4,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(CONFIGS["qwen3"], tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def captured(folder):
    """A runner with captured steps by the name of its precision, loaded once."""
    runners: dict[str, ModelRunner] = {}

    def runner(dtype: str) -> ModelRunner:
        if dtype not in runners:
            runners[dtype] = runner_on("cuda", folder, dtype=dtype)
        assert "captured" in runners[dtype].config_facts.fingerprint
        return runners[dtype]

    return runner


def runner_on(device: str, folder, **options) -> ModelRunner:
    values = {"dtype": "float32", "num_blocks": NUM_BLOCKS, "num_host_blocks": 16}
    return load_runner(
        folder,
        device=device,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=512,
        **(values | options),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FUSED)
def test_the_fused_form_has_the_logits_of_the_wide_path(family, dtype, tmp_path):
    """That it serves says so: at load it is compared, and left out where it is wrong."""
    runner = runner_on("cuda", save_model(FAMILIES[family], tmp_path), dtype=dtype)
    assert runner.model.name == "decoder-triton"


def fill(pool: KVPool) -> None:
    for layer in range(2):
        pool.key_cache(layer).normal_()
        pool.value_cache(layer).normal_()


def decodes(runner: ModelRunner, contexts):
    rows = [
        make_row(
            make_prompt(length, salt=index), request_id=str(index), start=length - 1,
            block_ids=range(index, NUM_BLOCKS, MAX_NUM_SEQS),
        )
        for index, length in enumerate(contexts)
    ]  # fmt: skip
    block_size = runner.kv_pool.block_size
    assert max(contexts) <= block_size * (NUM_BLOCKS // MAX_NUM_SEQS)
    return lay_out(rows, block_size=block_size, device=DEVICE)


@torch.inference_mode()
def plain(runner: ModelRunner, step) -> torch.Tensor:
    return compute_logits(
        step, model=runner.model, kv_pool=runner.kv_pool, backend=ReferenceAttention()
    ).float()


@torch.inference_mode()
def replayed(runner: ModelRunner, step) -> torch.Tensor:
    """As captured; what the plain step wrote is spoilt before, so that it must be written again."""
    for layer in range(2):
        for cache in (runner.kv_pool.key_cache(layer), runner.kv_pool.value_cache(layer)):
            blocks, offsets = (torch.from_numpy(a).to(DEVICE) for a in (step.blocks, step.offsets))
            cache[blocks, :, offsets] = torch.nan
    assert runner._graphs is not None and runner._graphs.accepts(step)
    return compute_logits(
        step, model=runner.model, kv_pool=runner.kv_pool, backend=ReferenceAttention(),
        graphs=runner._graphs,
    ).clone()  # fmt: skip


def check_same(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    precision = getattr(torch, dtype)
    median, worst = float(errors.median()), float(errors.max())
    assert median <= TOLERANCES[precision] and worst <= WORST_TOLERANCES[precision], (median, worst)


@pytest.mark.parametrize("dtype", DTYPES)
def test_replayed_steps_write_and_give_what_plain_ones_do(dtype, captured):
    runner = captured(dtype)
    fill(runner.kv_pool)
    for contexts in STEPS:
        step = decodes(runner, contexts)
        expected = plain(runner, step)
        check_same(replayed(runner, step), expected, dtype)


def test_a_replay_of_what_the_buffers_held_before_would_be_seen(captured, monkeypatch):
    runner = captured("bfloat16")
    fill(runner.kv_pool)
    replayed(runner, decodes(runner, (9, 3, 16)))
    step = decodes(runner, (5, 12, 7))
    expected = plain(runner, step)
    monkeypatch.setattr(DecodeGraphs, "_fill", lambda *arguments: None)
    with pytest.raises(AssertionError):
        check_same(replayed(runner, step), expected, "bfloat16")


def requests():
    return [
        make_request(
            str(index), make_prompt(3 + 11 * index, salt=index), max_tokens=40, seed=index,
            **({"temperature": 0.9, "top_p": 0.95} if index % 2 else {}),
        )
        for index in range(6)
    ]  # fmt: skip


def tokens_of(runner: ModelRunner, **sizes):
    return generate(runner, requests(), **sizes)


def test_in_float32_the_device_generates_what_the_cpu_generates(folder, captured):
    """Greedy and drawn, the first tokens of a prompt in plain steps and the rest in replayed."""
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = tokens_of(runner_on("cpu", folder, model_path="wide")).tokens
    assert tokens_of(captured("float32")).tokens == expected
    assert tokens_of(runner_on("cuda", folder, model_path="wide")).tokens == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_candidates", [1, 256])
def test_steps_in_flight_give_the_tokens_of_steps_that_were_waited_for(
    dtype, max_candidates, captured, monkeypatch
):
    """With one candidate most draws are decided late, and the step behind is computed again."""
    runner = captured(dtype)
    assert runner._runs_ahead
    monkeypatch.setattr(runner._sampler, "_max_candidates", max_candidates)
    ahead = tokens_of(runner).tokens
    monkeypatch.setattr(runner, "_runs_ahead", False)
    assert tokens_of(runner).tokens == ahead


def test_a_prompt_whose_first_chunks_bring_no_token_generates_what_it_would_have(captured):
    runner = captured("float32")
    whole = generate(runner, requests()[-1:])
    chunked = generate(runner, requests()[-1:], max_num_batched_tokens=16)
    assert chunked.tokens == whole.tokens
    assert chunked.snapshot.steps == whole.snapshot.steps + 3


def test_guessed_tokens_are_those_that_come_without_guesses(captured):
    """Between replayed steps, which are of single tokens, come others with rows of several."""
    runner = captured("float32")
    plain = tokens_of(runner)
    asked = with_seers(requests(), plain, {5, 17, 30})
    guessed = generate(runner, asked, num_speculative_tokens=4, max_speculative_step_tokens=32)
    assert guessed.tokens == plain.tokens
    assert guessed.snapshot.steps < plain.snapshot.steps / 2


def test_requests_that_were_preempted_generate_what_they_would_have(folder, captured):
    roomy = tokens_of(captured("float32"))
    cramped = tokens_of(runner_on("cuda", folder, num_blocks=14))
    assert cramped.snapshot.preemptions_swap + cramped.snapshot.preemptions_recompute > 0
    assert cramped.tokens == roomy.tokens


@pytest.mark.parametrize("vocabulary", [300, 151_936])
def test_the_device_draws_the_tokens_that_the_cpu_draws(vocabulary):
    rows = make_rows(5)
    logits = make_logits(len(rows), seed=5, vocabulary=vocabulary)
    expected = Chooser(EOS).sample(logits.clone(), rows)
    assert Chooser(EOS).sample(logits.to(DEVICE), rows) == expected


def test_the_device_says_of_tokens_what_the_cpu_says():
    rows = with_logprobs(make_rows(5))
    logits = make_logits(len(rows), seed=5, vocabulary=151_936)
    tokens, said = drawn(logits, rows)
    tokens_there, said_there = drawn(logits.to(DEVICE), rows)
    assert (tokens_there, said_there.keys()) == (tokens, said.keys())
    for name, one in said.items():
        assert said_there[name].logprob == pytest.approx(one.logprob, abs=1e-4)
        assert [token_id for token_id, _ in said_there[name].top] == [id_ for id_, _ in one.top]


def swapping_pool(**options) -> KVPool:
    return KVPool(
        (LayerShape(8, 128, 128),) * 4, num_blocks=64, block_size=256, dtype=torch.bfloat16,
        device="cuda", num_host_blocks=32, **options,
    )  # fmt: skip


def test_swaps_on_their_own_stream_keep_every_bit():
    pool = swapping_pool()
    for layer in range(4):
        pool.key_cache(layer).normal_()
    before = pool.key_cache(3)[32:].clone()
    places = [(7 * index) % 32 for index in range(32)]
    pool.swap_out([BlockCopy(32 + index, place) for index, place in enumerate(places)])
    pool.key_cache(3)[32:].fill_(0)
    pool.swap_in([BlockCopy(place, 32 + index) for index, place in enumerate(places)])
    assert torch.equal(pool.key_cache(3)[32:], before)


def written_between(pool: KVPool) -> float:
    """What a block is swapped out with that is written late and written over at once."""
    block = pool.key_cache(0)[40]
    torch.cuda.synchronize()
    # Cycles: long enough for a copy that does not wait to come far too early.
    torch.cuda._sleep(100_000_000)
    block.fill_(7)
    pool.swap_out([BlockCopy(40, 3)])
    block.fill_(9)
    torch.cuda.synchronize()
    pool.swap_in([BlockCopy(3, 50)])
    torch.cuda.synchronize()
    return float(pool.key_cache(0)[50].float().mean())


def test_swaps_come_after_what_was_computed_and_before_what_will_be():
    assert written_between(swapping_pool()) == 7


class Unordered(CudaLane):
    """Copies beside the computations, and nobody waits."""

    @contextlib.contextmanager
    def copying(self):
        with torch.cuda.stream(self._stream):
            yield


def test_swaps_out_of_order_would_be_seen():
    assert written_between(swapping_pool(lane=Unordered())) != 7


def test_a_step_that_runs_out_of_memory_costs_only_itself(captured, monkeypatch):
    runner = captured("bfloat16")
    row = make_row(make_prompt(9))
    expected = run_rows(runner, row)

    def forward(inputs, kv_pool):
        return torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", forward)
        with pytest.raises(torch.OutOfMemoryError):
            run_rows(runner, row)
    assert run_rows(runner, row) == expected


def test_an_error_that_outlives_its_step_is_device_failed(folder):
    """In a process of its own, whose device it spoils."""
    code = f"""
import torch
from engine.errors import DeviceFailed
from tests.engine.model.builders import make_prompt, make_row, run_rows
from tests.gpu.test_steps import runner_on

runner = runner_on("cuda", {str(folder)!r}, dtype="bfloat16")
forward = runner.model.forward
nowhere = torch.tensor([1 << 20], device="cuda")
runner.model.forward = lambda *given: forward(*given)[nowhere * 0 + nowhere]
try:
    run_rows(runner, make_row(make_prompt(9)))
except DeviceFailed as error:
    # What is left of the process may not live to its end.
    print("DeviceFailed:", error, flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert "DeviceFailed: the device failed in step 1" in ended.stdout, ended.stderr[-2000:]


def test_the_pool_takes_a_share_of_what_is_free_and_says_what_it_took(folder):
    free, total = torch.cuda.mem_get_info()
    runner = runner_on("cuda", folder, num_blocks=None)
    memory = runner.device_memory()
    assert 0 < runner.kv_pool.nbytes < free
    assert memory["total"] == total
    assert runner.kv_pool.nbytes <= memory["allocated"] <= memory["reserved"] <= total


def test_deterministic_is_kept_on_the_device_or_refused_with_the_reason(folder):
    try:
        runner = runner_on("cuda", folder, dtype="bfloat16", deterministic=True)
    except ModelRefused as reason:
        pytest.skip(str(reason))
    print(runner.config_facts.fingerprint)
    assert tokens_of(runner, max_num_seqs=1).tokens == tokens_of(runner).tokens
