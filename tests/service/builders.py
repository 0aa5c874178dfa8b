"""Builders of the tests of the service: real workers on a real Redis, a fake device where due.

`WorkerThread` runs a whole worker inside the test; `processes` has those that can be killed. The
names of `fake_model` can be imported from here too. `Queue` is the callers' side: it submits, reads
and judges.
"""

import contextlib
import ctypes
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from quire.queue.broker import Broker
from quire.queue.claim.claim import Claimed
from quire.queue.publish.commit import CommitItem
from quire.records import State
from quire.transport.connection import connect
from quire.transport.local_redis import LocalRedis
from quire.wire.protocol import Completion, GenerationRequest, TokenChunk
from service.worker.model.served import ServedModel
from service.worker.process.worker import Worker
from service.worker.settings.config import EMBEDDED_MODEL, Settings
from tests.service.fake_model import (
    BOS_ID,
    EOS_ID,
    MAX_MODEL_LEN,
    PATIENCE_SECONDS,
    VOCAB_SIZE,
    StepGate,
    byte_tokenizer,
    eventually,
    expected_tokens,
    fake_model,
    stays,
    text_of,
)

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "MAX_MODEL_LEN",
    "PATIENCE_SECONDS",
    "VOCAB_SIZE",
    "Output",
    "Queue",
    "StepGate",
    "WorkerThread",
    "byte_tokenizer",
    "eventually",
    "expected_tokens",
    "fake_model",
    "http_get",
    "left_in_the_middle",
    "make_settings",
    "private_redis",
    "stays",
    "text_of",
]

CHECKOUT = EMBEDDED_MODEL.parents[1]
#: Long enough to be renewed on a machine that keeps a thread waiting for seconds.
LEASE_SECONDS = 4.5
#: For a test that waits until a lease is over, and in which nobody must keep one.
SHORT_LEASE_SECONDS = 2.0


def make_settings(redis_url: str, queue: str, **overrides: Any) -> Settings:
    """Settings of a test's worker: a free port, short leases, every law checked."""
    values: dict[str, Any] = {
        "redis_url": redis_url,
        "queue": queue,
        "worker_name": f"worker-{uuid.uuid4().hex[:8]}",
        "served_model_name": "fake",
        "http_port": 0,
        "lease_seconds": LEASE_SECONDS,
        "block_seconds": 0.05,
        "drain_seconds": PATIENCE_SECONDS,
        # A test that steps an engine waits for each of its tokens.
        "publish_share": 1.0,
        "check_invariants": True,
    }
    return Settings(**(values | overrides))


