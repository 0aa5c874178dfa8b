"""Which models with a recurrent state vLLM serves."""

from types import SimpleNamespace

import pytest

from engine.errors import ModelRefused
from engine.vllm.recurrent import caches_prefixes, refuse_if_wrong


def test_what_vllm_computes_wrongly_on_a_cpu_is_refused_there_by_name():
    jamba = SimpleNamespace(architecture="JambaForCausalLM")
    with pytest.raises(ModelRefused, match=r"JambaForCausalLM: .* no kernel"):
        refuse_if_wrong(jamba, is_cpu=True)
    refuse_if_wrong(jamba, is_cpu=False)
    refuse_if_wrong(SimpleNamespace(architecture="Mamba2ForCausalLM"), is_cpu=True)


@pytest.mark.parametrize(
    ("has_state", "is_cpu", "caches"),
    [(True, True, False), (True, False, True), (False, True, True), (False, False, True)],
)
def test_on_a_cpu_only_models_without_a_state_cache_prefixes(has_state, is_cpu, caches):
    config = SimpleNamespace(has_inner_state=has_state)
    assert caches_prefixes(config, is_cpu=is_cpu) is caches
