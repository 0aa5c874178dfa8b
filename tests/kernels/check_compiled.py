"""Every kernel in every specialisation that the engine launches is machine code that a chip takes.

The launches are those of captured steps, of every size, and of a step with a chunk, for the shapes
of common models. Their products are left out.
"""

import copy
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.model.attention import triton_decode, triton_kernels
from engine.model.attention.interface import StepAttention
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.split import SplitAttention
from engine.model.attention.triton_decode import TritonDecode
from engine.model.checks.probe import probe
from engine.model.decoder import decoder as decoder_module
from engine.model.decoder import fused_decoder, fused_kernels
from engine.model.decoder.decoder_config import DecoderConfig, Rotary
from engine.model.decoder.decoder_weights import read_weights
from engine.model.decoder.fused_decoder import FusedDecoder
from engine.model.decoder.read_config import read_config
from engine.model.device.kv_pool import KVPool
from engine.model.device.launcher import Launcher
from engine.model.run.graphs import DecodeGraphs
from engine.model.sampling import noise_kernels
from engine.model.sampling.fused_draw import FusedDraw
from engine.model.step import compute_logits, lay_out
from engine.model.wide.loader import load_model
from tests.engine.model.builders import make_prompt, make_row, save_model
from tests.engine.model.decoders import FAMILIES
from tests.kernels.compiling import CHIPS, Chip, Compiled, CompilingKernels

BLOCK_SIZE, NUM_BLOCKS, MAX_NUM_SEQS = 16, 16, 12
HALVES = (torch.bfloat16, torch.float16)
#: The most registers of a thread with which four programs of attention fit on a multiprocessor.
#: Widths that are no powers of two need more: each lane has a mask.
MOST_REGISTERS, COMMON_WIDTHS = 128, (64, 128)


@dataclass(frozen=True)
class Shape:
    """A model's sizes, those of attention first; its norms are those of the tiny `family`."""

    family: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    window: int | None = None
    max_model_len: int = 4096


#: SmolLM2-135M, Qwen2.5-0.5B, Qwen3-0.6B, Phi-3-mini, Qwen3-8B and Llama-3-70B.
SHAPES = {
    "smollm2": Shape("llama", 9, 3, 64, 576, 1536, max_model_len=100),
    "qwen2.5": Shape("qwen2", 14, 2, 64, 896, 4864),
    "qwen3-0.6b": Shape("qwen3", 16, 8, 128, 1024, 3072),
    "phi3": Shape("phi3", 32, 32, 96, 3072, 8192, window=2047),
    "qwen3-8b": Shape("qwen3", 32, 8, 128, 4096, 12288),
    "llama-70b": Shape("llama", 64, 8, 128, 8192, 28672, max_model_len=1000),
}
#: What is compiled for each chip. Other types and widths share the code of these.
CASES = [
    *((name, torch.bfloat16) for name in SHAPES),
    ("qwen3-0.6b", torch.float16),
    ("qwen3-0.6b", torch.float32),
]
#: Query heads, key heads and width where the decoder is not fused: StableLM, Gemma.
OTHER_ATTENTION = [(32, 8, 80), (8, 1, 256)]


class Once:
    """Captures by computing once."""

    def capture(self, compute):
        return None, compute()


