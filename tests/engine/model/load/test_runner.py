"""The runner by hand-made batches: the order of a step, and what may not leak between requests."""

import dataclasses
import itertools
import threading
import weakref

import pytest
import torch

from engine.batch import Batch, BlockCopy, Runner
from engine.errors import DeviceFailed, ModelRefused
from engine.model.device.device_errors import is_device_failure
from engine.model.device.kv_pool import KVPool, bytes_per_block
from engine.model.kernels.build import KernelsUnavailable, best_variant, library_path
from engine.model.load import load_runner as loading
from engine.model.load.chosen import choose
from engine.model.run.model_runner import Limits
from engine.model.wide.loader import load_model
from tests.engine.model.builders import (
    VOCAB_SIZE,
    Oracle,
    make_prompt,
    make_row,
    make_runner,
    poison,
    run_rows,
)
from tests.engine.model.run.test_captured_steps import MaskedDecode


def greedy_by_hand(runner: Runner, prompt, count: int, block_ids=range(64)) -> list[int]:
    """One request, the whole prompt at once and then token by token."""
    output: list[int] = []
    start = 0
    for _ in range(count):
        row = make_row(prompt, output=output, start=start, block_ids=block_ids)
        output.append(run_rows(runner, row)["r"])
        start = row.end
    return output


def test_a_request_by_hand_generates_what_transformers_generates(runner_of, oracle):
    prompt = make_prompt(21)
    runner = runner_of("llama")
    poison(runner)
    assert greedy_by_hand(runner, prompt, 10) == oracle.greedy(tuple(prompt), 10)


def test_only_rows_that_sample_have_a_token(runner_of):
    runner = runner_of("llama")
    filling = make_row(make_prompt(9), request_id="filling", end=5, block_ids=range(8))
    sampling = make_row(make_prompt(9), request_id="sampling", block_ids=range(8, 16))
    assert set(run_rows(runner, filling, sampling)) == {"sampling"}
    assert run_rows(runner, filling) == {}


def test_a_block_may_be_swapped_out_and_reused_within_one_step(runner_of, oracle):
    """swap_out, swap_in, then the rows: any other order loses the first request."""
    runner = runner_of("llama")
    poison(runner)
    evicted, newcomer = make_prompt(8), make_prompt(7, salt=1)
    first = run_rows(runner, make_row(evicted, block_ids=[2, 3, 4]))["r"]
    run_rows(
        runner,
        make_row(newcomer, request_id="new", block_ids=[2, 3]),
        swap_out=(BlockCopy(2, 0), BlockCopy(3, 1)),
    )
    second = run_rows(
        runner,
        make_row(evicted, output=[first], start=8, block_ids=[10, 11, 12]),
        swap_in=(BlockCopy(0, 10), BlockCopy(1, 11)),
    )["r"]
    assert [first, second] == oracle.greedy(tuple(evicted), 2)


def test_a_block_may_be_swapped_out_and_another_into_its_place_within_one_step(runner_of):
    pool = runner_of("llama").kv_pool
    first, second = torch.randn(2, *pool.key_cache(0).shape[1:])
    pool.key_cache(0)[2] = second
    pool.swap_out([BlockCopy(2, 1)])
    pool.key_cache(0)[2] = first
    run_rows(runner_of("llama"), swap_out=(BlockCopy(2, 0),), swap_in=(BlockCopy(1, 2),))
    assert torch.equal(pool.key_cache(0)[2], second)
    run_rows(runner_of("llama"), swap_in=(BlockCopy(0, 3),))
    assert torch.equal(pool.key_cache(0)[3], first)


def test_padding_of_the_logits_is_never_sampled(model_folder):
    runner = make_runner(model_folder("llama"))
    runner.model.vocab_size = 20
    rows = [
        make_row(request_id=str(n), block_ids=range(4 * n, 4 * n + 4), temperature=9.0, seed=n)
        for n in range(8)
    ]
    assert max(run_rows(runner, *rows).values()) < 20


def test_a_batch_may_only_move_blocks(runner_of):
    runner = runner_of("llama")
    batch = Batch(step=1, swap_out=(BlockCopy(0, 0),))
    assert runner.run(batch) == {}


@pytest.mark.parametrize("path", ["wide", "fast"])
def test_what_is_not_a_number_in_one_request_reaches_no_other(path, runner_of, oracle):
    """A broken request leaves blocks full of NaN; their unwritten slots must not show."""
    runner = runner_of("llama", path)
    prompt = make_prompt(5)
    expected = oracle.greedy(tuple(prompt), 6)
    embeddings = embedding_of(runner)
    healthy = embeddings[200].clone()
    try:
        embeddings[200] = torch.nan
        with pytest.raises(ArithmeticError, match="broken"):
            run_rows(runner, make_row([200] * 11, request_id="broken", block_ids=range(64)))
        assert runner.kv_pool.key_cache(0)[2].isnan().any()
        assert greedy_by_hand(runner, prompt, 6) == expected
    finally:
        embeddings[200] = healthy


