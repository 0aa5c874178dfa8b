"""Models with a recurrent state: the tokens of transformers, however a request is computed."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import transformers

import engine.model.wide.mixers as mixers
from engine.cache.state_tags import BUFFERS, Copied, StateTags, Turn
from engine.errors import ModelRefused
from engine.model.kernels.recurrent import RecurrentKernels
from engine.model.wide import transformers_model
from engine.model.wide.state_size import bytes_of_state
from tests.engine.model.builders import (
    _GROUPED,
    EOS,
    PROMPTS,
    SCARCE,
    VOCAB_SIZE,
    Oracle,
    check_generated,
    generate,
    make_runner,
    requests_of,
    save_model,
)
from tests.engine.model.prefixes import ENOUGH_SNAPSHOTS, generate_behind_prefixes

_MAMBA = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "eos_token_id": EOS, "bos_token_id": 0}
CONFIGS = {
    "lfm2": transformers.Lfm2Config(
        **_GROUPED,
        layer_types=["conv", "full_attention"],
        conv_bias=True,
    ),
    # No attention at all, and no positions.
    "mamba": transformers.MambaConfig(
        **_MAMBA, num_hidden_layers=2, state_size=6, initializer_range=0.3
    ),
    # Two groups of heads.
    "mamba2": transformers.Mamba2Config(
        **_MAMBA,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        n_groups=2,
        state_size=6,
        initializer_range=0.3,
    ),
    "gated delta net": transformers.Qwen3_5TextConfig(
        **_GROUPED,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=12,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "kimi delta attention": transformers.KimiLinearConfig(
        **(_GROUPED | {"num_hidden_layers": 3, "num_key_value_heads": 4}),
        linear_num_heads=2,
        linear_head_dim=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense"] * 3,
    ),
    "lightning attention": transformers.MiniMaxConfig(
        **(_GROUPED | {"num_hidden_layers": 3}),
        head_dim=16,
        # With more of them, the products of an expert depend on the tokens that others have.
        num_local_experts=1,
        num_experts_per_tok=1,
        block_size=8,
        # `generate` miscounts the positions of a model that begins with a linear layer.
        layer_types=["full_attention", "linear_attention", "linear_attention"],
    ),
    "gated linear recurrent unit": transformers.RecurrentGemmaConfig(
        **(_GROUPED | {"num_hidden_layers": 3}),
        attention_window_size=13,
        block_types=["recurrent", "attention", "recurrent"],
    ),
    "compressed convolution": transformers.ZayaConfig(
        **_GROUPED,
        head_dim=16,
        # As above.
        num_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        cca_time0=3,
    ),
    "rwkv": transformers.RwkvConfig(**_GROUPED),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def folder(kind: str):
        return save_model(CONFIGS[kind], tmp_path_factory.mktemp(kind))

    return folder


@pytest.fixture(scope="module")
def expected_of(folder_of):
    return cache(lambda kind: Oracle(folder_of(kind)).alone())


@pytest.mark.parametrize("kind", CONFIGS)
def test_alone_chunked_preempted_resumed_and_batched_the_tokens_are_those_of_generate(
    kind, folder_of, expected_of
):
    folder, expected = folder_of(kind), expected_of(kind)
    runner = make_runner(folder, model_path="wide")
    assert runner.config_facts.states.num_slots == 8
    assert bytes_of_state(folder) == runner.kv_pool.states.bytes_per_state > 0
    assert generate(runner, requests_of()).tokens == expected
    check_generated(runner, expected)


@pytest.mark.parametrize("kind", CONFIGS)
def test_behind_a_cached_prefix_the_tokens_are_those_of_generate(kind, folder_of, expected_of):
    """In chunks, and preempted in both ways."""
    expected = {
        name: (prompt, tokens)
        for prompt, (name, tokens) in zip(PROMPTS, expected_of(kind).items(), strict=True)
    }
    rest = {name: list(tokens[5:]) for name, (_, tokens) in expected.items()}
    runner = make_runner(folder_of(kind), num_state_snapshots=ENOUGH_SNAPSHOTS)
    chunks = {"max_num_batched_tokens": 7, "state_snapshot_blocks": 2}
    assert generate_behind_prefixes(runner, expected, **chunks).tokens == rest
    for mode in ("recompute", "swap"):
        options = {"num_blocks": 28, "preemption_mode": mode, "keeps_all": False}
        found = generate_behind_prefixes(runner, expected, **options)
        assert getattr(found.snapshot, f"preemptions_{mode}") > 0
        assert found.tokens == rest


def test_a_snapshot_of_another_prompt_is_noticed(folder_of, expected_of, monkeypatch):
    tokens = expected_of("gated delta net")
    expected = dict(zip("0123", zip(PROMPTS, tokens.values(), strict=True), strict=True))
    runner = make_runner(folder_of("gated delta net"), num_state_snapshots=ENOUGH_SNAPSHOTS)
    rest = {name: list(tokens[5:]) for name, (_, tokens) in expected.items()}
    assert generate_behind_prefixes(runner, expected).tokens == rest

    def first_one(self, snapshot, slot, num_tokens):
        return Copied(self.first_snapshot, self.put(slot, num_tokens))

    monkeypatch.setattr(StateTags, "restore", first_one)
    assert generate_behind_prefixes(runner, expected).tokens != rest


@pytest.mark.parametrize("kind", CONFIGS)
def test_deterministic_compares_every_bit_of_such_a_model(kind, folder_of, expected_of):
    options = {"deterministic": True, "max_num_batched_tokens": 48}
    runner = make_runner(folder_of(kind), model_path="wide", **options)
    found = generate(runner, requests_of(), max_num_batched_tokens=7)
    assert found.tokens == expected_of(kind)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("lfm2", "only 1 of 2 layers of Lfm2ForCausalLM attend"), ("mamba", "state of a kind")],
)
def test_without_its_mixer_it_is_refused(kind, reason, folder_of, monkeypatch):
    monkeypatch.setattr(mixers, "_MIXER_OF", {})
    with pytest.raises(ModelRefused, match=reason):
        make_runner(folder_of(kind))


def without_kernels(monkeypatch):
    monkeypatch.setattr(transformers_model, "recurrent_kernels", lambda device: None)


@pytest.mark.parametrize("kind", ["lfm2", "mamba2", "gated delta net", "kimi delta attention"])
def test_torch_takes_the_place_of_kernels_and_the_fingerprint_says_so(
    kind, folder_of, expected_of, monkeypatch
):
    folder = folder_of(kind)
    compiled = make_runner(folder, model_path="wide")
    kernels = compiled.model.kernels
    assert compiled.model.name == f"transformers-{kernels.name}"
    without_kernels(monkeypatch)
    runner = make_runner(folder, model_path="wide")
    assert runner.model.name == "transformers"
    check_generated(runner, expected_of(kind))
    fingerprints = [one.config_facts.fingerprint for one in (compiled, runner)]
    for part in (kernels.name, kernels.build):
        assert part in fingerprints[0] and part not in fingerprints[1]


@pytest.mark.parametrize("kind", ["compressed convolution", "rwkv"])
def test_a_model_without_kernels_of_its_kind_does_not_name_them(kind, folder_of):
    assert make_runner(folder_of(kind)).model.name == "transformers"


def test_kernels_with_other_logits_than_the_module_are_not_used(
    folder_of, expected_of, monkeypatch, caplog
):
    recur = RecurrentKernels.recur
    monkeypatch.setattr(RecurrentKernels, "recur", lambda *given: -recur(*given))
    runner = make_runner(folder_of("gated delta net"), model_path="wide")
    assert runner.model.name == "transformers" and "is not used" in caplog.text
    assert generate(runner, requests_of()).tokens == expected_of("gated delta net")


class Forgetful:
    """A mixer that begins every step with an empty state."""

    def __init__(self, mixer):
        self._mixer = mixer
        self.classes, self.shapes = mixer.classes, mixer.shapes
        self.has_kernels = mixer.has_kernels

    def step(self, module, hidden, state):
        for part in state._parts:
            part[state.rows.reads] = 0
        return self._mixer.step(module, hidden, state)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_mixer_that_loses_its_state_is_noticed_by_the_probe(kind, folder_of, monkeypatch):
    forgetful = {name: Forgetful(mixer) for name, mixer in mixers._MIXER_OF.items()}
    monkeypatch.setattr(mixers, "_MIXER_OF", forgetful)
    with pytest.raises(ModelRefused, match="has other logits with paged attention"):
        make_runner(folder_of(kind), model_path="wide")


def late(runner, *, ahead: bool, **options) -> dict[str, list[int]]:
    """Tokens of requests most of whose draws are decided late, after the next step was launched."""
    runner._runs_ahead, runner._sampler._max_candidates = ahead, 1
    asked = requests_of(temperature=1.0, top_p=0.9)
    for index, request in enumerate(asked):
        request.sampling = replace(request.sampling, seed=index)
    return generate(runner, asked, **options).tokens


def in_place(self, slots, starts, ends):
    """The turn of a pool with one buffer for each slot."""
    first = BUFFERS * slots
    return Turn(np.where(starts == 0, self.zero, first), first, ends)


def test_a_step_that_is_computed_again_reads_the_state_before_it(folder_of, monkeypatch):
    runner = make_runner(folder_of("gated delta net"))
    expected = late(runner, ahead=False)
    assert late(runner, ahead=True) == expected
    for mode in ("recompute", "swap"):
        assert late(runner, ahead=True, preemption_mode=mode, **SCARCE) == expected
    monkeypatch.setattr(StateTags, "turn", in_place)
    assert late(runner, ahead=False) == expected
    assert late(runner, ahead=True) != expected, "one buffer would do"
