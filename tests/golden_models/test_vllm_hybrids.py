"""vLLM computes hybrids as transformers does, or a worker refuses them: `make test-vllm`."""

import pytest

from engine.errors import ModelRefused
from engine.vllm.recurrent import NOT_ON_CPU
from tests.golden_models import vllm_registry
from tests.golden_models.compare import save
from tests.golden_models.configs import class_name, small_config

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` has it")

from tests.golden_models import vllm_hybrids

#: Loading takes longer than most tests.
pytestmark = pytest.mark.timeout(300)

COMPARED = [found.kind for found in vllm_registry.hybrids() if found.state == "compared"]


def test_every_hybrid_that_vllm_lists_is_recorded():
    assert [found.kind for found in vllm_registry.hybrids()] == vllm_hybrids.hybrids()


@pytest.mark.parametrize("kind", COMPARED)
def test_a_compared_hybrid_has_the_tokens_of_transformers(kind):
    found = vllm_hybrids.compare(kind)
    assert (found.state, found.reason) == ("compared", "")


@pytest.mark.parametrize("kind", ["jamba", "lfm2"])
def test_a_worker_refuses_at_its_start_what_vllm_does_not_compute(kind, tmp_path):
    save(small_config(kind), tmp_path, seed=0)
    with pytest.raises(ModelRefused, match=NOT_ON_CPU[class_name(kind)]):
        vllm_hybrids.engine_of(tmp_path, vllm_hybrids.LIMITS)
