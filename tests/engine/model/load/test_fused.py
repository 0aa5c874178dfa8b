"""The fused decoder without its kernels: what it launches, and when another form serves.

`tests/kernels` has the kernels. Whether the logits are right is asked at every start.
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
from engine.model.decoder.decoder_config import NotSupported
from engine.model.decoder.decoder_weights import read_weights
from engine.model.decoder.fused_decoder import FusedDecoder
from engine.model.decoder.read_config import read_config
from engine.model.device.kv_pool import KVPool
from engine.model.load import fast_path
from engine.model.step import compute_logits
from engine.model.wide.loader import load_model
from tests.engine.model.builders import save_model
from tests.engine.model.decoders import FAMILIES
from tests.engine.model.device.test_launcher import replace_module
from tests.engine.model.run.test_captured_steps import BLOCK_SIZE, NUM_BLOCKS, decodes

#: Norms of heads, biases, layers that rotate nothing, rotated parts, factors, a window, and sizes
#: that are no powers of two.
FUSED = ("qwen3", "qwen2", "smollm3", "phi3", "granite", "mistral, window", "llama, odd sizes")


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
    pool = KVPool(
        decoder.layer_shapes, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32
    )
    with torch.inference_mode():
        compute_logits(decodes(3, 9), model=decoder, kv_pool=pool, backend=ReferenceAttention())
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
