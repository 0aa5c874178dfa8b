"""Fuzzes what reads bytes from Redis: `python -m tests.fuzz --seconds 60`.

With atheris (the extra `fuzz`) the search is led by coverage of the readers' code, each target in a
process of its own. Without it, or with --plain, good bytes are made bad at random; that finds less,
and the command says so. Prints the executions and the findings; exits with 1 when there are any.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from quire.cli.console import not_negative
from tests.fuzz.mutation import mutated
from tests.fuzz.targets import SEEDS, TARGETS

#: The longest input, in bytes.
MAX_LENGTH = 4096

#: The most changes to good bytes when nothing leads the search.
MAX_CHANGES = 8

#: How much of what a process said is shown of a finding, in lines.
SHOWN_LINES = 25


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one target; `finding` is a text for a person, empty when all is well."""

    executions: int
    finding: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--seconds", type=not_negative, default=60.0, help="for all targets together"
    )
    parser.add_argument("--target", choices=TARGETS, help="this one only")
    parser.add_argument("--plain", action="store_true", help="without atheris")
    options = parser.parse_args()
    names = [options.target] if options.target else list(TARGETS)
    is_led = not options.plain and importlib.util.find_spec("atheris") is not None
    if not is_led:
        print("not led by coverage: bytes are changed at random")
    results = {}
    for name in names:
        seconds = options.seconds / len(names)
        results[name] = led(name, seconds) if is_led else plain(name, seconds)
        print(f"{name:16s}  {results[name].executions:>10d} executions", flush=True)
    findings = {name: result.finding for name, result in results.items() if result.finding}
    for name, finding in findings.items():
        print(f"\n{name}:\n{finding}")
    print(f"executions        {sum(result.executions for result in results.values())}")
    print(f"findings          {len(findings)}")
    return 1 if findings else 0


def plain(name: str, seconds: float) -> Result:
    """Changes good bytes at random, from the same seed every time."""
    draw, target, count = random.Random(name), TARGETS[name], 0
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        data = draw.choice(SEEDS[name])
        for _ in range(draw.randint(1, MAX_CHANGES)):
            data = mutated(data, draw)
        count += 1
        try:
            target(data)
        except Exception:  # noqa: BLE001 - whatever it is, it is what we look for.
            return Result(count, f"{data!r}\n{traceback.format_exc()}")
    return Result(count)


def led(name: str, seconds: float) -> Result:
    """Lets atheris search, in a process of its own: it ends its process."""
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(SEEDS[name]):
            (Path(folder) / f"seed{number}").write_bytes(seed)
        command = [sys.executable, "-m", "tests.fuzz.led", name, folder]
        command += [f"-max_total_time={max(1, round(seconds))}", f"-max_len={MAX_LENGTH}"]
        command += [f"-artifact_prefix={folder}/", "-print_final_stats=1"]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    counted = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    executions = int(counted[1]) if counted else 0
    if done.returncode == 0 and executions:
        return Result(executions)
    # The error is told on one stream, and the bytes that led to it on the other.
    lines = done.stdout.splitlines()[-SHOWN_LINES:]
    lines += [line for line in done.stderr.splitlines() if line.startswith("Base64:")]
    return Result(executions, "\n".join(lines) or done.stderr[-1000:])


if __name__ == "__main__":
    sys.exit(main())
