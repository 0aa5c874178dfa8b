"""Right before fast: on the device, everything computes what the reference computes."""

import pytest
import torch

from engine.batch import BlockCopy
from engine.errors import ModelRefused
from engine.model.attention import DECODES, choose_backend
from engine.model.attention.cuda import CudaAttention
from engine.model.attention.interface import AttentionNeeds, AttentionUnavailable
from engine.model.attention.self_check import (
    CHECKED_DECODES,
    AttentionCheckFailed,
    DecodesOnly,
    self_check,
)
from engine.model.kv_pool import KVPool, LayerShape
from engine.model.runner import load_runner
from tests.engine.model.builders import CONFIGS, generate, make_prompt, make_request, save_model

HALVES = [torch.float16, torch.bfloat16]
NEEDS = AttentionNeeds(
    heads=16, kv_heads=8, key_dim=128, value_dim=128, has_window=True, has_softcap=False
)
PROMPTS = [make_prompt(3 + 11 * index, salt=index) for index in range(6)]


@pytest.mark.parametrize("dtype", HALVES)
def test_the_backend_for_cuda_is_found_and_is_the_reference(dtype):
    backend, block_size = choose_backend(
        "auto", dtype=dtype, device="cuda", block_size=16, needs=NEEDS
    )
    assert backend.name == "cuda"
    assert block_size in (16, 256)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("make", DECODES)
def test_an_attention_of_captured_steps_is_the_reference(make, dtype, block_size):
    """A refusal of small pages is an answer; wrong numbers are not."""
    try:
        decode = make()
        self_check(
            DecodesOnly(decode),
            dtype=dtype,
            device="cuda",
            block_size=block_size,
            needs=NEEDS,
            rows=CHECKED_DECODES,
        )
    except AttentionUnavailable as reason:
        pytest.skip(str(reason))
    except AttentionCheckFailed as reason:
        if make is not CudaAttention or block_size == CudaAttention.block_multiple:
            raise
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(CONFIGS["qwen3"], tmp_path_factory.mktemp("qwen3"))


def runner_on(device: str, folder, **options):
    values = {"dtype": "float32", "num_blocks": 32, "num_host_blocks": 16}
    return load_runner(
        folder,
        device=device,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        **(values | options),
    )


def tokens_of(runner, **sizes) -> dict[str, list[int]]:
    requests = [
        make_request(str(index), prompt, max_tokens=40) for index, prompt in enumerate(PROMPTS)
    ]
    return generate(runner, requests, **sizes).tokens


def test_in_float32_the_device_generates_what_the_cpu_generates(folder):
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = tokens_of(runner_on("cpu", folder, model_path="wide"))
    assert tokens_of(runner_on("cuda", folder)) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_replayed_steps_write_and_give_what_plain_ones_do(dtype, folder):
    """The first steps of a prompt are plain; with one row at a time the rest is replayed."""
    captured = runner_on("cuda", folder, dtype=dtype)
    assert "captured" in captured.config_facts.fingerprint
    first = tokens_of(captured)
    captured._graphs = None
    same = sum(a == b for a, b in zip(flat(first), flat(tokens_of(captured)), strict=True))
    # Random weights have near-ties, after which two right continuations part.
    assert same / len(flat(first)) > 0.5


def flat(tokens: dict[str, list[int]]) -> list[int]:
    return [token for name in sorted(tokens) for token in tokens[name]]


def test_swaps_on_their_own_stream_keep_every_bit():
    pool = KVPool(
        (LayerShape(8, 128, 128),) * 4,
        num_blocks=64,
        block_size=256,
        dtype=torch.bfloat16,
        device="cuda",
        num_host_blocks=32,
    )
    for layer in range(4):
        pool.key_cache(layer).normal_()
    before = pool.key_cache(3)[32:].clone()
    pool.swap_out([BlockCopy(32 + index, index) for index in range(32)])
    pool.key_cache(3)[32:].fill_(0)
    pool.swap_in([BlockCopy(index, 32 + index) for index in range(32)])
    assert torch.equal(pool.key_cache(3)[32:], before)


def test_deterministic_is_kept_on_the_device_or_refused_with_the_reason(folder):
    try:
        runner = runner_on("cuda", folder, dtype="bfloat16", deterministic=True)
    except ModelRefused as reason:
        pytest.skip(str(reason))
    else:
        together = tokens_of(runner)
        alone = {
            str(index): generate(runner, [make_request(str(index), prompt, max_tokens=40)]).tokens[
                str(index)
            ]
            for index, prompt in enumerate(PROMPTS)
        }
        assert together == alone
