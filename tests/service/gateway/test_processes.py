"""Real processes and a real Redis: worker, gateway and caller killed together, and what is left."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from service.worker.settings.config import EMBEDDED_MODEL
from tests.service.builders import (
    CHECKOUT,
    PATIENCE_SECONDS,
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
    text_of,
)
from tests.service.gateway.builders import GatewayProcess
from tests.service.gateway.front import COMPLETIONS
from tests.service.processes import HELD_WORKER, REAL_WORKER, LoggedProcess, WorkerProcess

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NUM_TOKENS = 150
#: So hot that no token is like the one before it, and one out of its place shows.
CALL = {
    "model": "abacus", "prompt": "12+34=", "max_tokens": NUM_TOKENS, "temperature": 20.0,
    "seed": 11, "ignore_eos": True, "logprobs": 0, "stream": True,
}  # fmt: skip


def worker_of(queue: Queue, **how: Any) -> WorkerProcess:
    sizes = ("--max-num-seqs", "4", "--num-blocks", "128", "--dtype", "float32", "--device", "cpu")
    flags = ("--model", str(EMBEDDED_MODEL), "--served-model-name", "abacus", *sizes)
    return WorkerProcess(queue, *flags, **how)


class Caller:
    """A caller's process, and the lines of it that were whole when it ended."""

    def __init__(self, gateway: GatewayProcess, path: str, *last: str, key: str | None = None):
        command = [sys.executable, "-m", "tests.service.gateway.caller", str(gateway.port), path]
        self.lines: list[tuple[str, list[str]]] = []
        self.process = subprocess.Popen(
            [*command, *last],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdin
        self.process.stdin.write("" if key is None else json.dumps(CALL | {"key": key}))
        self.process.stdin.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self) -> "Caller":
        self.process.wait(2 * PATIENCE_SECONDS)
        self._reader.join()
        return self

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    @property
    def request_id(self) -> str:
        return self.lines[0][0]

    @property
    def last(self) -> str:
        """The id of the last event it has."""
        return self.lines[-1][0]

    @property
    def tokens(self) -> list[str]:
        return [token for _, tokens in self.lines[1:] for token in tokens]

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.endswith("\n"):
                event_id, tokens = json.loads(line)
                self.lines.append((event_id, tokens))


def wrong(before: list[str], after: list[str], whole: list[str]) -> str:
    """What is wrong with an answer in two parts, held against the undisturbed one."""
    if before + after == whole:
        return ""
    return f"{len(before)} and {len(after)} tokens are not the {len(whole)}"


@pytest.fixture(scope="module")
def killed(redis_url) -> Any:
    """An undisturbed answer, one whose worker, gateway and caller died, and who comes for it."""
    queue = Queue.at(redis_url)
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(GatewayProcess(queue)) for _ in range(2))
        with worker_of(queue, module=HELD_WORKER, held_at=40) as worker:
            worker.wait_until_ready()
            caller = Caller(first, COMPLETIONS, key="disturbed")
            eventually(lambda: caller.lines, "the caller knows its request")
            queue.wait_for_tokens(caller.request_id, 40)
            worker.kill()
            eventually(lambda: len(caller.tokens) >= 20, "tokens have come to the caller")
            first.kill()
            caller.kill()
        queue.take_all_away()
        published = queue.published(caller.request_id)
        with worker_of(queue, module=REAL_WORKER):
            path = f"/v1/requests/{caller.request_id}/events"
            rest = Caller(second, path, caller.last).wait()
            whole = Caller(second, COMPLETIONS, key="undisturbed").wait()
        yield whole, caller, rest, second, published
    queue.connection.close()


def test_worker_gateway_and_caller_are_killed_and_the_next_token_comes_from_another_gateway(killed):
    whole, caller, rest, second, published = killed
    assert len(whole.tokens) == NUM_TOKENS + 1
    assert whole.tokens[-1] == "[DONE]"
    assert 20 <= len(caller.tokens) <= published < NUM_TOKENS
    assert wrong(caller.tokens, rest.tokens, whole.tokens) == ""
    completion = second.get(f"/v1/requests/{caller.request_id}").body
    assert completion["usage"]["completion_tokens"] == NUM_TOKENS


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_caller_that_came_back_a_token_off_would_be_noticed(killed, shift):
    whole, caller, _, second, _ = killed
    path = f"/v1/requests/{caller.request_id}/events"
    rest = Caller(second, path, str(len(caller.tokens) + shift)).wait()
    assert rest.tokens[-1] == "[DONE]"
    assert wrong(caller.tokens, rest.tokens, whole.tokens) != ""


