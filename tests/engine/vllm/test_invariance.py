"""The check of vLLM's batch-invariant mode at the start, over a fake of vLLM."""

import pytest

from engine.errors import ModelRefused
from engine.logprobs import Logprobs
from engine.vllm.backend import NewToken
from engine.vllm.invariance import refuse_if_batch_variant
from tests.engine.vllm.fake_vllm import VOCAB_SIZE, FakeVllm


class Telling(FakeVllm):
    """Says a log-probability with each token, which is another one in batches of some size.

    Args:
        variant_from: the number of rows from which on sums are rounded in another way.
    """

    def __init__(self, *, variant_from: int) -> None:
        super().__init__(1 << 10, 16)
        self._variant_from = variant_from
        self.sizes: set[int] = set()

    def step(self) -> list[NewToken]:
        tokens = super().step()
        self.sizes.add(len(tokens))
        told = Logprobs(-1.0 - 1e-7 * (len(tokens) >= self._variant_from))
        return [one._replace(logprobs=told) for one in tokens]


def check(backend: Telling, *, max_num_seqs: int = 16, max_model_len: int = 1000) -> None:
    refuse_if_batch_variant(
        backend, vocab_size=VOCAB_SIZE, max_num_seqs=max_num_seqs, max_model_len=max_model_len
    )


def test_a_request_that_is_the_same_in_all_batches_passes():
    backend = Telling(variant_from=17)
    check(backend)
    assert backend.sizes == {1, 2, 7, 16}
    assert backend.requests == {}


@pytest.mark.parametrize("variant_from", [2, 16])
def test_a_request_that_depends_on_its_batch_is_refused(variant_from):
    with pytest.raises(ModelRefused, match="depend on its batch"):
        check(Telling(variant_from=variant_from))


def test_a_short_model_and_one_row_are_served():
    check(Telling(variant_from=2), max_num_seqs=1, max_model_len=20)
