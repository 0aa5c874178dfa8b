"""The one run on a lent GPU: everything that only a device can show, in six minutes.

    python -m tests.gpu.lease --out DIR [--wheels build/lease-wheels] [--steps 8B,profile]
    python -m tests.gpu.lease --verdicts DIR

Each step is a process of its own with a limit. When it ends, or is killed, there is one line of it
and one file, `DIR/<step>.json`, with its figures so far; then the next one begins. At the end the
rules of `tests/gpu/lease/rules.py` say what follows; `--verdicts` says it again from the files.

The machine needs torch, transformers, pytest with xdist, and no network. `make lease-wheels` puts
what a worker needs beside them into `build/lease-wheels`, to be carried there. `--device cpu`
rehearses the same steps with a tiny model.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.common.arguments import names_of
from tests.gpu.lease.rules import verdicts
from tests.gpu.lease.running import file_of, line_of, run_steps
from tests.gpu.lease.steps import SHAPES, STEPS

WHEELS = Path("build/lease-wheels")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="the folder of the files")
    where.add_argument("--verdicts", type=Path, metavar="DIR", help="only what its files decide")
    parser.add_argument("--device", choices=sorted(SHAPES), default="cuda")
    parser.add_argument("--wheels", type=Path, default=WHEELS, metavar="DIR")
    parser.add_argument("--steps", type=names_of("step", [step.name for step in STEPS]))
    arguments = parser.parse_args()
    if arguments.verdicts:
        tell_verdicts(arguments.verdicts)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    values = SHAPES[arguments.device] | {
        "device": arguments.device,
        "wheels": str(arguments.wheels),
    }
    chosen = [step for step in STEPS if not arguments.steps or step.name in arguments.steps]
    for step in chosen:
        file_of(arguments.out, step).unlink(missing_ok=True)
    failures = 0
    for record in run_steps(chosen, values, arguments.out):
        failures += record["status"] != "ok"
        print(line_of(record), flush=True)
    tell_verdicts(arguments.out)
    return 1 if failures else 0


def tell_verdicts(folder: Path) -> None:
    """Print what the files of a run decide."""
    files = (file_of(folder, step) for step in STEPS)
    records = [json.loads(file.read_text()) for file in files if file.exists()]
    if any((record["figures"] or {}).get("device") == "CPU" for record in records):
        print("\nA rehearsal on a CPU, which decides nothing:")
    else:
        print("\nWhat follows, by the rules written before the run:")
    for verdict in verdicts({record["step"]: record["figures"] for record in records}):
        print(f"- {verdict}")


if __name__ == "__main__":
    sys.exit(main())
