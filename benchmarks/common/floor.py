"""The floor of a workload: the shortest time in which this machine could do its work.

There are two times: of the products with weights, at the rate of one large matrix product; and of
reading weights and KV, at the rate of reading as many bytes again and again. The floor is the
longer one. The arithmetic of attention, norms and sampling count as 0, so no engine reaches it.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from benchmarks.common.workloads import SHARED_PREFIX_TOKENS, Workload

if TYPE_CHECKING:
    import torch

BYTES_PER_VALUE = {"bf16": 2, "fp32": 4}
#: Rows and columns of the matrix product that measures the peak.
PEAK_SIZE = 2048
#: Size of the product that finds the faster arithmetic, and the number of tries. Several, because
#: the first product of a type takes many times as long: its code is generated then.
PROBE_SIZE = 256
PROBE_ATTEMPTS = 5
#: How often peak and bandwidth are measured; the best counts.
ATTEMPTS = 12
#: How long each of the two is repeated to find the sustained rate.
SUSTAINED_SECONDS = 3.0
#: The least number of bytes that one attempt reads, also for small weights.
BYTES_PER_ATTEMPT = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """Operations and bytes per second of a machine: its best or its sustained rates."""

    operations_per_second: float
    bytes_per_second: float

    def best_with(self, other: "Limits") -> "Limits":
        """The larger of each rate: a lower one was measured while something else ran."""
        return Limits(
            max(self.operations_per_second, other.operations_per_second),
            max(self.bytes_per_second, other.bytes_per_second),
        )

    @classmethod
    def mean_of(cls, several: "Sequence[Limits]") -> "Limits":
        """The mean of each rate, for measurements of equal length."""
        return cls(
            statistics.mean(one.operations_per_second for one in several),
            statistics.mean(one.bytes_per_second for one in several),
        )

    def rounded(self) -> dict[str, float]:
        return {name: float(f"{value:.3g}") for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of a workload: arithmetic operations, and bytes to read."""

    operations: float
    bytes_read: float

    def seconds(self, limits: Limits) -> float:
        return max(
            self.operations / limits.operations_per_second,
            self.bytes_read / limits.bytes_per_second,
        )


def weights_per_token(shape: dict[str, int]) -> tuple[int, int]:
    """The weights that each computed token is multiplied with, and those of the head.

    Only tokens whose logits are needed are multiplied with the head.
    """
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head_dim = hidden // shape["num_attention_heads"]
    keys_and_values = 2 * shape["num_key_value_heads"] * head_dim
    layer = hidden * (2 * hidden + keys_and_values) + 3 * hidden * inner
    return shape["num_hidden_layers"] * layer, shape["vocab_size"] * hidden


def kv_values_per_token(shape: dict[str, int]) -> int:
    """The number of values in the keys and values of one token, over all layers."""
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    return 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim


def work_of(
    workload: Workload, shape: dict[str, int], *, dtype: str, bytes_per_weight: float | None = None
) -> Work:
    """The least work of a workload.

    It computes a shared prefix once, and reads the weights once for all requests of a step. Weights
    have `bytes_per_weight`, by default as many as the keys and values, which have those of `dtype`.
    """
    body, head = weights_per_token(shape)
    kv_values = kv_values_per_token(shape)
    size = BYTES_PER_VALUE[dtype]
    weights = (body + head) * (size if bytes_per_weight is None else bytes_per_weight)
    prefixes = [item.prompt_token_ids[:SHARED_PREFIX_TOKENS] for item in workload.items]
    num_shared = (len(prefixes) - len(set(prefixes))) * SHARED_PREFIX_TOKENS
    num_computed = workload.num_prompt_tokens - num_shared
    num_computed += workload.num_output_tokens - len(workload.items)
    read_contexts = sum(
        sum(range(len(item.prompt_token_ids) + 1, len(item.prompt_token_ids) + outputs))
        for item in workload.items
        if (outputs := item.num_output_tokens)
    )
    num_steps = max(item.num_output_tokens for item in workload.items)
    return Work(
        operations=2.0 * (body * num_computed + head * workload.num_output_tokens),
        bytes_read=float(weights * num_steps + size * kv_values * read_contexts),
    )


def measure_limits(shape: dict[str, int], *, dtype: str) -> tuple[Limits, Limits]:
    """The best and the sustained limits, on all cores, in the arithmetic of `dtype`.

    They differ if a processor reaches its highest speed only for short times. Values in bfloat16
    can also be multiplied in float32: the faster arithmetic is the limit.
    """
    import torch

    kinds = {"bf16": (torch.bfloat16, torch.float32), "fp32": (torch.float32,)}[dtype]
    # Without hardware support a product in bfloat16 takes a thousand times as long.
    probes = {kind: _product(PROBE_SIZE, kind) for kind in kinds}
    kind = min(kinds, key=lambda kind: min(_seconds(probes[kind]) for _ in range(PROBE_ATTEMPTS)))
    product = _product(PEAK_SIZE, kind)
    num_bytes = sum(weights_per_token(shape)) * BYTES_PER_VALUE[dtype]
    words = torch.ones(num_bytes // 8, dtype=torch.int64)
    times = max(1, BYTES_PER_ATTEMPT // num_bytes)
    products = _seconds_of_each(product)
    readings = _seconds_of_each(lambda: [words.sum() for _ in range(times)])

    def limits(product: float, reading: float) -> Limits:
        return Limits(
            operations_per_second=2.0 * PEAK_SIZE**3 / product,
            bytes_per_second=times * num_bytes / reading,
        )

    best = limits(min(products[:ATTEMPTS]), min(readings[:ATTEMPTS]))
    return best, limits(statistics.mean(products), statistics.mean(readings))


def _product(size: int, kind: "torch.dtype") -> Callable[[], object]:
    import torch

    left, right = (torch.randn(size, size).to(kind) for _ in range(2))
    return lambda: left @ right


def _seconds_of_each(compute: Callable[[], object]) -> list[float]:
    """The seconds of each call: at least ATTEMPTS of them, for at least SUSTAINED_SECONDS."""
    found: list[float] = []
    while len(found) < ATTEMPTS or sum(found) < SUSTAINED_SECONDS:
        found.append(_seconds(compute))
    return found


def _seconds(compute: Callable[[], object]) -> float:
    started = time.perf_counter()
    compute()
    return time.perf_counter() - started
