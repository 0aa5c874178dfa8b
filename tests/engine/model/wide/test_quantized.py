"""What is quantized is refused before anything tries to load it: none is served as noise."""

import re
import shutil
import sys

import pytest
import torch
import transformers
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from engine.errors import ModelRefused
from engine.model.checks.probe import probe
from engine.model.wide.loader import load_model
from engine.model.wide.quantization import NOTE_FILES, NOTES
from tests.engine.model.wide.quantized import KINDS, note, save_mxfp4, save_quantized

USE = r": use the checkpoint whose weights are not quantized \(float32, float16 or bfloat16\)$"
DEQUANTIZE_MXFP4 = (
    r": load it in transformers with quantization_config=Mxfp4Config\(dequantize=True\), save it "
    r"with save_pretrained\(folder, save_original_format=False\), and serve that folder$"
)
#: Methods that are served if config.json says all that they need.
SERVED = frozenset({"awq", "compressed-tensors", "gptq"})
#: Packages that load quantized weights, by the names that they are imported by.
PACKAGES = {
    *("accelerate", "aqlm", "auto_gptq", "auto_round", "autoawq", "awq", "bitsandbytes"),
    *("compressed_tensors", "eetq", "fbgemm_gpu", "flute", "fouroversix", "fp_quant", "gguf"),
    *("gptqmodel", "hqq", "kernels", "mlx", "optimum", "quark", "qutlass", "sinq", "spqr_quant"),
    *("torchao", "vptq"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_tensors_are_refused_by_name_without_any_note(kind, model_folder, tmp_path):
    quantizer, expected = KINDS[kind]
    folder = save_quantized(model_folder("llama"), tmp_path, quantizer)
    with pytest.raises(ModelRefused, match=rf"^model\.safetensors {expected}.*{USE}") as refused:
        load_model(folder)
    assert str(folder) not in str(refused.value)


@pytest.mark.parametrize("name", NOTE_FILES)
def test_a_file_beside_the_config_that_notes_a_quantization_is_enough(name, model_folder, tmp_path):
    folder = shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    (folder / name).write_text('{"quantization": {"quant_algo": "FP8", "exclude": ["lm_head"]}}')
    expected = rf"^{re.escape(name)} describes quantized weights \(FP8\){USE}"
    with pytest.raises(ModelRefused, match=expected):
        load_model(folder)
    (folder / name).write_bytes(b"\xff" * 10)
    with pytest.raises(ModelRefused, match=rf"^{re.escape(name)} describes quantized weights:"):
        load_model(folder)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", NOTES)
def test_a_field_of_the_config_that_notes_a_quantization_is_enough(
    name, nested, model_folder, tmp_path
):
    folder = shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    value = True if name.startswith("load_in") else {"quant_method": "magic", "bits": 4}
    note(folder, **({"text_config": {name: value}} if nested else {name: value}))
    where = f"text_config.{name}" if nested else name
    method = "" if value is True else ": magic"
    expected = rf"^config\.json describes quantized weights \({where}{method}\){USE}"
    with pytest.raises(ModelRefused, match=expected):
        load_model(folder)


def test_an_empty_note_is_no_quantization(model_folder, tmp_path):
    folder = shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    load_model(note(folder, quantization_config=None, load_in_8bit=False))


class Watch:
    """Finds nothing, and remembers which packages somebody looked for."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(self, name, path=None, target=None):
        self.packages.add(name.partition(".")[0])


@pytest.mark.parametrize("method", AUTO_QUANTIZER_MAPPING)
def test_every_method_of_transformers_is_refused_before_its_package_is_looked_for(
    method, model_folder, tmp_path, monkeypatch
):
    folder = shutil.copytree(model_folder("llama"), tmp_path, dirs_exist_ok=True)
    base, _, bits = method.partition("_")
    fields = {"quant_method": method}
    if base == "bitsandbytes":
        fields = {"quant_method": base, f"load_in_{bits}": True}
    note(folder, quantization_config=fields)
    watch = Watch()
    monkeypatch.setattr(sys, "meta_path", [watch, *sys.meta_path])
    named = re.escape(fields["quant_method"])
    use = DEQUANTIZE_MXFP4 if method == "mxfp4" else USE
    expected = rf"^config\.json describes quantized weights \(quantization_config: {named}\){use}"
    if method in SERVED:
        # These are refused by a field that is missing.
        expected = rf"^config\.json describes quantized weights \({named}\) with quantization_con"
    with pytest.raises(ModelRefused, match=expected):
        load_model(folder)
    assert not watch.packages & PACKAGES


def test_mxfp4_weights_are_served_after_what_the_refusal_advises(model_folder, tmp_path):
    folder = save_mxfp4(model_folder("gpt_oss"), tmp_path / "mxfp4")
    with pytest.raises(ModelRefused, match=DEQUANTIZE_MXFP4):
        load_model(folder)
    dequantized = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype="auto"
    )
    dequantized.save_pretrained(tmp_path / "plain", save_original_format=False)
    loaded = load_model(tmp_path / "plain").model.state_dict()
    assert loaded.keys() == dequantized.state_dict().keys()
    for name, tensor in dequantized.state_dict().items():
        assert torch.equal(loaded[name], tensor), name
    assert probe(load_model(tmp_path / "plain").model, max_model_len=256).attention_needs.has_sinks


def test_the_watch_sees_a_package_that_is_looked_for(monkeypatch):
    watch = Watch()
    monkeypatch.setattr(sys, "meta_path", [watch, *sys.meta_path])
    with pytest.raises(ImportError):
        import fbgemm_gpu.nothing  # noqa: F401
    assert watch.packages & PACKAGES
