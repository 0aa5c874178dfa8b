"""The fused decoder without a device: its kernels in Triton's interpreter, and compiled for one.

Whether both agree is asked at every start: a form serves if its logits are right on that machine.
"""

import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from engine.model.attention.reference import ReferenceAttention
from engine.model.checks.probe import probe
from engine.model.decoder import decoder as decoder_module
from engine.model.decoder.decoder import Decoder
from engine.model.decoder.decoder_config import NotSupported, read_config
from engine.model.decoder.decoder_weights import read_weights
from engine.model.decoder.fused_decoder import FusedDecoder
from engine.model.device.kv_pool import KVPool
from engine.model.device.launcher import Launcher
from engine.model.load import fast_path
from engine.model.step import compute_logits
from engine.model.wide.loader import load_model
from tests.engine.model.builders import make_prompt, save_model
from tests.engine.model.decoders import FAMILIES, run_steps
from tests.engine.model.device.test_launcher import replace_module
from tests.engine.model.run.test_captured_steps import BLOCK_SIZE, NUM_BLOCKS, decodes
from tests.engine.model.test_triton import (
    compiled_for_hopper,
    interpret,
    needs_triton,
)

#: Norms of heads, biases, layers that rotate nothing, rotated parts, factors, a window, and sizes
#: that are no powers of two.
FUSED = ("qwen3", "qwen2", "smollm3", "phi3", "granite", "mistral, window", "llama, odd sizes")
PROMPTS = [make_prompt(length, salt=salt) for salt, length in enumerate((3, 9, 12))]
STEPS = [[3, 5, 4], [0, 1, 7], [0, 3, 1]]
#: Largest accepted error of a token's logits: both round at the same places.
LARGEST_ERRORS = {torch.float32: 1e-5, torch.float16: 5e-3}


def forms(family: str, dtype: torch.dtype) -> tuple[Decoder, FusedDecoder]:
    """The same weights, norms and biases among them that are neither one nor zero."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(FAMILIES[family], Path(folder))
        model = load_model(folder, dtype=str(dtype).removeprefix("torch.")).model
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter))
    served = probe(model, max_model_len=256)
    config = read_config(served)
    weights = read_weights(config, model.state_dict())
    return Decoder(config, weights), FusedDecoder(config, weights)


@needs_triton
@pytest.mark.parametrize("family", FUSED)
def test_the_fused_form_has_the_logits_of_the_one_that_takes_a_step_at_a_time(family):
    interpret(f"compare({family!r})", of="test_fused")


def compare(family: str) -> None:
    for dtype, largest in LARGEST_ERRORS.items():
        expected, found = (
            torch.cat(run_steps(form, PROMPTS, STEPS, dtype=dtype, block_size=BLOCK_SIZE))
            for form in forms(family, dtype)
        )
        error = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
        assert error <= largest, (family, dtype, error)


class Replaced:
    """The kernels of a fused decoder, by what a launch ends in."""

    def __init__(self, decoder: FusedDecoder, kernels) -> None:
        decoder._launch = Launcher(kernels)
        self._decoder = decoder

    def decode(self) -> None:
        shapes, dtype = self._decoder.layer_shapes, self._decoder.embedding.dtype
        pool = KVPool(shapes, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype)
        with torch.inference_mode():
            compute_logits(
                decodes(3, 9), model=self._decoder, kv_pool=pool, backend=ReferenceAttention()
            )


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_fused_kernels_compile_for_hopper(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _, decoder = forms("qwen3", dtype)
    kernels = compiled_for_hopper(decoder._launch._kernels)
    Replaced(decoder, kernels).decode()
    assert {compiled.metadata.name for compiled in kernels.compiled} == {
        "add_and_norm", "store_heads", "activate",
    }  # fmt: skip
    assert all(compiled.asm["cubin"] for compiled in kernels.compiled)


class Recorded:
    """Kernels that compute nothing, and note their names."""

    TritonError = RuntimeError

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def __getattr__(self, name: str) -> dict:
        return defaultdict(lambda: lambda *_, **__: self._seen.append(name))


def test_between_its_products_a_layer_launches_four_kernels(monkeypatch):
    """Also where Triton is not installed: what computes them does not matter here."""
    seen: list[str] = []
    kernels = Recorded(seen)
    replace_module(monkeypatch, "engine.model.decoder", "fused_kernels", kernels)
    plain = decoder_module._linear
    monkeypatch.setattr(
        decoder_module, "_linear", lambda *given: seen.append("linear") or plain(*given)
    )
    _, decoder = forms("qwen3", torch.float32)
    Replaced(decoder, kernels).decode()
    attention = ["add_and_norm", "linear", "store_heads", "linear"]
    layer = [*attention, "add_and_norm", "linear", "activate", "linear"]
    assert seen == [*layer * len(decoder.layer_shapes), "linear"]


@pytest.mark.parametrize("family", ["olmo2", "gemma", "gemma2", "gemma3"])
def test_norms_and_activations_of_other_kinds_are_left_to_the_form_that_knows_them(
    family, tmp_path
):
    save_model(FAMILIES[family], tmp_path)
    loaded = load_model(tmp_path, dtype="float32")
    config = read_config(probe(loaded.model, max_model_len=256))
    with pytest.raises(NotSupported, match="not fused"):
        FusedDecoder(config, read_weights(config, loaded.model.state_dict()))


def test_on_a_device_the_fused_form_is_tried_first_and_left_out_where_it_is_wrong(
    tmp_path, monkeypatch, caplog
):
    """A processor takes the place of the device, and nobody's logits that of the fused form's."""
    tried = []

    class Wrong(Decoder):
        name = "decoder-wrong"

        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            tried.append(self.name)

        def _end(self, hidden, inputs):
            return 2 * super()._end(hidden, inputs)

    forms_for = fast_path._forms
    monkeypatch.setattr(fast_path, "FusedDecoder", Wrong)
    monkeypatch.setattr(fast_path, "_forms", lambda kind, **options: forms_for("cuda", **options))
    save_model(LlamaConfig(**FAMILIES["llama"].to_diff_dict()), tmp_path)
    loaded = load_model(tmp_path, dtype="float32")
    served = probe(loaded.model, max_model_len=256)
    assert fast_path.choose_model(served).name == "decoder-torch"
    assert tried == ["decoder-wrong"]
    assert "decoder-wrong is off by" in caplog.text
