"""An 8-bit KV cache: a slot is a function of its token, so the batch changes no output."""

import pytest
import torch

from engine.errors import ModelRefused
from engine.model.attention import BACKENDS
from engine.model.attention.quantized import QuantizedAttention
from engine.model.decoder.decoder_config import NotSupported
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.device.kv_pool import KVPool, LayerShape, Slots, num_blocks_for
from engine.model.device.quantized_kv import QUANTIZED, dequantize, quantize, scales_of
from engine.model.load.chosen import _cache_dtype
from engine.model.load.fast_path import WrongLogits, check_against
from tests.engine.model.attention.test_attention import MIXED, make_scene
from tests.engine.model.builders import (
    NUM_TOKENS,
    PROMPTS,
    generate,
    make_request,
    make_runner,
    requests_of,
)
from tests.engine.model.decoder.test_kernels import (
    ALONE,
    CHUNKED,
    DTYPES,
    LONG_CONFIGS,
    LONG_LLAMA,
)
from tests.engine.model.decoder.test_kernels import PROMPTS as LONG_PROMPTS
from tests.engine.model.decoders import run_steps, shared_forms


def stored(heads: torch.Tensor) -> torch.Tensor:
    """What a pool has of [tokens, kv_heads, dim] after it was written."""
    tokens, kv_heads, dim = heads.shape
    pool = KVPool([LayerShape(kv_heads, dim, dim)], num_blocks=2, block_size=8, dtype=QUANTIZED)
    slots = torch.arange(tokens)
    pool.write(0, key=heads, value=-heads, slots=Slots(slots // 8, slots % 8))
    found = dequantize(pool.key_cache(0), 8, torch.float32).transpose(1, 2).flatten(0, 1)[:tokens]
    of_values = dequantize(pool.value_cache(0), 8, torch.float32).transpose(1, 2).flatten(0, 1)
    assert torch.equal(of_values[:tokens], -found)
    return found


def test_a_number_is_off_by_half_a_step_of_its_own_token_and_head_at_most():
    heads = torch.randn(13, 3, 20, generator=torch.Generator().manual_seed(0))
    heads = heads * torch.logspace(-4, 4, 13)[:, None, None]
    steps = heads.abs().amax(dim=-1, keepdim=True) / 127
    assert ((stored(heads) - heads).abs() <= 0.501 * steps).all()
    assert not stored(torch.zeros(1, 2, 4)).any()
    assert not stored(torch.full((1, 2, 4), 1e-38)).any()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_own_token_not_a_number(broken):
    heads = torch.ones(3, 2, 4)
    heads[1, 0, 2] = broken
    _, scales = quantize(heads)
    assert scales.isnan().nonzero().tolist() == [[1, 0]]


def test_the_memory_of_a_bfloat16_cache_has_nearly_twice_the_blocks():
    for dim, least in ((64, 1.88), (128, 1.93)):
        shapes, memory = [LayerShape(4, dim, dim)] * 3, 1 << 26
        blocks, before = (
            num_blocks_for(memory, shapes, block_size=16, dtype=dtype)
            for dtype in (QUANTIZED, torch.bfloat16)
        )
        assert blocks >= least * before


@pytest.mark.parametrize("name", ["reference", "single-token", "cpu"])
def test_a_backend_over_integers_attends_as_over_what_they_mean(name):
    scene = make_scene(MIXED)
    pool = KVPool(
        [LayerShape(2, 16, 16)], num_blocks=len(scene.key_cache), block_size=4, dtype=QUANTIZED
    )
    pool.spoil()
    written = scene.key_cache.isfinite().all(dim=(1, 3)).nonzero()
    slots = Slots(*written.unbind(1))
    key, value = (
        cache[slots.blocks, :, slots.offsets] for cache in (scene.key_cache, scene.value_cache)
    )
    pool.write(0, key=key, value=value, slots=slots)
    scene.key_cache, scene.value_cache = pool.key_cache(0), pool.value_cache(0)
    found = scene.attend(QuantizedAttention(BACKENDS[name]()), sliding_window=9)
    scene.key_cache, scene.value_cache = (
        dequantize(cache, 4, torch.float32) for cache in (scene.key_cache, scene.value_cache)
    )
    assert torch.equal(found, scene.attend(BACKENDS[name](), sliding_window=9))


@pytest.mark.parametrize("name", LONG_CONFIGS)
def test_the_kernels_have_the_same_logits_alone_batched_and_chunked_bit_for_bit(name, threads):
    """Each configuration with each number of threads, in one of the types."""
    dtype = DTYPES[(list(LONG_CONFIGS).index(name) + threads) % 2]
    native = shared_forms(LONG_CONFIGS[name], dtype=str(dtype).removeprefix("torch.")).native
    alone, together, chunked, in_other_blocks = (
        run_steps(native, LONG_PROMPTS, steps, dtype=QUANTIZED, block_size=block_size)
        for steps, block_size in (
            (ALONE, 16),
            ([[600, 40, 7]], 16),
            (CHUNKED, 16),
            (CHUNKED, 48),
        )
    )
    assert all(map(torch.equal, alone, together))
    assert all(map(torch.equal, alone, chunked))
    assert all(map(torch.equal, alone, in_other_blocks))


@pytest.mark.parametrize("name", ["full", "window", "caps", "sinks"])
def test_the_kernels_compute_what_the_wide_path_does_over_the_same_cache(name):
    """Without quantization both are a hundred times as far from it as from each other."""
    forms = shared_forms(LONG_CONFIGS[name], dtype="float32")
    plain, expected, found = (
        torch.cat(run_steps(form, LONG_PROMPTS, CHUNKED, dtype=dtype))
        for form, dtype in (
            (forms.wide, torch.float32),
            (forms.wide, QUANTIZED),
            (forms.native, QUANTIZED),
        )
    )

    def median_from_expected(logits: torch.Tensor) -> float:
        return float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median())

    assert median_from_expected(found) < 1e-4
    assert median_from_expected(plain) > 100 * median_from_expected(found)


def test_a_form_that_reads_the_cache_wrongly_is_found_at_load(monkeypatch):
    forms = shared_forms(LONG_LLAMA, dtype="float32")
    check_against(forms.wide, forms.native, block_size=16, cache_dtype=QUANTIZED)
    write = KVPool.write

    def write_half(pool, layer, *, key, value, slots):
        write(pool, layer, key=key, value=value, slots=slots)
        if pool.is_quantized:
            scales_of(pool.value_cache(layer), 16).mul_(0.5)

    monkeypatch.setattr(KVPool, "write", write_half)
    with pytest.raises(WrongLogits, match="8-bit KV cache"):
        check_against(forms.wide, forms.native, block_size=16, cache_dtype=QUANTIZED)


def test_the_kernels_refuse_blocks_that_are_no_whole_strips():
    native = shared_forms(LONG_LLAMA, dtype="float32").native
    with pytest.raises(NotSupported, match="multiples of 16"):
        run_steps(native, [[1, 2]], [[2]], dtype=QUANTIZED, block_size=24)


@pytest.fixture(scope="module", params=["llama", "llama wide", "gemma2"])
def runner(request, model_folder):
    name, *ways = request.param.split()
    runner = make_runner(
        model_folder(name),
        block_size=16,
        model_path="wide" if ways else "auto",
        kv_cache_dtype="int8",
        num_blocks=32,
    )
    assert isinstance(runner.model, NativeDecoder) == (not ways)
    return runner


def test_however_the_engine_computes_a_request_its_tokens_are_those_of_the_request_alone(runner):
    expected = {
        name: tokens
        for request in requests_of()
        for name, tokens in generate(runner, [request]).tokens.items()
    }
    assert generate(runner, requests_of()).tokens == expected
    assert generate(runner, requests_of(), max_num_batched_tokens=7).tokens == expected
    for mode in ("recompute", "swap"):
        scarce = {"num_blocks": 6, "enable_prefix_caching": False, "preemption_mode": mode}
        found = generate(runner, requests_of(), **scarce)
        assert getattr(found.snapshot, f"preemptions_{mode}") > 0
        assert found.tokens == expected
    again = [make_request(f"again {i}", p, max_tokens=NUM_TOKENS) for i, p in enumerate(PROMPTS)]
    cached = generate(runner, requests_of(), again)
    assert cached.snapshot.cached_prompt_tokens > 0
    assert cached.tokens == expected | {f"again {name}": expected[name] for name in expected}
    published = {name: tokens[:5] for name, tokens in expected.items()}
    resumed = generate(runner, requests_of(published=published)).tokens
    assert resumed == {name: tokens[5:] for name, tokens in expected.items()}


def test_the_fingerprint_and_the_size_of_a_block_name_the_cache(runner, model_folder):
    plain = make_runner(model_folder("llama"), block_size=16)
    assert "int8" in runner.config_facts.fingerprint
    assert "int8" not in plain.config_facts.fingerprint
    assert plain.config_facts.bytes_per_block > 3 * runner.config_facts.bytes_per_block
    assert runner.kv_pool.bytes_per_block == runner.config_facts.bytes_per_block


def test_a_gpu_and_odd_heads_are_refused_with_a_sentence():
    class Loaded:
        dtype = torch.bfloat16

        class model:  # noqa: N801  It stands for a field.
            device = torch.device("cpu")

    even, odd = LayerShape(2, 16, 16), LayerShape(2, 16, 6)
    assert _cache_dtype("auto", Loaded, [odd]) == torch.bfloat16
    assert _cache_dtype("int8", Loaded, [even]) == QUANTIZED
    with pytest.raises(ModelRefused, match="multiple of 4"):
        _cache_dtype("int8", Loaded, [even, odd])
    Loaded.model.device = torch.device("cuda")
    with pytest.raises(ModelRefused, match="on a CPU only"):
        _cache_dtype("int8", Loaded, [even])
