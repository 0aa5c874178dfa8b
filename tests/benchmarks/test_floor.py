"""The limits of a machine: which arithmetic is the faster is not decided by who comes first."""

from benchmarks.common import floor
from benchmarks.common.models import SHAPES


def test_the_first_product_of_a_type_decides_nothing(monkeypatch):
    """Its code is made then, which takes longer than the slower type's product."""
    seen = set()

    def seconds(compute):
        """Without measuring: bfloat16 is twice as fast, but for the first time."""
        result = compute()
        if isinstance(result, list):
            return 1.0
        name, size = str(result.dtype), len(result)
        is_first = (name, size) not in seen
        seen.add((name, size))
        first, later = {"torch.bfloat16": (1.8, 0.1), "torch.float32": (0.5, 0.2)}[name]
        return first if is_first else later

    monkeypatch.setattr(floor, "_seconds", seconds)
    best, _ = floor.measure_limits(SHAPES["TINY"], dtype="bf16")
    assert best.operations_per_second == 2.0 * floor.PEAK_SIZE**3 / 0.1
