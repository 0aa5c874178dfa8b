"""A failover while a gateway streams: the master is killed, and sentinels promote its replica."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from quire.transport.local_redis import URL_VARIABLE
from tests.quire.builders import port_of
from tests.quire.sentinels import replicas_known_to, started_sentinel
from tests.quire.servers import real_program
from tests.service.builders import (
    PATIENCE_SECONDS,
    Queue,
    eventually,
    expected_tokens,
    private_redis,
    text_of,
)
from tests.service.gateway.builders import GatewayProcess
from tests.service.processes import WorkerProcess

pytestmark = [pytest.mark.processes, pytest.mark.real_redis]

NUM_CALLERS = 12
#: What every caller has when the master is killed, and what it gets in the end.
NUM_BEFORE, NUM_TOKENS = 20, 900


class Caller:
    """Calls until its answer is whole, and goes on behind the last event that it has."""

    def __init__(self, gateway: GatewayProcess, number: int) -> None:
        self._gateway = gateway
        self._prompt = [number, 1, 2]
        self._headers = {"Idempotency_Key": f"caller {number}"}
        self.wanted = text_of(expected_tokens(self._prompt, max_tokens=NUM_TOKENS))
        self.text = self.last = ""
        #: Whatever else than a beginning of the answer it ever had.
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def num_tokens(self) -> int:
        return int(self.last.partition("/")[0] or "0")

    def join(self) -> None:
        self._thread.join(2 * PATIENCE_SECONDS)
        assert not self._thread.is_alive(), f"no end behind {self.last!r}"

    def _run(self) -> None:
        while not self._is_answered():
            pass

    def _is_answered(self) -> bool:
        """Whether the answer is whole after one call more."""
        headers = self._headers | ({"Last_Event_ID": self.last} if self.last else {})
        fields = {"max_tokens": NUM_TOKENS, "seed": 0}
        with self._gateway.stream(self._prompt, headers=headers, **fields) as stream:
            if stream.status != 200:
                self._told("output_rewound" if stream.status == 409 else "broker_unavailable")
            for event in stream:
                if event.data == "[DONE]":
                    return True
                self.last = event.id or self.last
                if event.data and "error" in event.body:
                    self._told(event.body["error"]["code"])
                    return False
                self.text += event.text
                if not self.wanted.startswith(self.text):
                    self.wrong.append(self.text)
        return False

    def _told(self, code: str) -> None:
        if code in ("output_rewound", "request_lost"):
            # The replica had less than it: what it has may be kept in part, or not at all.
            self.text = self.last = ""
        elif code != "broker_unavailable":
            self.wrong.append(code)


@pytest.fixture
def kill_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, object]]:
    """The url of a queue's sentinel, and what kills the master and waits for the next one."""
    real_program()
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    with contextlib.ExitStack() as stack:
        start = stack.enter_context
        quick = ("--repl-diskless-sync-delay", "0")
        master = start(private_redis(*quick))
        start(private_redis(*quick, "--replicaof", "127.0.0.1", port_of(master)))
        sentinel = start(started_sentinel(tmp_path, port_of(master)))
        asked = start(redis.Redis(port=sentinel))
        eventually(lambda: replicas_known_to(asked) == 1, "the sentinel knows the replica")

        def kill() -> None:
            before = asked.sentinel_master("shop")["port"]
            master.kill()
            # Only now: a master that a busy machine kept from answering would be replaced before.
            asked.sentinel_set("shop", "down-after-milliseconds", 1000)
            asked.sentinel_set("shop", "failover-timeout", 5000)
            eventually(lambda: asked.sentinel_master("shop")["port"] != before, "promoted")

        yield f"redis+sentinel://127.0.0.1:{sentinel}/shop/0", kill


def test_a_stream_is_at_all_times_a_beginning_of_its_answer_and_ends_whole(kill_master):
    url, kill = kill_master
    queue = Queue.at(url)
    with WorkerProcess(queue) as worker, GatewayProcess(queue) as gateway:
        worker.wait_until_ready()
        callers = [Caller(gateway, number) for number in range(1, NUM_CALLERS + 1)]
        eventually(lambda: min(caller.num_tokens for caller in callers) >= NUM_BEFORE, "streaming")
        assert max(caller.num_tokens for caller in callers) < NUM_TOKENS
        kill()
        for caller in callers:
            caller.join()
    assert [caller.wrong for caller in callers] == [[]] * NUM_CALLERS
    assert [caller.text for caller in callers] == [caller.wanted for caller in callers]
