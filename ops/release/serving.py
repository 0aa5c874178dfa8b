"""Serves from an installed wheel, as on a machine that has nothing of Quire yet.

Installs the wheel with its extra `worker` into an empty environment outside the checkout, runs
`quire serve` there, types the call that it prints, and kills its worker in the middle of answers.
These must equal those that nothing disturbed. As a control, the answers as they were at the kill
must be refused.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ops.release.commands import Refused, bare_variables, run

ROOT = Path(__file__).resolve().parents[2]
#: This script runs in the new environment, with only what the extra has brought.
ASK = ROOT / "ops" / "release" / "ask_served.py"
#: The longest time of each part; the first one downloads a gigabyte, and more with CUDA.
INSTALL_SECONDS = 1800.0
START_SECONDS = 300.0
ANSWER_SECONDS = 300.0
END_SECONDS = 60.0
#: What abacus says to the call that the command prints.
WANTED = "46"


def try_serving(wheel: Path, *, torch: str, torch_index_url: str) -> None:
    """Install, serve, ask, kill. `Refused` at the first fault. `torch` is its requirement."""
    with tempfile.TemporaryDirectory(prefix="quire-release-") as name:
        folder = Path(name)
        environment = folder / "environment"
        _install(wheel, environment, torch=torch, torch_index_url=torch_index_url)
        with served(environment, folder) as (record, worker):
            answer = json.loads(run(["/bin/sh", "-c", record["call"]], cwd=folder))
            if (said := answer["choices"][0]["message"]["content"]) != WANTED:
                raise Refused(f"`{record['call']}` is answered with {said!r}")
            ask = [str(environment / "bin" / "python"), "-I", str(ASK), record["redis_url"], worker]
            told = json.loads(run(ask, cwd=folder, seconds=ANSWER_SECONDS))
    judge(told)
    control(told)
    num_resumed, num_answers = sum(map(bool, told["resumes"])), len(told["answers"])
    print(
        f"release-check: the wheel serves {record['model']}; its worker was killed in the middle "
        f"of {num_resumed} of {num_answers} answers, and all equal undisturbed ones"
    )


def judge(told: Mapping[str, Sequence[Any]]) -> None:
    """`Refused` unless the kill came in the middle, and left no trace in any answer.

    `told` has a list for each of: answers, undisturbed, resumes, published.
    """
    if not any(told["resumes"]):
        raise Refused("the kill came too late: no request was in the middle of its answer")
    pairs = zip(told["answers"], told["undisturbed"], strict=True)
    wrong = [f"{one!r} instead of {other!r}" for one, other in pairs if one != other]
    if wrong:
        raise Refused(f"{len(wrong)} answers suffered from the kill, such as {wrong[0]}")


def control(told: Mapping[str, Sequence[Any]]) -> None:
    """Check that the judge can refuse: the answers as far as they were published at the kill."""
    lengths = zip(told["undisturbed"], told["published"], strict=True)
    # A token of abacus is a character.
    cut = [text[:length] for text, length in lengths]
    try:
        judge({**told, "answers": cut})
    except Refused as refusal:
        print(f"release-check: the control was refused: {str(refusal).partition(',')[0]}")
    else:
        raise Refused("the control, the answers as they were at the kill, was not refused")


def _install(wheel: Path, environment: Path, *, torch: str, torch_index_url: str) -> None:
    venv.create(environment, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    flags = ["--quiet", "-c", str(ROOT / "constraints.txt")]
    if torch_index_url:
        flags += ["--extra-index-url", torch_index_url]
    before, began = _megabytes(environment), time.monotonic()
    run([*pip, "install", *flags, torch, f"{wheel}[worker]"], seconds=INSTALL_SECONDS)
    print(
        f"release-check: {wheel.name}[worker] is installed in {time.monotonic() - began:.0f} s, "
        f"{_megabytes(environment) - before:.0f} MB"
    )


@contextmanager
def served(environment: Path, folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """What `quire serve` prints when it is ready, and the process of its worker."""
    if shutil.which("curl") is None:
        raise Refused("curl is not installed: the check types what `quire serve` prints")
    # At home are the data of Redis and the compiled kernels: on a bare machine there are none.
    variables = {
        name: text for name, text in bare_variables().items() if not name.startswith("QUIRE_")
    } | {"HOME": str(folder)}
    variables.pop("XDG_CACHE_HOME", None)
    ports = [part for flag in ("", "console-", "redis-") for part in (f"--{flag}port", "0")]
    command = [str(environment / "bin" / "quire"), "serve", "--json", *ports]
    log = folder / "serve.log"
    began = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=stream
        )
    too_late = threading.Timer(START_SECONDS, process.kill)
    too_late.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise Refused(f"`quire serve` does not serve:\n{log.read_text('utf-8')}")
        too_late.cancel()
        ready = re.search(r"worker-1, process (\d+), is ready", log.read_text("utf-8"))
        assert ready is not None
        print(f"release-check: `quire serve` serves after {time.monotonic() - began:.0f} s")
        yield json.loads(line), ready[1]
        process.send_signal(signal.SIGINT)
        if code := process.wait(END_SECONDS):
            raise Refused(f"`quire serve` ends with {code}:\n{log.read_text('utf-8')}")
    finally:
        too_late.cancel()
        process.kill()
        process.wait()


def _megabytes(folder: Path) -> float:
    """What the files of a folder take, without counting a file with two names twice."""
    states = (os.lstat(path) for path in folder.rglob("*"))
    return sum({state.st_ino: state.st_size for state in states}.values()) / 1e6
