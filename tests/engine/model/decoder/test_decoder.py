"""The fast path in all its forms: fast == wide == transformers' own generation."""

import json
import logging
import math

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from engine.errors import ModelRefused
from engine.model.checks.own_attention import relative_errors
from engine.model.checks.probe import probe
from engine.model.decoder import decoder, families
from engine.model.decoder.decoder import Decoder
from engine.model.decoder.decoder_config import NotSupported
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.decoder.read_config import read_config
from engine.model.kernels.build import KernelsUnavailable
from engine.model.load import fast_path
from engine.model.load.fast_path import choose_model
from engine.model.wide.loader import load_model
from engine.model.wide.transformers_model import TransformersModel
from tests.engine.model.builders import (
    _GROUPED,
    CONFIGS,
    PROMPTS,
    Oracle,
    check_generated,
    generate,
    make_runner,
    requests_of,
    save_model,
)
from tests.engine.model.decoders import FAMILIES, forms_of, run_steps

#: Tokens of each prompt per step: whole prompts, chunks and decodes together, rows that pause.
STEPS = [[3, 5, 20, 0], [0, 1, 1, 28], [0, 1, 17, 1], [0, 10, 2, 0]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


def test_every_family_generates_what_transformers_generates(family, tmp_path):
    folder = save_model(FAMILIES[family], tmp_path)
    runner = make_runner(folder, model_path="fast")
    assert isinstance(runner.model, NativeDecoder)
    found = generate(runner, requests_of(), max_num_batched_tokens=23).tokens
    assert found == Oracle(folder).alone()


def test_the_torch_form_generates_what_transformers_generates(tmp_path):
    """Of the other families, the logits: the next test."""
    folder = save_model(FAMILIES["qwen3, experts"], tmp_path)
    runner = make_runner(folder, model_path="fast", attention_backend="cpu")
    assert isinstance(runner.model, Decoder)
    found = generate(runner, requests_of(), max_num_batched_tokens=23).tokens
    assert found == Oracle(folder).alone()


@pytest.mark.parametrize("has_kernels", [True, False])
def test_the_torch_form_updates_states_by_kernels_where_there_are_any(
    has_kernels, tmp_path, monkeypatch
):
    if not has_kernels:
        monkeypatch.setattr(decoder, "recurrent_kernels", lambda device: None)
    folder = save_model(FAMILIES["qwen3.5"], tmp_path)
    runner = make_runner(folder, model_path="fast", attention_backend="cpu")
    assert runner.model.name.removeprefix("decoder-torch").startswith("-recurrent") == has_kernels
    found = generate(runner, requests_of(), max_num_batched_tokens=23).tokens
    assert found == Oracle(folder).alone()


def errors(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of each token's logits, relative to their norm."""
    return (found - exact).norm(dim=-1) / exact.norm(dim=-1)


def test_in_float32_every_form_has_the_logits_of_the_wide_path(family, tmp_path):
    forms = forms_of(FAMILIES[family], tmp_path, dtype="float32")
    exact, *others = (
        torch.cat(run_steps(form, PROMPTS, STEPS, dtype=torch.float32))
        for form in (forms.wide, forms.torch, forms.native)
    )
    # A delta net norms outputs that are nearly zero: embeddings that differ by 1e-7 move a token of
    # this model by 4e-5.
    most = 1e-4 if "delta_net" in read_config(forms.wide).mixers else 2e-5
    for found in others:
        assert float(errors(found, exact).max()) < most


def test_in_bfloat16_no_form_is_further_from_exact_than_the_wide_path(family, tmp_path):
    """Exact is the same rounded weights computed in float32."""
    wide, portable, compiled = median_errors(FAMILIES[family], tmp_path)
    assert portable < 1.2 * wide
    assert compiled < 0.7 * wide


def test_what_the_first_attention_rounds_away_is_kept(tmp_path):
    """Without it the compiled form has three fifths of the error of the wide path."""
    wide, _, compiled = median_errors(FAMILIES["llama"], tmp_path)
    assert compiled < 0.5 * wide


def median_errors(config: PreTrainedConfig, folder) -> list[float]:
    """Of the wide path, the torch form and the compiled form in bfloat16."""
    forms = forms_of(config, folder, dtype="bfloat16")
    found = [
        torch.cat(run_steps(form, PROMPTS, STEPS, dtype=torch.bfloat16))
        for form in (forms.wide, forms.torch, forms.native)
    ]
    forms.wide.model.float()
    exact = torch.cat(run_steps(forms.wide, PROMPTS, STEPS, dtype=torch.float32))
    return [float(errors(logits, exact).median()) for logits in found]


def served(config: PreTrainedConfig, folder, **options) -> TransformersModel:
    loaded = load_model(save_model(config, folder), **options)
    return probe(loaded.model, max_model_len=loaded.max_model_len)


def changed(family: str, **fields) -> PreTrainedConfig:
    config = FAMILIES[family]
    return type(config).from_dict(config.to_dict() | fields)


#: With a state, and what only the wide path computes: in the first two another activation than SiLU
#: after the convolutions.
LEFT = {
    "delta nets": changed("qwen3.5", hidden_act="gelu_pytorch_tanh"),
    "state spaces": changed("granite 4", hidden_act="gelu_pytorch_tanh"),
    "empty MLP": changed("granite 4, experts", shared_intermediate_size=0),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_to_the_wide_path_generates_what_transformers_generates(kind, tmp_path):
    folder = save_model(LEFT[kind], tmp_path)
    runner = make_runner(folder)
    assert isinstance(runner.model, TransformersModel)
    check_generated(runner, Oracle(folder).alone())


def test_another_activation_is_computed_where_no_layer_has_a_state(tmp_path):
    config = changed("granite 4, attention only", hidden_act="gelu_pytorch_tanh")
    folder = save_model(config, tmp_path)
    runner = make_runner(folder)
    assert isinstance(runner.model, NativeDecoder)
    check_generated(runner, Oracle(folder).alone())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (CONFIGS["gpt2"], "the model type gpt2 is not supported"),
        (transformers.LlamaConfig(**_GROUPED, mlp_bias=True), "mlp_bias = True"),
        (transformers.LlamaConfig(**_GROUPED, hidden_act="gelu"), "hidden_act = 'gelu'"),
        (LEFT["delta nets"], "'gelu_pytorch_tanh', also for convolutions"),
        (LEFT["state spaces"], "'gelu_pytorch_tanh', also for convolutions"),
        (LEFT["empty MLP"], "its gate_up is empty"),
        (
            transformers.LlamaConfig(
                **_GROUPED,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
            ),
            "rotary embedding has the type 'dynamic'",
        ),
    ],
    ids=["family", "bias", "activation", *LEFT, "rotary"],
)
def test_what_is_not_understood_is_left_to_the_wide_path_with_one_sentence(
    config, reason, tmp_path, caplog
):
    wide = served(config, tmp_path)
    with caplog.at_level(logging.INFO, logger="engine.model.load.fast_path"):
        assert choose_model(wide) is wide
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("served by the wide path: ")
    assert reason in message
    with pytest.raises(ModelRefused, match="the fast path cannot serve this model"):
        choose_model(wide, model_path="fast")


def test_an_unknown_field_is_not_ignored(tmp_path, monkeypatch):
    class NewerConfig(transformers.LlamaConfig):
        """What a later release may bring."""

        attention_sinks: int = 0

    wide = served(FAMILIES["llama"], tmp_path)
    assert read_config(wide).family is families.FAMILIES["llama"]
    fields = transformers.LlamaConfig().to_dict() | {"attention_sinks": 0}
    monkeypatch.setattr(transformers.LlamaConfig, "to_dict", lambda self: fields)
    with pytest.raises(NotSupported, match="'attention_sinks'"):
        read_config(wide)


@pytest.mark.parametrize("field", [{"no_rope_layers": [0, 0]}, {"logits_scaling": 4.0}], ids=str)
def test_a_field_of_another_family_means_nothing(field, tmp_path):
    folder = save_model(CONFIGS["qwen3"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | field))
    loaded = load_model(folder)
    wide = probe(loaded.model, max_model_len=loaded.max_model_len)
    assert isinstance(choose_model(wide), NativeDecoder)


def test_an_unknown_tensor_is_not_ignored(tmp_path, caplog):
    wide = served(FAMILIES["llama"], tmp_path)
    wide.model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.ones(4))
    with caplog.at_level(logging.INFO, logger="engine.model.load.fast_path"):
        assert choose_model(wide) is wide
    assert "model.layers.0.self_attn.sinks" in caplog.text


