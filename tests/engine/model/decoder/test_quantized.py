"""Quantized weights of GGUF files on the fast path: kept as they are stored, and computed alike.

That the tokens are those of `generate` with the dequantized weights is tested with the files, in
tests/engine/model/wide/test_gguf.py.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig

from engine.errors import ModelRefused
from engine.model.checks.probe import probe
from engine.model.decoder import native_decoder, native_weights
from engine.model.decoder.decoder_weights import read_weights
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.decoder.read_config import read_config
from engine.model.device.weight_files import WeightFiles
from engine.model.kernels.build import VARIANTS, best_variant
from engine.model.load.fast_path import (
    INTEGER_TOLERANCES,
    TOLERANCES,
    WrongLogits,
    _compare,
    check_against,
)
from engine.model.wide import gguf_blocks
from engine.model.wide.gguf_blocks import KINDS, StoredBlocks
from engine.model.wide.loader import load_model
from engine.model.wide.stored_layers import dequantize
from tests.engine.model.builders import generate, make_prompt, make_runner, requests_of
from tests.engine.model.decoder.test_kernels import runnable
from tests.engine.model.decoders import run_steps
from tests.engine.model.gguf_files import CONFIGS, END, TOKENS, tiny_model, write_gguf

DTYPES = ("float32", "bfloat16")
#: Types of the matrices of one file: parts of fused ones differ, and some are not quantized.
MIXED = {"attn_v": Type.Q8_0, "ffn_up": Type.Q5_1, "attn_output": Type.F32, "token_embd": Type.Q8_0}
#: As files called Q4_K_M have them, and one more type.
K_QUANTS = {
    "attn_v": Type.Q6_K,
    "attn_output": Type.Q5_K,
    "ffn_down": Type.Q6_K,
    "token_embd": Type.Q6_K,
}
#: Files by model, type of the matrices, and exceptions.
FILES = {
    "untied": ("llama", Type.Q4_0, {}),
    "tied": ("llama tied", Type.Q4_1, {"token_embd": Type.Q8_0}),
    "mixed": ("qwen2", Type.Q4_0, MIXED),
    "nested": ("gemma3", Type.Q4_K, K_QUANTS),
}
#: Inputs that share a scale (kernels/digit_rows.h), and the factor of one of them.
GROUP, OUTLIER = 32, 2.0
#: Enough random layers to amplify what their inputs are rounded by.
DEEP = {
    "num_hidden_layers": 12,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
PROMPTS = [make_prompt(100, salt=1), make_prompt(40, salt=2), make_prompt(7, salt=3)]
ALONE = [[100, 0, 0], [0, 40, 0], [0, 0, 7]]
CHUNKED = [[90, 33, 0], [7, 1, 6], [1, 1, 1], [1, 1, 0], [1, 4, 0]]


class Subject:
    """A file's model in the compiled form, with its weights as they are stored and without."""

    def __init__(self, file, dtype: str) -> None:
        loaded = load_model(file, dtype=dtype)
        self.dtype, self.stored = loaded.dtype, loaded.stored
        self.wide = probe(loaded.model, max_model_len=loaded.max_model_len)
        self.config = read_config(self.wide)

    def native(self, *, stored=None, variant=None, files=None) -> NativeDecoder:
        stored = self.stored if stored is None else stored
        if not stored:
            dequantize(self.wide.model)
        weights = read_weights(self.config, self.wide.model.state_dict(), stored)
        variant = variant or best_variant()
        return NativeDecoder(self.config, weights, variant=variant, weight_files=files)

    def logits(self, model, steps) -> list[torch.Tensor]:
        prompts = [[token % self.config.vocab_size for token in prompt] for prompt in PROMPTS]
        return run_steps(model, prompts, steps, dtype=self.dtype)


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    folder, written = tmp_path_factory.mktemp("files"), {}

    def file(name: str):
        if name not in written:
            model, kind, kinds = FILES[name]
            path = folder / f"{name}.gguf"
            written[name] = write_gguf(tiny_model(model), path, kind=kind, kinds=kinds)
        return written[name]

    return file


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_s_logits_are_the_same_alone_batched_and_chunked_bit_for_bit(name, dtype, file_of):
    subject = Subject(file_of(name), dtype)
    native = subject.native()
    assert "-int8x" in native.name
    alone = subject.logits(native, ALONE)
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            for steps in ([[100, 40, 7]], CHUNKED):
                assert all(map(torch.equal, subject.logits(native, steps), alone))
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_as_close_to_the_exact_ones_as_those_of_dequantized_weights(
    name, dtype, file_of
):
    subject = Subject(file_of(name), dtype)
    forms = (subject.native(), subject.native(stored={}))
    assert "-int8x" not in forms[1].name
    found = [torch.cat(subject.logits(form, CHUNKED)) for form in forms]
    exact = Subject(file_of(name), "float32")
    expected = torch.cat(exact.logits(exact.wide, CHUNKED))
    errors = [(one - expected).norm(dim=-1) / expected.norm(dim=-1) for one in found]
    assert float(errors[0].median()) < (5e-6 if dtype == "float32" else 6e-2)
    # Rounded inputs are what distinguishes them.
    assert float(errors[0].median()) < 3 * float(errors[1].median())


