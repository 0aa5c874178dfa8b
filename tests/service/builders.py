"""Builders of the tests of the service: real workers on a real Redis, a fake device where due.

`WorkerThread` runs a whole worker inside the test, and `WorkerProcess` one in a process of its own
that can be stopped and killed; the names of `fake_model` can be imported from here too. `Queue` is
the callers' side: it submits, reads and judges.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import pytest
import redis

from quire.queue.broker import Broker
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
from tests.service.forked import ForkedProgram

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "MAX_MODEL_LEN",
    "PATIENCE_SECONDS",
    "VOCAB_SIZE",
    "Output",
    "Queue",
    "StepGate",
    "WorkerProcess",
    "WorkerThread",
    "byte_tokenizer",
    "eventually",
    "expected_tokens",
    "fake_model",
    "http_get",
    "make_settings",
    "private_redis",
    "stays",
    "text_of",
]

#: The module of the worker that serves a model, and of the same one with pauses.
REAL_WORKER, SLOW_WORKER = "service", "tests.service.worker.process.slow_worker"
CHECKOUT = EMBEDDED_MODEL.parents[1]
Program = subprocess.Popen[str] | ForkedProgram
#: Short enough for quick takeovers, long enough to be renewed on a busy machine.
LEASE_SECONDS = 1.5


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

    def _run(self) -> None:
        self.exit_code = self.worker.run()


class LoggedProcess:
    """A program of ours in a process of its own, and the events of its log."""

    def __init__(self, module: str, *flags: str) -> None:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.log: list[dict[str, Any]] = []
        self.raw_log: list[str] = []
        command = (module, "--http-port", "0", "--log-format", "json", *flags)
        self.process = self._start(command, environ)
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self._reader.join()

    def _start(self, command: tuple[str, ...], environ: dict[str, str]) -> Program:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=CHECKOUT,
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_event(self, event: str) -> dict[str, Any]:
        """The first log line of that event; fails when the process ends without it."""

        def find() -> dict[str, Any] | None:
            if has_ended := self.process.poll() is not None:
                self._reader.join()  # Of what it has written, not all may have been read.
            found = next((line for line in self.log if line["event"] == event), None)
            assert found or not has_ended, "".join(self.raw_log)
            return found

        line = eventually(find, f"log line {event!r}", seconds=2 * PATIENCE_SECONDS)
        assert line is not None
        return line

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        code = self.process.wait(2 * PATIENCE_SECONDS)
        self._reader.join()
        return code

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.raw_log.append(line)
            if line.startswith("{") and line.endswith("\n"):  # A kill may cut the last one.
                self.log.append(json.loads(line))


class WorkerProcess(LoggedProcess):
    """A worker in a process of its own: `python -m service`, or the fake one of these tests.

    A real worker is forked from a process that has its imports, unless `is_fresh` asks for an
    interpreter of its own.
    """

    def __init__(
        self, redis_url: str, queue: str, *flags: str, module: str, is_fresh: bool = False
    ) -> None:
        self._is_forked = module in (REAL_WORKER, SLOW_WORKER) and not is_fresh
        self.name = f"process-{uuid.uuid4().hex[:8]}"
        where = ("--redis-url", redis_url, "--queue", queue, "--worker-name", self.name)
        times = ("--lease-seconds", str(LEASE_SECONDS), "--block-seconds", "0.05")
        super().__init__(module, *where, *times, *flags)

    def _start(self, command: tuple[str, ...], environ: dict[str, str]) -> Program:
        if not self._is_forked:
            return super()._start(command, environ)
        module, *arguments = command
        return ForkedProgram(module, arguments, environ=environ, folder=str(CHECKOUT))

    def wait_until_ready(self) -> dict[str, Any]:
        """The line that says where the worker listens."""
        return self.wait_for_event("worker ready")


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

    def __init__(self, connection: redis.Redis, *, url: str = "") -> None:
        self.name = f"test-{uuid.uuid4().hex[:12]}"
        self.url = url
        self.connection = connection
        self.broker = Broker(connection, queue=self.name, lease_seconds=LEASE_SECONDS)
        self.keys = self.broker.keys
        self.broker.ensure_groups()

    @classmethod
    def at(cls, url: str) -> "Queue":
        return cls(connect(url, block_seconds=1.0), url=url)

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
        lasting |= {*keys.all_ingress}
        for key in self.connection.scan_iter(match=f"{self.keys.prefix}:*"):
            assert key.decode() in lasting or self.connection.ttl(key) > 0, f"{key} never expires"