def test_the_wide_path_can_be_asked_for(tmp_path):
    wide = served(FAMILIES["llama"], tmp_path)
    assert choose_model(wide, model_path="wide") is wide


def test_without_a_compiler_the_torch_form_serves_and_says_so_once(tmp_path, monkeypatch, caplog):
    def unavailable(variant):
        raise KernelsUnavailable("there is no C++ compiler (g++) on this machine")

    monkeypatch.setattr("engine.model.decoder.native_decoder.load_library", unavailable)
    model = choose_model(served(FAMILIES["llama"], tmp_path))
    assert isinstance(model, Decoder)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "there is no C++ compiler" in message


@pytest.mark.parametrize("error", [1.5, torch.nan])
def test_a_form_with_wrong_logits_is_left_out(error, tmp_path, monkeypatch, caplog):
    """The check at load is what stands between a miscompiled kernel and wrong answers."""
    right = NativeDecoder.forward
    monkeypatch.setattr(
        NativeDecoder, "forward", lambda self, inputs, pool: right(self, inputs, pool) * error
    )
    assert isinstance(choose_model(served(FAMILIES["llama"], tmp_path)), Decoder)
    assert "is off by" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_form_that_is_wrong_for_a_single_token_is_left_out(dtype, tmp_path, monkeypatch, caplog):
    """A kernel that forgets the last row of a block is right for most tokens."""
    right = NativeDecoder.forward

    def one_wrong(self, inputs, pool):
        logits = right(self, inputs, pool)
        where = (inputs.positions == 20).nonzero()[:, 0]
        logits[where] = logits[where].flip(-1)
        return logits

    monkeypatch.setattr(NativeDecoder, "forward", one_wrong)
    wide = served(FAMILIES["llama"], tmp_path, dtype=dtype)
    assert isinstance(choose_model(wide), Decoder)
    assert "in the worst token" in caplog.text


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5", "granite 4"])
def test_a_form_that_begins_a_chunk_without_its_state_is_left_out(
    family, tmp_path, monkeypatch, caplog
):
    right = NativeDecoder.forward

    def forgetful(self, inputs, pool):
        rows = inputs.recurrent
        rows.turn = rows.turn._replace(reads=np.full_like(rows.turn.reads, pool.states.tags.zero))
        return right(self, inputs, pool)

    monkeypatch.setattr(NativeDecoder, "forward", forgetful)
    assert isinstance(choose_model(served(FAMILIES[family], tmp_path)), Decoder)
    assert "is off by" in caplog.text


