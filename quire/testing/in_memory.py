"""A queue and a worker inside the process, for the tests of services that use Quire.

    def test_the_summary_is_stored():
        with FakeQuire(answer=lambda request: "a summary") as fake:
            store_summary(client=fake.client(), text="...")
        assert fake.requests[0].body["prompt"].startswith("Summarise")

Client and transitions are the real ones, on an in-memory Redis; only the model is fake. An answer
may come in pieces, wait for an event, or fail:

    def answer(request):
        yield "first "
        release.wait(10)          # a threading.Event of the test
        yield "second"
        raise RequestFailed("out_of_paper", "the tray is empty")

Needs the extra `local` (fakeredis with Lua).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from quire.client.client import Client
from quire.errors import UNAVAILABLE, DeadlineExceeded, InvalidRequest, RequestFailed
from quire.queue.broker import Broker
from quire.queue.claim.claim import Claimed
from quire.queue.publish.commit import CommitItem, CommitStatus
from quire.testing.choices import choice_of, likelihoods
from quire.testing.fake_tokens import logprobs_of, prompt_length, told_prompt_of
from quire.version import install_hint
from quire.wire.adapters import ADAPTER_SEPARATOR, adapter_of, name_with
from quire.wire.logprobs import ToldPrompt
from quire.wire.output import Completion, ErrorInfo, FinishReason, State, Usage
from quire.wire.pooling import bytes_of
from quire.wire.protocol import GenerationRequest

try:
    import fakeredis
except ImportError as missing:
    raise ImportError(
        f"quire.testing needs fakeredis with Lua, {install_hint('local')}"
    ) from missing

if TYPE_CHECKING:
    from quire.client.client_async import AsyncClient

#: How long the worker waits for a request before it checks those that it runs.
LOOK_SECONDS = 0.02

#: The most requests answered at the same time; each has a thread.
MAX_RUNNING = 64

#: How long a client of the fake retries a call during an outage before it raises.
RETRY_SECONDS = 0.1

#: How long `stop` waits for answers that are still being made.
STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A text in pieces, each published alone, and the reason why the generation ends.

    `vector` is the answer to a request for an embedding or for scores; `label` is the class with
    the largest score.
    """

    pieces: Iterable[str] = ()
    finish_reason: FinishReason = FinishReason.EOS
    vector: Sequence[float] = ()
    label: str = ""


Answering = Callable[[GenerationRequest], str | Iterable[str] | Answer]


