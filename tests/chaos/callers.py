"""The callers of a schedule: each submits one request, follows it, dies, comes back, reads on."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from quire import Client
from quire.errors import (
    BrokerUnavailable,
    OutputRewound,
    ProtocolError,
    RequestFailed,
    UnknownRequest,
)
from quire.history import EMPTY, extended
from quire.output import State
from quire.protocol import GenerationRequest
from tests.chaos.audit import first_difference


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request of a plan, and the token indices at which its reader dies and comes back."""

    request: GenerationRequest
    tokens: tuple[int, ...]
    text: str
    deaths: tuple[int, ...]


@dataclass(slots=True)
class Notes:
    """What happened to one caller. Written by its thread; read by others at any time."""

    token_ids: list[int] = field(default_factory=list)
    prefix_hash: str = ""
    rewinds: int = 0
    deaths: int = 0
    resubmits: int = 0
    ended: bool = False
    #: The code of the error the request ended with, empty when it completed.
    error: str = ""
    violations: list[str] = field(default_factory=list)


class Caller:
    """Follows one request in a thread until it has seen the end of it, or is told to stop."""

    def __init__(self, url: str, queue: str, wanted: Wanted) -> None:
        self.wanted = wanted
        self.notes = Notes()
        #: What the broker answered to a cancellation, None when nobody asked.
        self.cancel_answer: State | None = None
        self._url = url
        self._queue = queue
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"caller {self.request_id}")
        self._thread.daemon = True

    @property
    def request_id(self) -> str:
        return self.wanted.request.id

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def submit(self) -> bool:
        """Submits the request, again if need be; whether this call is what enqueued it."""
        with Client(self._url, queue=self._queue) as client:
            known = self._answered(lambda: client.submit_many([self.wanted.request]))
        return known is not None

    def follow_once(self, client: Client) -> None:
        """Reads until the end, or until this reader dies; raises what the client raises."""
        notes = self.notes
        handle = client.attach(self.request_id)
        known = len(notes.token_ids)
        for chunk in handle.stream(after=known, prefix_hash=notes.prefix_hash):
            if chunk.start != len(notes.token_ids):
                self._violation(f"reader at {len(notes.token_ids)} was given {chunk.start}")
            notes.token_ids += chunk.token_ids
            notes.prefix_hash = chunk.prefix_hash
            wrong = first_difference(notes.token_ids, self.wanted.tokens)
            if wrong is not None:
                self._violation(f"reader was shown a wrong token {wrong}")
                self._stopping.set()
            deaths = self.wanted.deaths
            if notes.deaths < len(deaths) and chunk.end >= deaths[notes.deaths]:
                notes.deaths += 1
                return
            if self._stopping.is_set():
                return
        notes.ended = True

    def _run(self) -> None:
        while not (self.notes.ended or self._stopping.is_set()):
            # Every life of a reader has a connection of its own: the one before is dead.
            with Client(self._url, queue=self._queue) as client:
                try:
                    self.follow_once(client)
                except BrokerUnavailable:
                    continue
                except OutputRewound as error:
                    self._rewind(error)
                except UnknownRequest:
                    # Redis has lost the submit; the caller says it again, with the same id.
                    self.notes.resubmits += 1
                    self._rewind(None)
                    self._answered(lambda: client.submit_many([self.wanted.request]))
                except RequestFailed as error:
                    self.notes.error = error.code
                    self.notes.ended = True
                except ProtocolError as error:
                    self._violation(f"reader: {error}")
                    return

    def _rewind(self, error: OutputRewound | None) -> None:
        notes = self.notes
        kept = error.kept if error is not None else 0
        notes.rewinds += error is not None
        if kept > len(notes.token_ids):
            self._violation(f"a rewind to {kept} of {len(notes.token_ids)} tokens")
        del notes.token_ids[kept:]
        notes.prefix_hash = extended(EMPTY, notes.token_ids) if kept else ""

    def _violation(self, sentence: str) -> None:
        self.notes.violations.append(f"{self.request_id}: {sentence}")

    def _answered(self, call: Callable[[], object]) -> object:
        """Repeats an idempotent call until Redis answers, or until told to stop."""
        while not self._stopping.is_set():
            try:
                return call()
            except BrokerUnavailable:
                continue
        return None


def draw_deaths(random_: random.Random, *, num_tokens: int) -> tuple[int, ...]:
    """The indices after which a reader of this many tokens dies: none, one or two."""
    count = random_.choice((0, 0, 1, 2))
    return tuple(sorted(random_.randrange(1, num_tokens + 1) for _ in range(count)))
