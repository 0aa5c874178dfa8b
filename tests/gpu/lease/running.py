"""Runs steps one after the other, each in a process of its own that is killed at its limit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.lease.steps import Step

#: The end of what a step printed that is kept in its file.
KEPT_CHARACTERS = 6000

#: A step's file: `step`, `status` (ok, failed or killed), `exit_code`, `seconds`,
#: `limit_seconds`, `arguments`, `figures` (what the step wrote, None if nothing), `output`.
Record = dict[str, Any]


def run_steps(steps: Sequence[Step], values: Mapping[str, str], folder: Path) -> Iterator[Record]:
    """Run the steps in their order; yields the record of each when its file is written.

    A step may also use the seconds that earlier ones left over. So all together end within the sum
    of their limits.
    """
    left = 0.0
    for step in steps:
        record = run_step(step, values, limit=step.seconds + left)
        left = max(0.0, record["limit_seconds"] - record["seconds"])
        file_of(folder, step).write_text(json.dumps(record, indent=1) + "\n")
        yield record


def file_of(folder: Path, step: Step) -> Path:
    return folder / f"{step.name}.json"


def run_step(step: Step, values: Mapping[str, str], *, limit: float) -> Record:
    """Run one step. Nothing that it started is left running, whatever becomes of it."""
    with tempfile.TemporaryDirectory(prefix="quire-lease-") as name:
        report, log = Path(name) / "figures.json", Path(name) / "log"
        arguments = [part.format_map({**values, "json": str(report)}) for part in step.arguments]
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                # What it leaves in its temporary folder goes with it.
                env=os.environ | {"TMPDIR": name},
            )  # fmt: skip
            try:
                status = "ok" if process.wait(limit) == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = "killed"
            finally:
                kill_group(process)
        return {
            "step": step.name,
            "status": status,
            "exit_code": process.returncode,
            "seconds": round(time.monotonic() - started, 1),
            "limit_seconds": limit,
            "arguments": arguments,
            "figures": figures_in(report),
            "output": log.read_text(errors="replace")[-KEPT_CHARACTERS:],
        }


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a step and what it started: it would use the device while the next step measures."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def figures_in(report: Path) -> Any:
    """What a step wrote; None if it wrote nothing, or was killed while it wrote."""
    try:
        return json.loads(report.read_text())
    except (OSError, ValueError):
        return None


def line_of(record: Record) -> str:
    """A step in one line: its status, and the headline of its figures or its last words."""
    told = (record["figures"] or {}).get("headline", "")
    if record["status"] != "ok":
        last = (record["output"].strip().splitlines() or [""])[-1]
        told = f"{told} | {last}" if told else last
    took = f"{record['seconds']:.0f} of {record['limit_seconds']:.0f} s"
    return f"{record['step']:>13} {record['status']:>6} {took:>12}  {told}"