def config_of(shape: Shape, folder) -> tuple[DecoderConfig, dict[str, torch.Size]]:
    """One layer of a model of this shape: its config, and the sizes of its tensors by name."""
    tiny = copy.deepcopy(FAMILIES[shape.family])
    save_model(tiny, folder)
    config = read_config(probe(load_model(folder, dtype="float32").model, max_model_len=64))
    sizes = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "head_dim": shape.head_dim,
    }
    named = {
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": 1,
    }
    for name, value in (sizes | named).items():
        setattr(tiny, name, value)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(tiny).state_dict()
    rotary = Rotary(torch.ones(config.rotary_dim // 2 * shape.head_dim // config.head_dim), 1.0)
    config = replace(
        config, **sizes, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        mixers=config.mixers[:1], windows=(shape.window,), rotaries=(rotary,), rotary_of=(0,),
    )  # fmt: skip
    return config, {name: tensor.shape for name, tensor in state.items()}


@torch.inference_mode()
def launch_all(decoder: FusedDecoder, attention: TritonDecode, shape: Shape) -> None:
    """Captured steps, and one with a chunk beside decodes."""
    dtype = decoder.embedding.dtype
    pool = KVPool(
        decoder.layer_shapes, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype,
        has_spare_block=True,
    )  # fmt: skip
    DecodeGraphs(
        decoder, pool, attention, capturer=Once(), device=torch.device("cpu"),
        max_num_seqs=MAX_NUM_SEQS, max_model_len=shape.max_model_len,
    )  # fmt: skip
    rows = [
        make_row(
            make_prompt(end), request_id=str(index), start=start, end=end,
            block_ids=range(index, NUM_BLOCKS, 4),
        )
        for index, (start, end) in enumerate(((0, 20), (32, 33), (39, 40)))
    ]  # fmt: skip
    step = lay_out(rows, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    backend = SplitAttention(ReferenceAttention(), attention)
    compute_logits(step, model=decoder, kv_pool=pool, backend=backend)


def check(found: Compiled, chip: Chip, dtype: torch.dtype, head_dim: int) -> None:
    """The promises of a kernel's machine code."""
    assert found.shared_bytes <= chip.shared_memory, (found, chip)
    if dtype in HALVES:
        assert found.local_bytes == 0, (found, chip)
        if found.name == "store_heads":
            assert found.narrow_stores == 0, (found, chip)
        if head_dim in COMMON_WIDTHS:
            assert found.registers <= MOST_REGISTERS, (found, chip)


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    """Nothing that an earlier run has compiled is used, and no product is computed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))

    def linear(inputs, linear):
        return inputs.new_empty(len(inputs), len(linear.weight))

    monkeypatch.setattr(decoder_module, "_linear", linear)


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_the_launches_of_a_decoder_compile_for_every_chip(name, dtype, tmp_path):
    shape = SHAPES[name]
    config, sizes = config_of(shape, tmp_path)
    state = {name: torch.empty(size, dtype=dtype) for name, size in sizes.items()}
    decoder = FusedDecoder(config, read_weights(config, state))
    for chip in CHIPS:
        attention, kernels = TritonDecode(), []
        for one, module in ((decoder, fused_kernels), (attention, triton_kernels)):
            kernels.append(CompilingKernels(module, chip))
            one._launch = Launcher(kernels[-1])
        launch_all(decoder, attention, shape)
        compiled = [found for one in kernels for found in one.compiled]
        for found in compiled:
            check(found, chip, dtype, shape.head_dim)
        print(chip.capability, dict(Counter(found.name for found in compiled)), compiled)
        assert {found.name for found in compiled} == {
            *(name for name in fused_kernels.__all__ if name != "TritonError"),
            *(name for name in triton_kernels.__all__ if name != "TritonError"),
        }


def attend_once(heads: int, kv_heads: int, head_dim: int, chip: Chip) -> list[Compiled]:
    """A decode alone in bfloat16, with a window that is no multiple of sixteen."""
    attention, kernels = TritonDecode(), CompilingKernels(triton_kernels, chip)
    attention._launch = Launcher(kernels)
    cache = torch.empty(3, kv_heads, 256, head_dim, dtype=torch.bfloat16)
    step: StepAttention = attention.plan_decodes(
        torch.ones(2, dtype=torch.int32), torch.zeros(2, 7, dtype=torch.int32), max_context=16
    )
    query = torch.empty(2, heads, head_dim, dtype=torch.bfloat16)
    step(query, cache, cache, scaling=0.1, sliding_window=7)
    return kernels.compiled


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), OTHER_ATTENTION)
def test_attention_of_other_widths_compiles_for_every_chip(heads, kv_heads, head_dim):
    for chip in CHIPS:
        for found in attend_once(heads, kv_heads, head_dim, chip):
            check(found, chip, torch.bfloat16, head_dim)


@pytest.mark.parametrize("vocab_size", [151_936, 50_257])
def test_drawing_compiles_for_every_chip(vocab_size):
    for chip in CHIPS:
        kernels = CompilingKernels(noise_kernels, chip)
        draw = FusedDraw()
        draw._launch = Launcher(kernels)
        rows, keys = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32)
        ones = torch.ones(2, 1)
        draw(torch.zeros(2, vocab_size), rows=rows, best=ones, temperatures=ones, keys=keys)
        (found,) = kernels.compiled
        assert found.local_bytes == 0 and found.registers <= 64, (found, chip)


def test_stores_of_one_head_by_each_warp_would_be_seen_as_narrow(monkeypatch, tmp_path):
    """The control: a thread then has four numbers of a head, which are eight bytes."""
    monkeypatch.setattr(fused_decoder, "STORED", 64)
    with pytest.raises(AssertionError, match="narrow_stores"):
        test_the_launches_of_a_decoder_compile_for_every_chip("qwen3-0.6b", HALVES[0], tmp_path)


def test_a_tile_that_no_chip_has_room_for_would_be_seen(monkeypatch):
    """The control: 512 keys, of which a program holds 278 KiB."""
    monkeypatch.setattr(triton_decode, "TILE", 512)
    chip = Chip(90, 227 * 1024)
    found = attend_once(32, 8, 128, chip)[0]
    with pytest.raises(AssertionError, match="shared_bytes"):
        check(found, chip, torch.bfloat16, 128)
    # More keys than there are registers for: what spills would be seen as well.
    with pytest.raises(AssertionError, match="local_bytes"):
        check(replace(found, shared_bytes=0), chip, torch.bfloat16, 128)