@pytest.mark.parametrize("path", ["wide", "fast"])
def test_a_row_that_is_not_a_number_has_no_token_and_the_others_have_theirs(path, runner_of):
    runner = runner_of("llama", path)
    embeddings = embedding_of(runner)
    healthy = embeddings[200].clone()
    good = make_row(make_prompt(5), request_id="good", block_ids=range(4))
    bad = make_row([200, 5], request_id="bad", block_ids=range(4, 8))
    expected = run_rows(runner, good)
    try:
        embeddings[200] = torch.nan
        result = runner.launch(Batch(step=1, catch_up_rows=(good, bad))).result()
        assert (result.token_ids, list(result.failures)) == (expected, ["bad"])
    finally:
        embeddings[200] = healthy


def test_block_copies_that_fail_end_the_process(runner_of):
    with pytest.raises(DeviceFailed, match="block copies of step 1 failed"):
        run_rows(runner_of("llama"), swap_out=(BlockCopy(10_000, 0),))


def test_several_models_run_in_one_process_at_once(runner_of, model_folder):
    """Interleaved on one thread and at the same time on two: a step never meets another's pool."""
    names = ("llama", "gpt2", "mistral")
    prompt = make_prompt(17)
    expected = {name: Oracle(model_folder(name)).greedy(tuple(prompt), 8) for name in names}
    found: dict[str, list[int]] = {}

    def run(name: str) -> None:
        found[name] = greedy_by_hand(runner_of(name), prompt, 8)

    for name in names:
        run(name)
    assert found == expected
    found.clear()
    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_the_fingerprint_names_what_computes_the_model_and_its_attention(model_folder):
    fingerprints = {
        make_runner(model_folder("llama"), attention_backend=name).config_facts.fingerprint
        for name in ("auto", "cpu", "reference")
    }
    assert len(fingerprints) == 3


def test_the_fingerprint_names_the_kernels_and_their_compiler(model_folder):
    """Either may change where the last bits of a sum are rounded away."""
    _, sources, compiler = library_path(best_variant()).stem.removeprefix("quire-").split("-")
    fingerprint = make_runner(model_folder("llama")).config_facts.fingerprint
    assert sources in fingerprint and compiler in fingerprint
    without = make_runner(model_folder("llama"), attention_backend="cpu").config_facts.fingerprint
    assert sources not in without and compiler not in without


def test_the_pool_is_as_large_as_the_memory_it_may_take(model_folder):
    runner = make_runner(model_folder("llama"), num_blocks=None, kv_cache_memory_bytes=1_000_000)
    assert runner.kv_pool.nbytes <= 1_000_000
    assert runner.kv_pool.nbytes + runner.kv_pool.bytes_per_block > 1_000_000


def test_by_default_the_pool_is_no_larger_than_requests_could_use(model_folder):
    runner = make_runner(model_folder("llama"), num_blocks=None, max_num_seqs=3)
    assert runner.config_facts.num_blocks == 3 * 256 // 4


def test_by_default_the_pool_takes_a_share_of_what_is_free(model_folder, monkeypatch):
    shapes = make_runner(model_folder("llama")).model.layer_shapes
    size = bytes_per_block(shapes, block_size=4, dtype=torch.float32)
    monkeypatch.setattr(
        "engine.model.load.load_runner.free_memory_bytes", lambda device: 10_000_000
    )
    runner = make_runner(model_folder("llama"), num_blocks=None, max_num_seqs=500)
    assert 0 < runner.config_facts.num_blocks < 0.4 * 10_000_000 / size


@pytest.mark.parametrize(("seconds_each", "num_made"), [(0.0, 100), (0.4, 64), (0.6, 32), (2.0, 0)])
def test_the_blocks_used_first_are_made_while_there_is_time(
    model_folder, monkeypatch, seconds_each, num_made
):
    """By a clock that moves on with every look: 32 blocks at once, 100 of the pool's 128."""
    size = make_runner(model_folder("llama")).kv_pool.bytes_per_block
    monkeypatch.setattr(loading, "TOUCHED_AT_LOAD_BYTES", 100 * size)
    monkeypatch.setattr(loading, "TOUCHED_AT_ONCE_BYTES", 32 * size)
    calls: list[range] = []
    monkeypatch.setattr(KVPool, "touch", lambda _, blocks: calls.append(blocks))
    clock = itertools.count(step=seconds_each)
    make_runner(model_folder("llama"), now=lambda: next(clock))
    assert [block for blocks in calls for block in blocks] == list(range(num_made))


