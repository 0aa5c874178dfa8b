"""The client processes of chaos: each submits a few requests and follows them, a thread for each.

They tell the stage what they have seen, as it comes, and may be killed at any moment. What was told
is all that is left of a dead one: its heir attaches to the same requests in another process.
"""

import contextlib
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from quire import Client
from quire.errors import (
    BrokerUnavailable,
    OutputRewound,
    ProtocolError,
    RequestFailed,
    UnknownRequest,
)
from quire.wire.history import EMPTY, extended
from quire.wire.protocol import GenerationRequest
from tests.chaos import forking


@dataclass(frozen=True, slots=True)
class Task:
    """One request to submit and follow, and what is known of it from those who did so before.

    `departures` are the token indices at which the reader drops its connection and comes back.
    """

    request: GenerationRequest
    is_submitted: bool
    token_ids: tuple[int, ...]
    prefix_hash: str
    departures: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Submitted:
    """The broker has the request; `again` after it had lost it."""

    request_id: str
    again: bool


@dataclass(frozen=True, slots=True)
class Read:
    """A chunk was read."""

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    prefix_hash: str


@dataclass(frozen=True, slots=True)
class Rewound:
    """The reader was told to forget all but the first `kept` tokens, or that all is lost."""

    request_id: str
    kept: int
    prefix_hash: str


@dataclass(frozen=True, slots=True)
class Departed:
    """The reader has dropped its connection."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The reader has seen the end; `error` is its code, empty when the request completed."""

    request_id: str
    error: str


@dataclass(frozen=True, slots=True)
class Confused:
    """What the reader met cannot be right."""

    request_id: str
    sentence: str


Event = Submitted | Read | Rewound | Departed | Ended | Confused


class ClientProcess:
    """One client process. Its events come on a thread of the one who started it."""

    def __init__(
        self,
        url: str,
        queue: str,
        *,
        tasks: Sequence[Task],
        hear: Callable[[Event], None],
        name: str,
        log: Path,
    ) -> None:
        self.name = name
        self._hear = hear
        self._log = log
        self._receiver, sender = get_context("forkserver").Pipe(duplex=False)
        self._process = forking.start(_run, url, queue, tuple(tasks), sender, name=name, log=log)
        # The end of the pipe must come with the end of the process.
        sender.close()
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        """Whether it ended by itself and not well."""
        return self._process.exitcode not in (None, 0)

    def kill(self) -> None:
        """Ends it at once. Whatever it told before has been heard when this returns."""
        self._process.kill()
        self._process.join()
        self._thread.join()

    def log_tail(self, characters: int = 2000) -> str:
        return self._log.read_text(errors="replace")[-characters:] if self._log.exists() else ""

    def _listen(self) -> None:
        # A kill may cut an event in two.
        with contextlib.suppress(EOFError, OSError), self._receiver as receiver:
            while True:
                self._hear(receiver.recv())


def _run(url: str, queue: str, tasks: Sequence[Task], sender: Connection) -> None:
    lock = threading.Lock()

    def tell(event: Event) -> None:
        with lock:
            sender.send(event)

    threads = [
        threading.Thread(target=_Follower(url, queue, task=task, tell=tell).run) for task in tasks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Follower:
    """Submits one request and reads it to its end, through whatever happens."""

    def __init__(self, url: str, queue: str, *, task: Task, tell: Callable[[Event], None]) -> None:
        self._url = url
        self._queue = queue
        self._request = task.request
        self._id = task.request.id
        self._tell = tell
        self._is_submitted = task.is_submitted
        self._was_lost = False
        self._token_ids = list(task.token_ids)
        self._prefix_hash = task.prefix_hash
        self._departures = list(task.departures)
        self._is_through = False

    def run(self) -> None:
        try:
            while not self._is_through:
                # Every life of a reader has a connection of its own: the one before is dead.
                with Client(self._url, queue=self._queue) as client:
                    self._live(client)
        except Exception:  # noqa: BLE001 - whatever a reader dies of belongs into the audit.
            self._tell(Confused(self._id, f"reader: {traceback.format_exc()}"))

    def _live(self, client: Client) -> None:
        """Reads on until the end, or until the connection or what was read is worth nothing."""
        try:
            if not self._is_submitted:
                client.submit_many([self._request])
                self._is_submitted = True
                self._tell(Submitted(self._id, again=self._was_lost))
            self._read(client)
        except BrokerUnavailable:
            return
        except OutputRewound as error:
            self._rewind(error.kept)
        except UnknownRequest:
            # Redis has lost the submit; the caller says it again, with the same id.
            self._is_submitted, self._was_lost = False, True
            self._rewind(0)
        except RequestFailed as error:
            self._end(error.code)
        except ProtocolError as error:
            self._tell(Confused(self._id, f"reader: {error}"))
            self._is_through = True

    def _read(self, client: Client) -> None:
        handle = client.attach(self._id)
        known = len(self._token_ids)
        for chunk in handle.stream(after=known, prefix_hash=self._prefix_hash):
            self._token_ids += chunk.token_ids
            self._prefix_hash = chunk.prefix_hash
            self._tell(Read(self._id, chunk.start, chunk.token_ids, chunk.prefix_hash))
            if self._departures and chunk.end >= self._departures[0]:
                del self._departures[0]
                self._tell(Departed(self._id))
                return
        self._end("")

    def _rewind(self, kept: int) -> None:
        if kept > len(self._token_ids):
            self._tell(Confused(self._id, f"a rewind to {kept} of {len(self._token_ids)} tokens"))
        del self._token_ids[kept:]
        self._prefix_hash = extended(EMPTY, self._token_ids) if kept else ""
        self._tell(Rewound(self._id, kept, self._prefix_hash))

    def _end(self, error: str) -> None:
        self._is_through = True
        self._tell(Ended(self._id, error))