class FakeQuire:
    """An in-memory queue, and a worker that answers with `answer`. A context manager.

    `answer` gets the checked request and returns the text, an iterable of its pieces, or an Answer;
    it runs in its own thread. Its errors end the request: InvalidRequest as rejected, RequestFailed
    as failed with its code, DeadlineExceeded as expired, any other as failed with `internal_error`.

    Every character is one token, also of a prompt: its id is the code point, and its
    log-probability 0. Of a choice after an input, it is 0 where the answer's text has the same
    character, and else -1. Other sampling parameters have no effect. The worker serves every model,
    with the given `adapters`; it refuses a request for another adapter, as every worker does.
    Without an `answer` there is no worker, and a test calls `broker` itself.
    """

    def __init__(
        self,
        answer: Answering | None = None,
        *,
        queue: str = "default",
        adapters: Collection[str] = (),
    ) -> None:
        self._server = fakeredis.FakeServer(version=(7, 0))
        self.connection = fakeredis.FakeRedis(server=self._server)
        self.broker = self.make_broker(queue=queue)
        #: The requests that the worker has begun, in their order.
        self.requests: list[GenerationRequest] = []
        self._worker: FakeWorker | None = None
        if answer is not None:
            self._worker = FakeWorker(
                self.broker, answer, requests=self.requests, adapters=adapters
            )

    def __enter__(self) -> FakeQuire:
        self.broker.ensure_groups()
        if self._worker is not None:
            self._worker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.connected = True
        if self._worker is not None:
            self._worker.stop()
        self.connection.close()

    def make_broker(self, *, queue: str | None = None, **settings: Any) -> Broker:
        """A broker of this queue with other settings, such as `max_backlog`."""
        queue = queue or self.broker.keys.queue
        broker = Broker(self.connection, queue=queue, **{"retry_seconds": RETRY_SECONDS} | settings)
        broker.outage_seconds = RETRY_SECONDS
        return broker

    def client(self, *, tenant: str = "default", max_backlog: int | None = None) -> Client:
        """A client of this queue."""
        return Client(self.make_broker(max_backlog=max_backlog), tenant=tenant)

    def async_client(
        self, *, tenant: str = "default", max_backlog: int | None = None
    ) -> AsyncClient:
        """A client for the event loop in which it is made."""
        from quire.client.client_async import AsyncClient

        connection = fakeredis.FakeAsyncRedis(server=self._server)
        queue = self.broker.keys.queue
        client = AsyncClient(connection, queue=queue, tenant=tenant, max_backlog=max_backlog)
        for broker in client.brokers:
            broker.outage_seconds = RETRY_SECONDS
        return client

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Within this context Redis cannot be reached; calls raise BrokerUnavailable."""
        self._server.connected = False
        try:
            yield
        finally:
            self._server.connected = True


class FakeWorker:
    """Claims requests from any broker, in memory or real, and answers each in its own thread.

    A context manager. `requests` collects the requests that it begins; for the rest see FakeQuire.
    """

    def __init__(
        self,
        broker: Broker,
        answer: Answering,
        *,
        requests: list[GenerationRequest] | None = None,
        adapters: Collection[str] = (),
    ) -> None:
        self._adapters = adapters
        self.requests = [] if requests is None else requests
        self._broker = broker
        self._answer = answer
        self._running: list[_Run] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fake-quire", daemon=True)

    def __enter__(self) -> FakeWorker:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the worker's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Claims no more requests, and waits up to STOP_SECONDS for each running answer."""
        self._stopping.set()
        self._thread.join(STOP_SECONDS)
        for run in self._running:
            run.thread.join(STOP_SECONDS)

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self._look_after_running()
                self._look_after_waiting()
                self._begin_more()
            except UNAVAILABLE:
                self._stopping.wait(LOOK_SECONDS)

    def _begin_more(self) -> None:
        count = MAX_RUNNING - len(self._running)
        if count <= 0:
            self._stopping.wait(LOOK_SECONDS)
            return
        candidates = self._broker.peek(count=count, block_seconds=LOOK_SECONDS)
        for claimed in self._broker.claim(candidates):
            if isinstance(claimed, Claimed):
                run = _Run(self._broker, claimed, self._answer, adapters=self._adapters)
                self.requests.append(run.request)
                self._running.append(run)
                run.thread.start()

    def _look_after_waiting(self) -> None:
        """What every worker does for its queue: promotes due requests, and reaps expired leases."""
        self._broker.promote()
        self._broker.reap()

    def _look_after_running(self) -> None:
        self._running = [run for run in self._running if run.thread.is_alive()]
        unfinished = [run for run in self._running if not run.has_ended]
        if not unfinished:
            return
        now_ms = self._broker.now_ms()
        beats = self._broker.heartbeat([run.claimed.claim for run in unfinished])
        for run, beat in zip(unfinished, beats, strict=True):
            deadline_ms = run.request.deadline_ms
            if beat.cancel_requested:
                run.end(State.CANCELLED, FinishReason.CANCELLED, error=_CANCELLED)
            elif deadline_ms is not None and deadline_ms <= now_ms:
                run.end(State.EXPIRED, FinishReason.DEADLINE, error=_EXPIRED)