class Clock:
    """A clock that stands until a test turns it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ScriptedDeath(BaseException):
    """What a test raises in a thread that is to die."""


class WorkerThread:
    """A whole worker inside the test; a context manager that stops it and keeps its exit code."""

    def __init__(
        self,
        settings: Settings,
        *,
        load: Callable[[Settings], ServedModel] | None = None,
        connect: Callable[..., redis.Redis] = connect,
        **model: Any,
    ) -> None:
        self.settings = settings
        load = load or (lambda known: fake_model(known, **model))
        self.worker = Worker(settings, load=load, connect=connect)
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run, name="worker under test")

    def __enter__(self) -> "WorkerThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Ask for a drain, and wait for the end."""
        self.worker.stop()
        return self.wait()

    def wait(self) -> int:
        """Wait for the end; returns the exit code."""
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the worker does not end"
        assert self.exit_code is not None
        return self.exit_code

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None

    def kill_thread(self, part: str) -> None:
        """Raise an error in one of the worker's threads, out of nowhere, as a bug would."""
        thread = self.worker._threads[part]
        error = ctypes.py_object(ScriptedDeath)
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), error)

    def get(self, path: str) -> tuple[int, str]:
        return http_get(self.worker.http_port, path)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample, as a scraper sees it."""
        value = self.worker.metrics.registry.get_sample_value(name, labels)
        assert value is not None, f"{name}{labels} is not exported"
        return value

    def wait_for_end(self, outcome: str) -> None:
        """Wait until one request has ended in this worker with such an outcome."""
        name, labels = "quire_requests_finished_total", {"model": "fake", "outcome": outcome}
        eventually(lambda: self.metric(name, **labels) == 1, f"an end: {outcome}")

    def _run(self) -> None:
        self.exit_code = self.worker.run()


def left_in_the_middle(
    queue: "Queue",
    request_id: str,
    *,
    tokens: int = 4,
    settings: Mapping[str, Any] = {},
    **model: Any,
) -> None:
    """A worker comes, adds so many tokens to a request, and at most one more, and gives it back.

    Each is an entry of the log.
    """
    gate, before = StepGate(steps=0), queue.published(request_id)
    own = queue.settings(drain_seconds=0.0, **settings)
    with WorkerThread(own, before_run=gate, **model) as worker:
        for number in range(before + 1, before + tokens + 1):
            gate.allow(1)
            queue.wait_for_tokens(request_id, number)
        worker.worker.stop()
        gate.step_to_end_of(worker)
        assert worker.wait() == 0
    assert queue.broker.status(request_id).state == State.QUEUED


@contextlib.contextmanager
def private_redis(*options: str) -> Iterator[LocalRedis]:
    """A server the test may stop or starve; its log on disk survives a kill."""
    with LocalRedis.start(
        append_only=True, options=("--appendfsync", "always", *options)
    ) as server:
        if server.kind in ("url", "fake"):
            pytest.skip(
                "the test ends a server of its own, and there is only a borrowed or fake one"
            )
        yield server


def http_get(port: int, path: str, *, accept: str = "*/*") -> tuple[int, str]:
    """Status and body, whatever the status is."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# -- the callers' side ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """A whole output log, joined, and checked to be contiguous with one end."""

    chunks: tuple[TokenChunk, ...]
    completion: Completion

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(id_ for chunk in self.chunks for id_ in chunk.token_ids)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


class Queue:
    """One queue of a test's own, with the connection for looking behind the broker's back."""

    def __init__(self, connection: redis.Redis, *, url: str = "", name: str = "") -> None:
        self.name = name or f"test-{uuid.uuid4().hex[:12]}"
        self.url = url
        self.connection = connection
        self.broker = Broker(connection, queue=self.name, lease_seconds=LEASE_SECONDS)
        self.keys = self.broker.keys
        self.broker.ensure_groups()

    @classmethod
    def at(cls, url: str, **others: Any) -> "Queue":
        return cls(connect(url, block_seconds=1.0), url=url, **others)

    def settings(self, **overrides: Any) -> Settings:
        return make_settings(self.url, self.name, **overrides)

    def submit(
        self, prompt: Any = (1, 2, 3), *, kind: str = "tokens", max_tokens: int = 8, **others: Any
    ) -> str:
        """Put a request into the queue without any check; returns its id.

        Keywords that are fields of the envelope go there, all others into the body.
        """
        envelope = {k: others.pop(k) for k in list(others) if k in GenerationRequest.model_fields}
        subject = "messages" if kind == "chat.completions" else "prompt"
        value = list(prompt) if isinstance(prompt, tuple) else prompt
        body = {subject: value, "max_tokens": max_tokens, "seed": 0, **others}
        request = GenerationRequest(kind=kind, body=body, **envelope)
        self.broker.submit(request)
        return request.id

    def publish_by_hand(
        self, request_id: str, token_ids: Sequence[int], text: str = "x", *, fingerprint: str | None
    ) -> None:
        """What a worker of another kind, or of earlier, has said of the next request and left."""
        entries = self.broker.peek(count=1, block_seconds=0.0)
        (claimed,) = self.broker.claim(entries, fingerprint=fingerprint)
        assert isinstance(claimed, Claimed) and claimed.claim.request_id == request_id
        self.broker.commit([CommitItem(claimed.claim, 0, tuple(token_ids), text)])
        self.broker.release([claimed.claim])

    def submit_bytes(self, data: bytes) -> str:
        """Put a message into the queue that no client of ours would send."""
        request_id = self.submit()
        self.connection.set(self.keys.body(request_id), data, keepttl=True)
        return request_id

    def published(self, request_id: str) -> int:
        return self.broker.status(request_id).published

    def wait_for_tokens(
        self, request_id: str, count: int, *, seconds: float = PATIENCE_SECONDS
    ) -> None:
        eventually(
            lambda: self.published(request_id) >= count,
            f"{count} tokens published",
            seconds=seconds,
        )

    def wait_for_state(self, request_id: str, state: str) -> None:
        eventually(lambda: self.broker.status(request_id).state == state, f"{request_id} {state}")

    def take_away(self, request_id: str) -> None:
        """Let the lease of a running request end now, and do what a reaper does."""

        def reaped() -> bool:
            self.connection.zadd(self.keys.lease, {request_id: 1})
            # A heartbeat may have come between the two.
            return request_id in [item.request_id for item in self.broker.reap()]

        eventually(reaped, f"{request_id} reaped")

    def take_all_away(self) -> None:
        """The same for all requests of workers that are dead or frozen."""
        left = {name.decode() for name in self.connection.zrange(self.keys.lease, 0, -1)}

        def reaped() -> bool:
            if left:
                self.connection.zadd(self.keys.lease, dict.fromkeys(left, 1))
            # What a worker sent as its last may still come between the two.
            left.difference_update(item.request_id for item in self.broker.reap())
            return not left

        eventually(reaped, "all leases taken away")

    def result(self, request_id: str, *, seconds: float = PATIENCE_SECONDS) -> Output:
        """Wait for the end of a request; returns its joined log."""

        def read() -> Output | None:
            news = self.broker.read_output({request_id: 0}).get(request_id)
            if news is None or news.completion is None:
                return None
            return Output(tuple(news.chunks), news.completion)

        output = eventually(read, f"the end of {request_id}", seconds=seconds)
        assert output is not None
        starts = [0]
        for chunk in output.chunks:
            assert chunk.start == starts[-1], "the log has a gap or an overlap"
            starts.append(chunk.end)
        assert output.completion.usage.completion_tokens == starts[-1]
        return output

    def assert_at_rest(self) -> None:
        """Nothing waits, nothing is claimed, and every key of a request will expire."""
        assert sum(self.broker.queue_depth().values()) == 0
        assert self.connection.zcard(self.keys.lease) == 0
        for stream in self.keys.all_ingress:
            # A worker that waits uses up the tickets of cancelled requests.
            assert self.connection.xpending(stream, "workers")["pending"] == 0
        keys = self.keys
        lasting = {keys.lease, keys.dead, keys.workers, keys.control, keys.arrival, keys.ends}
        lasting.add(keys.ends_read)
        lasting |= {*keys.all_ingress}
        for key in self.connection.scan_iter(match=f"{self.keys.prefix}:*"):
            assert key.decode() in lasting or self.connection.ttl(key) > 0, f"{key} never expires"
