"""The gate of the benchmark of `deterministic`: no figures where the promise is not kept."""

import pytest

from benchmarks.bench_deterministic import GATED_TOKENS, NUM_GATED, pass_gate
from benchmarks.common.workloads import Workload


class Swayed:
    """An engine whose tokens follow from how many requests there are beside each other."""

    vocab_size = 1000

    def __init__(self, *, length: int = GATED_TOKENS, sway: int = 1) -> None:
        self._length = length
        self._sway = sway

    def run(self, workload: Workload) -> tuple[None, dict[str, list[int]]]:
        token = self._sway * len(workload.items)
        return None, {
            f"{workload.name}-{index}": [token] * self._length
            for index in range(len(workload.items))
        }


def test_tokens_that_depend_on_company_break_the_promise():
    with pytest.raises(SystemExit, match="differs from itself alone"):
        pass_gate(Swayed(), deterministic=True)


def test_without_the_promise_tokens_may_depend_on_company_but_lengths_may_not():
    pass_gate(Swayed(), deterministic=False)
    with pytest.raises(SystemExit, match="wrong length"):
        pass_gate(Swayed(length=GATED_TOKENS - 1), deterministic=False)


def test_tokens_that_are_their_own_pass():
    assert NUM_GATED > 1
    pass_gate(Swayed(sway=0), deterministic=True)