class _Run:
    """One request that is being answered; its thread and the worker publish to its log."""

    def __init__(
        self, broker: Broker, claimed: Claimed, answer: Answering, *, adapters: Collection[str]
    ) -> None:
        self.request = GenerationRequest.decode(claimed.request_bytes)
        self._adapters = adapters
        self._model = "fake"
        self.claimed = claimed
        self.has_ended = False
        self.thread = threading.Thread(target=self._run, args=(answer,), daemon=True)
        self._broker = broker
        self._published = claimed.num_published
        self._told_prompt: ToldPrompt = ()
        # Held only during a commit: the worker can end a request whose answer waits for an event.
        self._lock = threading.Lock()

    def end(
        self,
        state: State,
        finish_reason: FinishReason,
        *,
        error: ErrorInfo | None = None,
        vector: Sequence[float] = (),
        label: str = "",
    ) -> None:
        """Writes the terminal record, unless there is one."""
        completion = Completion(
            self.claimed.claim.request_id,
            state,
            finish_reason,
            usage=Usage(prompt_tokens=prompt_length(self.request)),
            error=error,
            model=self._model,
            fingerprint="fake",
            vector=bytes_of(vector),
            label=label,
        )
        self._commit("", completion)

    def _run(self, answer: Answering) -> None:
        try:
            self._end_somehow(answer)
        except UNAVAILABLE:
            # As after the death of a worker: the lease expires, and the request is requeued.
            self.has_ended = True

    def _end_somehow(self, answer: Answering) -> None:
        try:
            self._end_well(answer)
        except InvalidRequest as error:
            refusal = ErrorInfo("invalid_request", error.message, error.field)
            self.end(State.FAILED, FinishReason.REJECTED, error=refusal)
        except DeadlineExceeded:
            self.end(State.EXPIRED, FinishReason.DEADLINE, error=_EXPIRED)
        except RequestFailed as error:
            failure = ErrorInfo(error.code, error.message, error.field)
            self.end(State.FAILED, FinishReason.ERROR, error=failure)
        except UNAVAILABLE:
            raise
        # Every error of a test's answer is a failure of the request, not of the worker.
        except Exception as error:  # noqa: BLE001
            bug = ErrorInfo("internal_error", f"{type(error).__name__}: {error}")
            self.end(State.FAILED, FinishReason.ERROR, error=bug)

    def _end_well(self, answer: Answering) -> None:
        adapter = _adapter_of(self.request, self._adapters)
        self._model = name_with(self._model, adapter)
        if self.request.counts_only:
            self.end(State.COMPLETED, FinishReason.STOP)
            return
        self._told_prompt = told_prompt_of(self.request)
        # The answer is made again; skip what an earlier claim has published.
        skip = self._published
        answered = answer(self.request)
        if not isinstance(answered, Answer):
            answered = Answer([answered] if isinstance(answered, str) else answered)
        if (choice := choice_of(self.request)) and not answered.vector:
            answered = Answer(vector=likelihoods(choice, answered.pieces))
        for piece in answered.pieces:
            text, skip = piece[skip:], max(0, skip - len(piece))
            if text and not self._commit(text):
                return
        self.end(
            State.COMPLETED, answered.finish_reason, vector=answered.vector, label=answered.label
        )

    def _commit(self, text: str, completion: Completion | None = None) -> bool:
        """Publishes. False if the request has ended or another worker has claimed it."""
        with self._lock:
            if self.has_ended:
                return False
            item = CommitItem(
                self.claimed.claim,
                self._published,
                tuple(map(ord, text)),
                text,
                text_ends=tuple(range(1, len(text) + 1)),
                completion=completion,
                logprobs=logprobs_of(self.request, text),
                told_prompt=() if self._published or not text else self._told_prompt,
            )
            (reply,) = self._broker.commit([item])
            self._published = reply.published
            self.has_ended = completion is not None or reply.status is CommitStatus.FENCED
            return not self.has_ended


_CANCELLED = ErrorInfo("cancelled", "the request was cancelled")
_EXPIRED = ErrorInfo("deadline_exceeded", "the deadline passed before the request was complete")


def _adapter_of(request: GenerationRequest, known: Collection[str]) -> str | None:
    """The requested adapter. InvalidRequest for an unknown one."""
    # Every requested model is served; its name ends before the name of a known adapter.
    model = str(request.body.get("model") or "")
    owner, _, suffix = model.rpartition(ADAPTER_SEPARATOR)
    asked = adapter_of(request.body, model=owner if owner and suffix in known else model)
    if asked is not None and asked.name not in known:
        raise asked.refusal(known)
    return asked.name if asked else None
