"""The parent's half of a comparison: starts one child, asks it to load and to run.

A child that has nothing to do is stopped (SIGSTOP), with all processes it has started: whatever its
threads do when they wait, they do not do it while another engine is measured.
"""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.common.workloads import WorkItem, Workload
from benchmarks.peers.child import Generation
from benchmarks.peers.register import ROOT, Peer


class PeerFailed(Exception):
    """A child ended or could not start; the message says which and where it wrote why."""


class PeerProcess:
    """One engine in a process group of its own, stopped except while it is asked something.

    `facts` is what the child told when it had loaded: versions, settings, seconds to load.
    """

    def __init__(self, peer: Peer, *, model: Path, dtype: str, log: Path) -> None:
        self.name = peer.name
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
        except BaseException:
            self.close()
            raise
        self._stand_still()

    def run(self, workload: Workload) -> list[Generation]:
        """Run a workload while every other child stands still; generations in its order."""
        self._signal(signal.SIGCONT)
        try:
            answer = self._ask({"requests": [as_request(item) for item in workload.items]})
        finally:
            self._stand_still()
        return [Generation(**generation) for generation in answer["generations"]]

    def close(self) -> None:
        """End the child and all it has started; harmless when it has ended by itself."""
        self._signal(signal.SIGKILL)
        self._process.wait()

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
        # A signal takes its time; the next engine starts when this one has stopped, or has ended.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            if number is signal.SIGCONT:
                raise PeerFailed(f"{self.name} is gone; see {self._log}") from None


def as_request(item: WorkItem) -> dict[str, Any]:
    """A WorkItem as the child reads it."""
    return {
        "prompt": item.prompt_token_ids,
        "num_output_tokens": item.num_output_tokens,
        "arrival_seconds": item.arrival_seconds,
    }
