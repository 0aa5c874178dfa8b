"""How fast a workload could be at best: its arithmetic and its bytes at what this machine reaches.

The floor counts products with weights at the rate of one large matrix product, and weights and KV
at the rate at which as many bytes can be read over and over; the longer of the two times counts.
Attention's own arithmetic, norms and sampling count nothing, so no engine gets there.
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
#: Rows and columns of the product that is the peak.
PEAK_SIZE = 2048
#: The same of one that only shows which arithmetic is the faster, and how often it is tried: the
#: first product of a type takes many times as long, since its code is made then.
PROBE_SIZE = 256
PROBE_ATTEMPTS = 5
#: How often peak and bandwidth are measured; the best counts.
ATTEMPTS = 12
#: How long each of the two is repeated to see what the machine keeps up.
SUSTAINED_SECONDS = 3.0
#: Read in one attempt at least this much, however small the weights.
BYTES_PER_ATTEMPT = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """What a machine reaches, or keeps up: operations and bytes a second."""

    operations_per_second: float
    bytes_per_second: float

    def best_with(self, other: "Limits") -> "Limits":
        """The better of the two, each by itself: whatever else ran then made one of them worse."""
        return Limits(
            max(self.operations_per_second, other.operations_per_second),
            max(self.bytes_per_second, other.bytes_per_second),
        )

    @classmethod
    def mean_of(cls, several: "Sequence[Limits]") -> "Limits":
        """What was kept up on average, where each was measured for as long."""
        return cls(
            statistics.mean(one.operations_per_second for one in several),
            statistics.mean(one.bytes_per_second for one in several),
        )

    def rounded(self) -> dict[str, float]:
        return {name: float(f"{value:.3g}") for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Work:
    """What a workload cannot do without."""

    operations: float
    bytes_read: float

    def seconds(self, limits: Limits) -> float:
        return max(
            self.operations / limits.operations_per_second,
            self.bytes_read / limits.bytes_per_second,
        )


def weights_per_token(shape: dict[str, int]) -> tuple[int, int]:
    """Weights that each computed token meets, and those that only a token due for output meets."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    head_dim = hidden // shape["num_attention_heads"]
    keys_and_values = 2 * shape["num_key_value_heads"] * head_dim
    layer = hidden * (2 * hidden + keys_and_values) + 3 * hidden * inner
    return shape["num_hidden_layers"] * layer, shape["vocab_size"] * hidden


def kv_values_per_token(shape: dict[str, int]) -> int:
    """Numbers in the keys and values of one token, of all layers."""
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    return 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim


def work_of(workload: Workload, shape: dict[str, int], *, dtype: str) -> Work:
    """The least work: a shared prefix once, and the weights once for all requests of a step."""
    body, head = weights_per_token(shape)
    kv_values = kv_values_per_token(shape)
    size = BYTES_PER_VALUE[dtype]
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
        bytes_read=float(size * ((body + head) * num_steps + kv_values * read_contexts)),
    )


def measure_limits(shape: dict[str, int], *, dtype: str) -> tuple[Limits, Limits]:
    """The best of some attempts, on all cores, in the arithmetic of `dtype`; and what is kept up.

    The two are apart where a processor is as fast as it can be for moments only. What is in
    bfloat16 can be multiplied in float32 as well: the faster arithmetic is the limit.
    """
    import torch

    kinds = {"bf16": (torch.bfloat16, torch.float32), "fp32": (torch.float32,)}[dtype]
    # A product in bfloat16 takes a thousand times as long on a processor that has none.
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
    """ATTEMPTS at least, and SUSTAINED_SECONDS."""
    found: list[float] = []
    while len(found) < ATTEMPTS or sum(found) < SUSTAINED_SECONDS:
        found.append(_seconds(compute))
    return found


def _seconds(compute: Callable[[], object]) -> float:
    started = time.perf_counter()
    compute()
    return time.perf_counter() - started
