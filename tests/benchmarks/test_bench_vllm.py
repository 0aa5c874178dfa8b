"""The gate of the benchmark beside vLLM's own loop refuses figures of wrong tokens."""

import pytest

from benchmarks.common.gate import Agreement
from benchmarks.common.workloads import WorkItem, Workload
from benchmarks.peers.bench_vllm import NUM_READ, Gate, flags_of

#: Output tokens of each request.
LENGTH = 100
WORKLOAD = Workload("W1", (WorkItem((1, 2), LENGTH, 0.0),) * 2)


class Reference:
    """Agrees with the tokens that are 1."""

    def agreement(self, workload: Workload, tokens) -> Agreement:
        assert len(workload.items) == len(tokens) <= NUM_READ
        return Agreement(sum(map(sum, tokens)), sum(map(len, tokens)))


def output(num_agreed: int) -> list[list[int]]:
    """Tokens of both requests, of which so many are 1 in each."""
    return [[1] * num_agreed + [0] * (LENGTH - num_agreed)] * 2


def gate(dtype: str) -> Gate:
    return Gate(Reference(), dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_tokens_pass(dtype):
    checked = gate(dtype)
    checked.check(WORKLOAD, output(100), output(100))
    assert checked.ours.share == checked.theirs.share == 1.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_output_of_another_length_is_refused(dtype):
    short = [output(100)[0], [1] * (LENGTH - 1)]
    with pytest.raises(SystemExit, match="through Redis: an output has the wrong length"):
        gate(dtype).check(WORKLOAD, short, output(100))
    with pytest.raises(SystemExit, match="vLLM alone: an output has the wrong length"):
        gate(dtype).check(WORKLOAD, output(100), short)


def test_one_other_token_is_refused_in_float32():
    with pytest.raises(SystemExit, match="in float32 the tokens differ"):
        gate("fp32").check(WORKLOAD, output(99), output(100))


def test_in_bfloat16_chance_is_allowed_and_no_more():
    gate("bf16").check(WORKLOAD, output(82), output(90))
    with pytest.raises(SystemExit, match=r"agrees with 0.750 of our tokens, and with 0.900"):
        gate("bf16").check(WORKLOAD, output(75), output(90))


def test_the_worker_has_the_sizes_of_the_own_loop(monkeypatch):
    monkeypatch.setattr("benchmarks.peers.bench_vllm.model_folder", lambda model: f"/{model}")
    flags = flags_of("SMALL", dtype="bf16")
    assert flags["dtype"] == "bfloat16"
    assert (flags["max-num-seqs"], flags["max-num-batched-tokens"]) == ("64", "2048")
    assert flags["vllm"] == "block_size=128"