def errors_of(wide, native) -> list[float]:
    """The median errors that the check at load finds: as served, and with precise inputs."""
    expected, served = _compare(wide, native, 16, (), is_own=True)
    with native.precise_inputs():
        _, precise = _compare(wide, native, 16, (), expected=expected)
    _, again = _compare(wide, native, 16, (), expected=expected)
    assert torch.equal(again, served)
    return [float(errors.median()) for errors in (served, precise)]


def test_inputs_of_8_bits_may_round_more_than_bfloat16(tmp_path, monkeypatch):
    """Inputs with one large value in each group lose the others' digits."""
    config = LlamaConfig(**DEEP, vocab_size=len(TOKENS), eos_token_id=END, bos_token_id=1)
    monkeypatch.setitem(CONFIGS, "deep", config)
    model = tiny_model("deep")
    with torch.no_grad():
        for norm in (one for one in model.parameters() if one.dim() == 1):
            norm[::GROUP] *= OUTLIER
    subject = Subject(write_gguf(model, tmp_path / "m.gguf", kind=Type.Q4_0), "bfloat16")
    native = subject.native()
    served, precise = errors_of(subject.wide, native)
    assert precise < TOLERANCES[torch.bfloat16] < served < INTEGER_TOLERANCES[torch.bfloat16]
    check_against(subject.wide, native, block_size=16)
    # The precision is what makes it accepted.
    monkeypatch.setattr(NativeDecoder, "precise_inputs", lambda _: nullcontext())
    with pytest.raises(WrongLogits):
        check_against(subject.wide, native, block_size=16)


def test_a_wrong_computation_does_not_pass_for_rounded_inputs(file_of):
    subject = Subject(file_of("nested"), "bfloat16")
    right = subject.config
    subject.config = replace(right, scaling=1.5 * right.scaling)
    wrong = subject.native()
    served, precise = errors_of(subject.wide, wrong)
    assert TOLERANCES[torch.bfloat16] < min(served, precise)
    assert served < INTEGER_TOLERANCES[torch.bfloat16]
    with pytest.raises(WrongLogits):
        check_against(subject.wide, wrong, block_size=16)


