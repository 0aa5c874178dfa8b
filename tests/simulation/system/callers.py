"""The callers of a schedule: each submits one request and follows it to its end, through anything.

A caller is a process with a real Client. It may be killed; another one takes its place and attaches
at the token its predecessor had come to. What it was given is compared on the spot with what the
undisturbed generation gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.client.client import Client
from quire.errors import (
    BrokerUnavailable,
    OutputRewound,
    ProtocolError,
    QueueFull,
    RequestFailed,
    UnknownRequest,
)
from quire.queue.broker import Broker
from quire.wire.history import EMPTY, extended
from quire.wire.output import Completion, State, TokenChunk
from tests.simulation.system.fleet import QUEUE
from tests.simulation.system.network import Network, SimulatedConnection
from tests.simulation.system.plan import LEASE_SECONDS, Plan, Wanted
from tests.simulation.system.timeline import Process, Timeline

#: How long a caller waits before it tries again what has failed.
PAUSE_SECONDS = 0.2


@dataclass(slots=True)
class Notes:
    """What a caller knows; it outlives the caller's processes."""

    seen: list[int] = field(default_factory=list)
    has_submitted: bool = False
    is_over: bool = False
    #: The end it was told, None when the request completed.
    error: RequestFailed | None = None
    num_rewinds: int = 0
    num_resubmits: int = 0
    deadline_ms: int | None = None
    not_before_ms: int | None = None
    violations: list[str] = field(default_factory=list)


class Caller:
    """One request and whoever wants it."""

    def __init__(self, timeline: Timeline, network: Network, plan: Plan, wanted: Wanted) -> None:
        self.wanted = wanted
        self.notes = Notes()
        self._timeline, self._network, self._plan = timeline, network, plan
        self._process: Process | None = None

    @property
    def request_id(self) -> str:
        return self.wanted.request.id

    def start(self) -> None:
        """A fresh process takes up where the last one was."""
        self._process = Process(f"caller of {self.request_id}")
        self._timeline.spawn(self._process, "main", self._run)

    def die(self) -> None:
        """SIGKILL, and another one soon."""
        if self._process is None or not self._process.alive or self.notes.is_over:
            return
        self._timeline.kill(self._process)
        self._timeline.note("caller killed", self.request_id)

        def later() -> None:
            self._timeline.sleep(self._timeline.random.uniform(0.0, 1.0))
            self.start()

        self._timeline.spawn(Process("somebody"), "caller", later)

    def submit(self, client: Client) -> None:
        """Submits the request; every try is the same request."""
        notes, wanted = self.notes, self.wanted
        if notes.deadline_ms is None and notes.not_before_ms is None:
            now_ms = int(self._timeline.unix_seconds() * 1000)
            if wanted.delay is not None:
                notes.not_before_ms = now_ms + int(wanted.delay * 1000)
            if wanted.deadline is not None:
                start = notes.not_before_ms or now_ms
                notes.deadline_ms = start + 1 + int(wanted.deadline * 1000)
        request = wanted.request.model_copy(
            update={"deadline_ms": notes.deadline_ms, "not_before_ms": notes.not_before_ms}
        )
        (handle,) = client.submit_many([request])
        if handle.request_id != self.request_id:
            notes.violations.append(f"I8: a submit of {self.request_id} gave {handle.request_id}")
        notes.has_submitted = True

    def client(self) -> Client:
        """A client of its own, in the process that calls."""
        return Client(broker_of(self._network, self._plan))

    def _run(self) -> None:
        client, notes = self.client(), self.notes
        if not notes.has_submitted:
            self._timeline.sleep(self.wanted.submit_at - self._timeline.now)
        while not notes.is_over:
            try:
                if not notes.has_submitted:
                    self.submit(client)
                self._follow(client)
                notes.is_over = True
            except RequestFailed as error:
                notes.error, notes.is_over = error, True
            except (BrokerUnavailable, QueueFull):
                self._timeline.sleep(PAUSE_SECONDS)
            except OutputRewound as error:
                # Redis lost tokens and said so. What is left of them is still true.
                notes.num_rewinds += 1
                self._timeline.note("reader rewound", self.request_id)
                notes.seen = notes.seen[: error.kept]
            except UnknownRequest:
                # Redis lost the request itself: it is the same one when it comes again.
                notes.num_resubmits += notes.has_submitted
                notes.has_submitted, notes.seen = False, []
            except ProtocolError as error:
                notes.violations.append(f"I2: {error}")
                notes.is_over = True

    def _follow(self, client: Client) -> None:
        seen = self.notes.seen
        prefix_hash = extended(EMPTY, seen)
        stream = client.stream(self.request_id, after=len(seen), prefix_hash=prefix_hash)
        for chunk in stream:
            self._take(chunk)
        self._check_result(client.result(self.request_id))

    def _take(self, chunk: TokenChunk) -> None:
        notes, wanted = self.notes, self.wanted.tokens
        notes.seen += chunk.token_ids
        self._timeline.counts["tokens"] += len(chunk.token_ids)
        if chunk.end != len(notes.seen):
            notes.violations.append(f"I2: {self.request_id} skips or repeats at {chunk.start}")
        if tuple(notes.seen) != wanted[: len(notes.seen)]:
            notes.violations.append(f"I1: {self.request_id} differs from the undisturbed run")
        if chunk.logprobs != self.wanted.logprobs[chunk.start : chunk.end]:
            notes.violations.append(f"I1: {self.request_id} is told otherwise at {chunk.start}")
        if chunk.prompt_tokens != (self.wanted.prompt_tokens if chunk.start == 0 else ()):
            notes.violations.append(f"I1: {self.request_id} is told otherwise of its prompt")

    def _check_result(self, completion: Completion) -> None:
        told = (completion.token_ids, completion.text, str(completion.finish_reason))
        wanted = self.wanted
        if told != (wanted.tokens, wanted.text, wanted.finish_reason):
            self.notes.violations.append(f"I1: the result of {self.request_id} is {told}")
        if (completion.logprobs, completion.prompt_tokens) != (
            wanted.logprobs,
            wanted.prompt_tokens,
        ):
            self.notes.violations.append(f"I1: the result of {self.request_id} is told otherwise")
        if completion.state is not State.COMPLETED:
            self.notes.violations.append(f"I3: {self.request_id} completed as {completion.state}")


def broker_of(network: Network, plan: Plan) -> Broker:
    """A real broker with the settings that everybody of the queue shares."""
    return Broker(
        SimulatedConnection.to(network),
        queue=QUEUE,
        lease_seconds=LEASE_SECONDS,
        max_attempts=plan.max_attempts,
    )
