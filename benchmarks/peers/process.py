"""The parent of a comparison: starts child processes, which load engines and run workloads.

An idle child is stopped (SIGSTOP), together with all processes it has started. So its waiting
threads do not disturb the measurement of another engine.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.workloads import WorkItem, Workload
from benchmarks.peers.child import Generation
from benchmarks.peers.register import ROOT, Peer


class PeerFailed(Exception):
    """A child has ended or cannot start; the message names it and its log."""


class PeerProcess:
    """One engine in its own process group, which is stopped except while it handles a message.

    `facts` is the child's answer to the first message: versions, settings, seconds to load; and
    `start_seconds`, from the start of the process until that answer, so with all imports.
    """

    def __init__(self, peer: Peer, *, model: Path, dtype: str, log: Path) -> None:
        self.name = peer.name
        started = time.perf_counter()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(peer.python), "-m", peer.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=os.environ | peer.environment(),
                start_new_session=True,
            )
        message = {"model": str(model), "dtype": dtype, "workspace": str(peer.workspace)}
        try:
            self.facts: dict[str, Any] = self._ask(message)["ready"]
            self.facts["start_seconds"] = round(time.perf_counter() - started, 2)
        except BaseException:
            self.close()
            raise
        self._stand_still()

    def run(self, workload: Workload) -> list[Generation]:
        """Run a workload while all other children are stopped; generations in order of requests."""
        answer = self._ask_awake({"requests": [as_request(item) for item in workload.items]})
        return [Generation(**generation) for generation in answer["generations"]]

    def write_logits(self, tokens: Sequence[int], to: Path) -> None:
        """Let the child write the logits after each token, [tokens, vocabulary] in float32."""
        self._ask_awake({"logits_of": list(tokens), "to": str(to)})

    def close(self) -> None:
        """Kill the child and all processes it has started; harmless if it has already ended."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _ask_awake(self, message: dict[str, Any]) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        try:
            return self._ask(message)
        finally:
            self._stand_still()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerFailed(f"{self.name} ended; its last words are in {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _stand_still(self) -> None:
        self._signal(signal.SIGSTOP)
        # A signal takes effect later. Wait until the child has stopped or ended, so that the next
        # engine does not start before.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            if number is signal.SIGCONT:
                raise PeerFailed(f"{self.name} is gone; see {self._log}") from None


def as_request(item: WorkItem) -> dict[str, Any]:
    """A WorkItem in the form of the child's message."""
    return {
        "prompt": item.prompt_token_ids,
        "num_output_tokens": item.num_output_tokens,
        "arrival_seconds": item.arrival_seconds,
    }
