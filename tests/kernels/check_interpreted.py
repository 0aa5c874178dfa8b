"""The Triton kernels in Triton's interpreter compute what the reference computes.

The interpreter knows no bfloat16. What is compiled is for `check_compiled.py`, and that a device
computes the same for `tests/gpu`.
"""

import importlib.util
import inspect

import pytest
import torch

from engine.model.attention import triton_decode, triton_kernels
from engine.model.attention.reference import ReferenceAttention
from engine.model.attention.self_check import (
    CHECKED_DECODES,
    TOLERANCES,
    AttentionCheckFailed,
    DecodesOnly,
    self_check,
    worst_error,
)
from engine.model.attention.triton_decode import NUM_SPLITS, TritonDecode, programs_per_row
from engine.model.device.launcher import Launcher
from tests.engine.model.attention.test_attention import make_scene
from tests.engine.model.builders import make_prompt
from tests.engine.model.decoders import run_steps
from tests.engine.model.device.test_cuda_path import PLAIN
from tests.engine.model.load.test_fused import FUSED, forms

#: Around the ends of tiles, of splits and of what sixteen shortest splits hold.
CONTEXTS = (1, 63, 64, 65, 128, 129, 700, 2048, 2049)
#: Query heads, key heads, width; window; tokens of a block.
SCENES = (
    ((4, 2, 16), None, 16), ((6, 2, 80), 1, 256), ((3, 1, 96), 9, 1), ((4, 4, 128), 64, 16),
    ((14, 2, 64), 130, 256), ((10, 1, 40), 4096, 1),
)  # fmt: skip
PROMPTS = [make_prompt(length, salt=salt) for salt, length in enumerate((3, 6))]
STEPS = [[3, 2], [0, 1], [0, 3]]
#: Largest accepted error of a token's logits: both round at the same places.
LARGEST_ERRORS = {torch.float32: 1e-5, torch.float16: 5e-3}


def check_at_load(decode: TritonDecode, dtype: torch.dtype, block_size: int) -> None:
    self_check(
        DecodesOnly(decode), dtype=dtype, block_size=block_size, needs=PLAIN, rows=CHECKED_DECODES
    )


@pytest.mark.parametrize(
    ("dtype", "block_size"), [(torch.float32, 16), (torch.float16, 256)], ids=str
)
def test_attention_passes_the_check_that_it_is_put_to_at_load(dtype, block_size):
    check_at_load(TritonDecode(), dtype, block_size)


@pytest.mark.parametrize(("shape", "window", "block_size"), SCENES, ids=str)
def test_heads_widths_windows_and_ragged_contexts_of_every_kind(shape, window, block_size):
    """Blocks of nobody and what lies behind a context are NaN."""
    heads, kv_heads, dim = shape
    dtype = torch.float16 if block_size == 256 else torch.float32
    scene = make_scene(
        [(1, context) for context in CONTEXTS], heads=heads, kv_heads=kv_heads, key_dim=dim,
        value_dim=dim, block_size=block_size, dtype=dtype,
    )  # fmt: skip
    found, expected = (
        scene.attend(backend, sliding_window=window).float()
        for backend in (DecodesOnly(TritonDecode()), ReferenceAttention())
    )
    assert worst_error(found, expected) <= TOLERANCES[dtype]


@pytest.mark.parametrize("window", [None, 130])
def test_how_many_programs_share_the_splits_of_a_row_changes_no_bit(window, monkeypatch):
    scene = make_scene(
        [(1, context) for context in (1, 128, 700, 2049, 2600)], heads=4, kv_heads=2, block_size=16
    )
    found = []
    for programs in (NUM_SPLITS, 4, 1):
        monkeypatch.setattr(triton_decode, "programs_per_row", lambda _, count=programs: count)
        found.append(scene.attend(DecodesOnly(TritonDecode()), sliding_window=window))
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])


@pytest.mark.parametrize(
    ("num_rows", "programs"), [(1, 16), (256, 16), (257, 8), (512, 8), (513, 4), (100_000, 4)]
)
def test_a_row_has_fewer_programs_where_a_step_has_many_rows(num_rows, programs):
    assert programs_per_row(num_rows) == programs


def altered(module, text: str, instead: str, folder):
    """A copy of a module with one difference in its source."""
    source = inspect.getsource(module)
    assert source.count(text) == 1
    path = folder / "altered_kernels.py"
    path.write_text(source.replace(text, instead))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_a_wrong_mask_would_be_seen(tmp_path):
    """The control: the key behind the last one of a split is seen as well."""
    decode = TritonDecode()
    right, wrong = "visible = positions < end", "visible = positions <= end"
    decode._launch = Launcher(altered(triton_kernels, right, wrong, tmp_path))
    with pytest.raises(AttentionCheckFailed, match="off by"):
        check_at_load(decode, torch.float32, 16)


@pytest.mark.parametrize("family", FUSED)
def test_the_fused_form_has_the_logits_of_the_one_that_takes_a_step_at_a_time(family):
    dtypes = LARGEST_ERRORS if family == "qwen3" else [torch.float32]
    for dtype in dtypes:
        expected, found = (
            torch.cat(run_steps(form, PROMPTS, STEPS, dtype=dtype, block_size=4))
            for form in forms(family, dtype)
        )
        error = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
        assert error <= LARGEST_ERRORS[dtype], (family, dtype, error)