def test_without_a_clock_no_memory_is_made_ahead(model_folder, monkeypatch):
    monkeypatch.setattr(KVPool, "touch", lambda _, blocks: pytest.fail(f"made {blocks}"))
    make_runner(model_folder("llama"))


def test_too_little_memory_is_refused_with_both_numbers(model_folder):
    with pytest.raises(ModelRefused, match=r"100 bytes are left .* one block takes 2048"):
        make_runner(model_folder("llama"), num_blocks=None, kv_cache_memory_bytes=100)


def test_a_pool_that_finds_no_room_is_refused_with_its_size(model_folder):
    with pytest.raises(
        ModelRefused, match=r"not enough memory for .* of 1099511627776 blocks on cpu"
    ):
        make_runner(model_folder("llama"), num_blocks=1 << 40)


class Spoilt:
    """Captures as torch does where a step asks the device: the end does not say what happened."""

    def capture(self, compute):
        with self:
            raise RuntimeError("CUDA error: operation not permitted while capturing\nSearch for")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


class Uncompiled:
    """A capture in which a kernel has to be compiled again, and cannot."""

    def capture(self, compute):
        raise KernelsUnavailable("compiling is not permitted while capturing")


@pytest.mark.parametrize("capturer", [Spoilt, Uncompiled])
def test_a_capture_that_fails_is_refused_with_what_went_wrong_first(
    capturer, model_folder, monkeypatch
):
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=32)
    chosen = choose(
        load_model(model_folder("qwen3"), dtype="float32"), attention_backend="reference",
        model_path="fast", block_size=4, adapters={}, limits=limits, deterministic=False, now=None,
    )  # fmt: skip
    monkeypatch.setattr(loading, "CudaCapturer", capturer)
    pool = KVPool(
        chosen.model.layer_shapes, num_blocks=1, block_size=4, dtype=torch.float32,
        has_spare_block=True,
    )  # fmt: skip
    with pytest.raises(ModelRefused, match=r"on cpu: .* not permitted while capturing; .*'wide'"):
        loading._graphs(dataclasses.replace(chosen, decode=MaskedDecode()), pool, limits)


@pytest.mark.parametrize(
    ("max_num_seqs", "asked", "most"),
    [(8, None, 256), (200, None, 400), (8, 77, 77), (200, 77, 77)],
)
def test_steps_have_as_many_tokens_as_suits_the_device_unless_it_is_said(
    max_num_seqs, asked, most, model_folder
):
    runner = make_runner(
        model_folder("llama"), max_num_seqs=max_num_seqs, max_num_batched_tokens=asked
    )
    assert runner.config_facts.max_num_batched_tokens == most


@pytest.mark.parametrize(
    ("error", "sticky"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA error in the text of something else"), False),
    ],
)
def test_running_out_of_memory_is_ordinary_and_a_poisoned_device_is_not(error, sticky):
    assert is_device_failure(error) is sticky


def embedding_of(runner):
    wide = getattr(runner.model, "model", None)
    return runner.model.embedding if wide is None else wide.get_input_embeddings().weight


class Failing:
    """A model whose forward pass raises what it is told to."""

    vocab_size = VOCAB_SIZE
    reads_unwritten_slots = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def forward(self, inputs, kv_pool):
        raise self._error


def test_a_sticky_error_of_the_forward_pass_becomes_device_failed(model_folder):
    runner = make_runner(model_folder("llama"))
    row = make_row()
    runner.model = Failing(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(DeviceFailed, match="illegal memory access"):
        run_rows(runner, row)
    runner.model = Failing(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        run_rows(runner, row)


def test_a_failed_step_holds_none_of_its_tensors_while_its_error_is_looked_at(model_folder):
    held = []

    class Hoarding(Failing):
        def forward(self, inputs, kv_pool):
            activations = torch.zeros(1)
            held.append(weakref.ref(activations))
            raise self._error

    runner = make_runner(model_folder("llama"))
    runner.model = Hoarding(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run_rows(runner, make_row())
    assert raised.value.__traceback__ is not None
    assert held[0]() is None


@pytest.mark.parametrize(("quota", "expected"), [("max", 3), ("200000", 2), ("900000", 3)])
def test_a_runner_has_no_more_threads_than_its_container_has_processors(
    quota, expected, tmp_path, model_folder, monkeypatch
):
    (tmp_path / "cpu.max").write_text(f"{quota} 100000")
    monkeypatch.setattr(loading, "CGROUP", tmp_path)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        make_runner(model_folder("llama"))
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