def test_a_call_that_is_sent_again_to_another_gateway_joins_what_the_killed_one_has_begun(killed):
    whole, caller, _, second, _ = killed
    again = Caller(second, COMPLETIONS, key="disturbed").wait()
    assert again.request_id == caller.request_id != whole.request_id
    assert again.tokens == whole.tokens


def test_sigterm_drains_a_process_and_the_log_tells_of_it(queue: Queue):
    with GatewayProcess(queue, "--drain-seconds", "0.1") as gateway:
        assert gateway.get("/readyz").status == 200
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.wait() == 0
    events = [line["event"] for line in gateway.log if line["event"] in ("draining", "drained")]
    assert events == ["draining", "drained"]
    assert len(gateway.log) == len(gateway.raw_log), "the log holds more than its events"


def test_sighup_has_the_keys_read_again(queue: Queue, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-first-0000000001 search\n")
    with GatewayProcess(queue, "--keys-file", str(keys)) as gateway:
        second = {"Authorization": "Bearer sk-second-000000002"}
        assert gateway.get("/v1/models", **second).status == 401
        keys.write_text("sk-second-000000002 search\n")
        gateway.process.send_signal(signal.SIGHUP)
        gateway.wait_for_event("keys are read again")
        assert gateway.get("/v1/models", **second).status == 200
        keys.write_text("nonsense\n")
        gateway.process.send_signal(signal.SIGHUP)
        gateway.wait_for_event("the earlier keys stay valid")
        assert gateway.get("/v1/models", **second).status == 200
    assert "sk-second" not in "".join(gateway.raw_log)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what Linux tells of it")
def test_a_sighup_while_a_gateway_starts_is_heard_when_it_has_started(queue: Queue, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-first-0000000001 search\n")
    where = ("--redis-url", queue.url, "--queue", queue.name, "--keys-file", str(keys))
    with LoggedProcess("service.gateway", *where, is_fresh=True) as gateway:
        status = Path(f"/proc/{gateway.process.pid}/status")
        bit = 1 << (signal.SIGHUP - 1)
        eventually(lambda: blocked_by(status) & bit, "its first line has run")
        gateway.signal(signal.SIGHUP)
        assert gateway.wait_for_event("keys are read again")["keys"] == 1


def blocked_by(status: Path) -> int:
    (mask,) = [line for line in status.read_text().splitlines() if line.startswith("SigBlk")]
    return int(mask.split()[1], 16)


def test_streams_go_on_and_removed_keys_are_refused_while_keys_are_read_again(
    queue: Queue, tmp_path
):
    kept, removed = ({"Authorization": f"Bearer sk-number-000000{n}"} for n in (1, 2))
    first, second = "sk-number-0000001 search\n", "sk-number-0000002 archive\n"
    keys, other = tmp_path / "keys", tmp_path / "other"
    keys.write_text(first + second)

    def have_read(content: str, event: str) -> None:
        other.write_text(content)
        other.replace(keys)
        for _ in range(20):
            gateway.signal(signal.SIGHUP)
        gateway.wait_for_event(event)

    gate = StepGate(steps=5)
    with (
        WorkerThread(queue.settings(), before_run=gate),
        GatewayProcess(queue, "--keys-file", str(keys)) as gateway,
        contextlib.ExitStack() as stack,
    ):
        fields = {"max_tokens": NUM_TOKENS, "seed": 0}
        streams = [
            stack.enter_context(gateway.stream([1, 2], headers=headers, **fields))
            for headers in (kept, removed) * 4
        ]
        have_read("nonsense\n", "the earlier keys stay valid")
        assert [gateway.get("/v1/models", **who).status for who in (kept, removed)] == [200, 200]
        have_read(first, "keys are read again")
        assert [gateway.get("/v1/models", **who).status for who in (kept, removed)] == [200, 401]
        gate.open()
        wanted = text_of(expected_tokens([1, 2], max_tokens=NUM_TOKENS))
        texts = ["".join(event.text for event in stream.rest()) for stream in streams]
        assert texts == [wanted] * len(streams)
