"""The exhaustive check of fairness between tenants: every state within bounds, and every law.

    python -m tests.simulation.fairness

Prints a shortest way to a broken law. The exit status is 1 when a law breaks or a control is not
caught.
"""

from __future__ import annotations

import sys
import time

from tests.simulation.fairness.search import CONTROLS, LARGE_SCENARIOS, SCENARIOS, explore


def main() -> int:
    num_broken = 0
    for bounds in (*SCENARIOS, *LARGE_SCENARIOS):
        began = time.monotonic()
        found = explore(bounds)
        seconds = time.monotonic() - began
        print(f"{bounds.name:32} {found.num_positions:9,} states  {seconds:6.1f} s", flush=True)
        if found.broken:
            num_broken += 1
            print("BROKEN", found.broken, *found.way, sep="\n  ")
    for kind, bounds, law in CONTROLS:
        is_caught = explore(bounds, kind).broken.startswith(law)
        num_broken += not is_caught
        print(f"control: {kind.__name__:30} {f'caught by {law}' if is_caught else 'NOT CAUGHT'}")
    return int(num_broken > 0)


if __name__ == "__main__":
    sys.exit(main())