@pytest.mark.parametrize(("num_wrong", "form"), [(1, NativeDecoder), (30, Decoder)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_tokens_may_have_other_experts(num_wrong, form, dtype, tmp_path, monkeypatch):
    """Rounding decides between nearly equal scores; what most tokens have is no rounding."""
    right = NativeDecoder.forward

    def some_wrong(self, inputs, pool):
        logits = right(self, inputs, pool)
        if self.num_chosen < 5:
            where = inputs.positions < num_wrong
            logits[where] = logits[where].flip(-1)
        return logits

    monkeypatch.setattr(NativeDecoder, "forward", some_wrong)
    assert isinstance(choose_model(served(FAMILIES["mixtral"], tmp_path, dtype=dtype)), form)


def test_where_every_expert_computes_no_token_may_differ(tmp_path, monkeypatch, caplog):
    right, wide = NativeDecoder.forward, served(FAMILIES["mixtral"], tmp_path)
    counts = []

    def one_wrong(self, inputs, pool):
        logits = right(self, inputs, pool)
        counts.append(self.num_chosen)
        where = inputs.positions == 20
        logits[where] = logits[where].flip(-1)
        return logits

    monkeypatch.setattr(NativeDecoder, "forward", one_wrong)
    assert isinstance(choose_model(wide), Decoder)
    assert "in the worst token" in caplog.text
    assert set(counts) == {5}
    # Afterwards the wide path chooses as before.
    assert {layer.mlp.gate.top_k for layer in wide.model.model.layers} == {2}


@pytest.mark.parametrize("padding", [5, 7, 18, 21, 48])
def test_a_token_without_an_embedding_refuses_no_model_and_no_form(padding, tmp_path):
    """That of a padding token is zero for life.

    Where a checked prompt begins with it, so are the first logits.
    """
    config = transformers.LlamaConfig(**(_GROUPED | {"pad_token_id": padding}))
    loaded = load_model(save_model(config, tmp_path))
    assert not loaded.model.get_input_embeddings().weight[padding].any()
    wide = probe(loaded.model, max_model_len=loaded.max_model_len)
    assert isinstance(choose_model(wide), NativeDecoder)


def test_of_zeros_nothing_but_zeros_is_right():
    expected = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [3.0, 4.0]])
    distances = torch.tensor([0.0, 1e-9, 0.5, torch.nan])
    errors = relative_errors(distances, expected).tolist()
    assert errors[:3] == [0.0, math.inf, pytest.approx(0.1)] and math.isnan(errors[3])


def test_with_every_form_left_out_the_wide_path_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(fast_path, "_forms", lambda kind, **options: iter(()))
    wide = served(FAMILIES["llama"], tmp_path)
    assert choose_model(wide) is wide
    with pytest.raises(ModelRefused, match="no form of the fast path works"):
        choose_model(wide, model_path="fast")