def test_digits_are_those_of_inputs_before_they_are_rounded(file_of, monkeypatch):
    monkeypatch.setattr(StoredBlocks, "bfloat16_digits", 2)
    subject, exact = Subject(file_of("nested"), "bfloat16"), Subject(file_of("nested"), "float32")
    expected = torch.cat(exact.logits(exact.wide, CHUNKED))
    errors = [
        float((torch.cat(subject.logits(form, CHUNKED)) - expected).norm(dim=-1).median())
        for form in (subject.native(), subject.native(stored={}))
    ]
    # Measured 0.53; of rounded inputs 0.64. The rest is that of keys and values.
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_computes_the_same_model_from_quantized_weights(variant, file_of):
    if not runnable(variant):
        pytest.skip(f"this processor cannot run {variant.name}")
    subject = Subject(file_of("mixed"), "float32")
    found, expected = (
        torch.cat(subject.logits(form, [[100, 40, 7]]))
        for form in (subject.native(variant=variant), subject.wide)
    )
    assert float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < 5e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_preempted_and_resumed_tokens_are_those_of_a_request_alone(dtype, file_of):
    prompts = [[3 + token % 250 for token in make_prompt(n, salt=n)] for n in (3, 17, 40)]
    runner = make_runner(file_of("tied"), dtype=dtype)
    alone = {}
    for request in requests_of(prompts, max_tokens=10):
        alone |= generate(runner, [request]).tokens
    assert generate(runner, requests_of(prompts, max_tokens=10)).tokens == alone
    for mode in ("recompute", "swap"):
        scarce = {"num_blocks": 16, "enable_prefix_caching": False}
        found = generate(
            runner, requests_of(prompts, max_tokens=10), preemption_mode=mode, **scarce
        )
        assert getattr(found.snapshot, f"preemptions_{mode}") > 0
        assert found.tokens == alone
    published = {name: tokens[:5] for name, tokens in alone.items()}
    resumed = generate(runner, requests_of(prompts, max_tokens=10, published=published))
    assert resumed.tokens == {name: tokens[5:] for name, tokens in alone.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_have_the_values_that_the_library_reads_bit_for_bit(kind, tmp_path):
    model = tiny_model("gemma3" if kind.endswith("_K") else "llama")
    loaded = load_model(write_gguf(model, tmp_path / "m.gguf", kind=Type[kind]))
    # What the library has read from what it wrote; the loaded weights come from the same blocks.
    expected = model.state_dict()
    assert len(loaded.stored) == 2 + model.config.num_hidden_layers * 7
    for name, blocks in loaded.stored.items():
        assert torch.equal(blocks.unpacked().dequantized(), expected[name]), name


def test_a_type_of_which_the_library_reads_other_values_is_refused(file_of, monkeypatch):
    def flipped(blocks):
        weight = KINDS["Q4_0"](blocks)
        return replace(weight, numbers=weight.numbers ^ 1)

    monkeypatch.setattr(gguf_blocks, "KINDS", {**KINDS, "Q4_0": flipped})
    with pytest.raises(ModelRefused, match="dequantizes the type Q4_0, of lm_head"):
        load_model(file_of("untied"))


@pytest.mark.parametrize(("dtype", "digits"), [("float32", "3"), ("bfloat16", "1-o2")])
def test_the_form_is_in_the_fingerprint(dtype, digits, file_of):
    facts = make_runner(file_of("untied"), dtype=dtype).config_facts
    assert f"-decoder-{best_variant().name}-int8x{digits}-" in facts.fingerprint


def test_inputs_of_attention_s_output_have_two_digits_in_bfloat16(file_of, monkeypatch):
    subject, exact = Subject(file_of("untied"), "bfloat16"), Subject(file_of("untied"), "float32")
    expected = torch.cat(exact.logits(exact.wide, CHUNKED))
    errors = []
    for digits in (native_decoder.OUTPUT_DIGITS, 1):
        monkeypatch.setattr(native_decoder, "OUTPUT_DIGITS", digits)
        found = torch.cat(subject.logits(subject.native(), CHUNKED))
        errors.append(float((found - expected).norm(dim=-1).median()))
    assert errors[0] < 0.97 * errors[1]


@pytest.mark.parametrize("name", ["untied", "nested"])
def test_memory_is_that_of_the_file_and_shared_files_hold_it_once(name, file_of, tmp_path):
    subject = Subject(file_of(name), "float32")
    files = WeightFiles(tmp_path / "shared", 1 << 30)
    plain = subject.logits(subject.native(), ALONE)
    shared = [subject.native(files=files) for _ in range(2)]
    for native in shared:
        assert all(map(torch.equal, subject.logits(native, ALONE), plain))
    (written,) = (tmp_path / "shared").glob("*.weights")
    # Tied ones are one tensor.
    blocks = {blocks.blocks.data_ptr(): blocks.blocks for blocks in subject.stored.values()}
    assert written.stat().st_size < 1.3 * sum(one.nbytes for one in blocks.values())


def test_weights_that_a_faster_unit_multiplies_are_not_kept(file_of, monkeypatch):
    monkeypatch.setattr(native_weights, "MATRIX_UNIT", best_variant().name)
    assert "-int8x" not in Subject(file_of("untied"), "bfloat16").native().name
    assert "-int8x3" in Subject(file_of("untied"), "float32").native().name
