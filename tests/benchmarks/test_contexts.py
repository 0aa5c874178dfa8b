"""What a context costs is counted by layer of attention, and only for tokens of transformers."""

import pytest

from benchmarks import bench_contexts, bench_engine
from benchmarks.bench_contexts import Growth, check, picture, prompt_of, ratio_of
from benchmarks.common import models
from benchmarks.common.gate import Agreement
from benchmarks.common.hybrids import HYBRIDS, TWINS, num_attention_layers

FOUND = {
    "LFM2-T": Growth("a form", 2, {512: 1.0, 4096: 3.0}),
    "LFM2-T-FULL": Growth("a form", 8, {4096: 9.0, 512: 1.0}),
}


def test_the_growth_is_shared_among_the_layers_of_attention():
    assert [growth.ms_per_attention_layer for growth in FOUND.values()] == [1.0, 1.0]
    assert ratio_of(FOUND, "LFM2-T") == 1.0
    faster = FOUND | {"LFM2-T": Growth("a form", 2, {512: 1.0, 4096: 2.0})}
    assert ratio_of(faster, "LFM2-T") == 0.5


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_differs_in_its_layers_alone(name):
    (config_class, options), (other_class, others) = HYBRIDS[name], HYBRIDS[TWINS[name]]
    assert config_class == other_class
    assert {key for key in options if options[key] != others[key]} == {"layer_types"}
    assert num_attention_layers(name) == 2
    assert num_attention_layers(TWINS[name]) == len(others["layer_types"]) == 8


class OneWrong:
    """A reference that would have chosen another token once."""

    def agreement(self, _, tokens):
        return Agreement(len(tokens[0]) - 1, len(tokens[0]))


def test_there_is_no_figure_for_other_tokens_than_those_of_the_reference():
    item = prompt_of(8, num_tokens=2, vocab_size=64)
    with pytest.raises(SystemExit, match="other tokens than those of transformers"):
        check("LFM2-T", OneWrong(), item, [5, 6, 7])
    with pytest.raises(SystemExit, match="2 tokens instead of 3"):
        check("LFM2-T", OneWrong(), item, [5, 6])


def test_the_picture_tells_models_from_their_twins():
    lines = picture(FOUND).splitlines()
    assert sum('class="first"' in line for line in lines) == 2
    assert sum('class="second"' in line for line in lines) == 2
    assert any("LFM2-T-FULL, 4,096 tokens" in line for line in lines)


def test_a_model_and_its_twin_are_measured_after_prompts_of_each_length(tmp_path, monkeypatch):
    for name in ("LFM2-T", TWINS["LFM2-T"]):
        config_class, options = HYBRIDS[name]
        small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
        monkeypatch.setitem(HYBRIDS, name, (config_class, options | small))
    monkeypatch.setattr(models, "BUILD_FOLDER", tmp_path)
    monkeypatch.setattr(bench_engine, "KV_CACHE_BYTES", 8 << 20)
    found = bench_contexts.measure("LFM2-T", (16, 300), num_tokens=3)
    assert {name: set(growth.token_ms) for name, growth in found.items()} == {
        "LFM2-T": {16, 300},
        "LFM2-T-FULL": {16, 300},
    }
