"""The typed errors of Quire; every one of them is a `QuireError`.

QuireError
├── InvalidRequest        a request that can never be served; names the field
│   └── RequestConflict       another request has this id
├── ProtocolError         bytes that are not a valid message of Quire
│   └── UnsupportedVersion    a message with an unknown major version
├── QueueFull             a limit of the queue is reached, or Redis has no memory left
├── UnknownRequest        there is no request with this id
│   └── ResultExpired         there was one, but its retention has passed
├── RequestFailed         the request has ended without completing; has the Completion
│   ├── Cancelled             a caller has cancelled it
│   └── DeadlineExceeded      its deadline has passed
├── InvalidOutput         an output that is not what the caller's schema says
├── OutputRewound         the log does not continue what its reader has: Redis lost tokens
├── DurabilityUnavailable the server cannot confirm writes to disk, as a durable broker requires
├── WaitTimeout           `result(timeout=)` ran out of time; the request continues
└── BrokerUnavailable     Redis cannot be reached, or its reply was lost
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.records import TerminalRecord


class QuireError(Exception):
    """The root of the tree: `except QuireError` catches all errors that Quire raises on purpose.

    All of them can be pickled, so that a pool of processes can return them.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with the finished message as its only argument.
        return _restored, (type(self), self.args, self.__dict__)


class InvalidRequest(QuireError):
    """A request that can never be served. `field` is the path of the error, such as `body.top_p`.

    `index` is its index among the requests that were submitted together, from 0.
    """

    def __init__(self, field: str, message: str, *, index: int | None = None) -> None:
        which = "" if index is None else f"request {index}: "
        super().__init__(f"{which}{field}: {message}")
        self.field = field
        self.message = message
        self.index = index


class RequestConflict(InvalidRequest):
    """Another request has the id `request_id`; it was not changed.

    Raised after everything was sent: the other requests of the submit are in the queue.
    """

    def __init__(self, request_id: str, *, index: int | None = None) -> None:
        message = f"{request_id} exists already and is a different request"
        super().__init__("request_id", message, index=index)
        self.request_id = request_id


class ProtocolError(QuireError):
    """Bytes that are not a valid message of this protocol: malformed, unknown, or over a limit."""


class UnsupportedVersion(ProtocolError):
    """A message with an unknown major version, which is `found`."""

    def __init__(self, found: object) -> None:
        super().__init__(f"protocol version {found!r} is not supported")
        self.found = found


class QueueFull(QuireError):
    """A limit is reached; try again later.

    `limit` is the reached limit: `requests` that wait, their `tokens`, open requests of the
    `tenant`, its `rate` in tokens per minute, or the `memory` of Redis. `accepted` are the ids of
    the same submit that are queued or were there already, and `submitted` the answers about these.
    `retry_after_seconds` is known for a rate: then the request may be accepted.
    """

    submitted: Sequence[Any] = ()

    def __init__(
        self,
        message: str,
        *,
        limit: str = "requests",
        accepted: tuple[str, ...] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.accepted = accepted
        self.retry_after_seconds = retry_after_seconds

    def with_submitted(self, submitted: Sequence[Any]) -> QueueFull:
        """The same refusal of a submit of which these were accepted."""
        accepted = tuple(one.request_id for one in submitted)
        seconds = self.retry_after_seconds
        same = QueueFull(
            str(self), limit=self.limit, accepted=accepted, retry_after_seconds=seconds
        )
        same.submitted = submitted
        return same


class UnknownRequest(QuireError):
    """There is no request with this id in the queue: it was never submitted, or has expired."""

    def __init__(self, request_id: str, message: str = "no such request") -> None:
        super().__init__(f"{request_id}: {message}")
        self.request_id = request_id


class ResultExpired(UnknownRequest):
    """The request has existed, and its keys are gone.

    Its retention has passed, or Redis has lost its data.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id, "it is gone: its retention has passed, or Redis lost it")


class RequestFailed(QuireError):
    """The request is terminal and did not complete.

    `code` is stable and for programs, `message` is for people, `field` is the wrong field of a
    rejected request. `completion` is the terminal record; if `result()` raised the error, with the
    published text and tokens.
    """

    def __init__(
        self,
        code: str,
        message: str,
        field: str | None = None,
        *,
        completion: TerminalRecord | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}" if field is None else f"{code}: {field}: {message}")
        self.code = code
        self.message = message
        self.field = field
        self.completion = completion


class Cancelled(RequestFailed):
    """A caller has cancelled the request."""


class DeadlineExceeded(RequestFailed):
    """The request's deadline, or its longest time in the queue, has passed before it completed."""


class InvalidOutput(QuireError):
    """The request has completed, and its output is not what the caller's schema says.

    Often `max_tokens` was too low for the whole output. `completion` is the terminal record, with
    the text.
    """

    def __init__(self, message: str, *, completion: TerminalRecord) -> None:
        super().__init__(message)
        self.completion = completion


class OutputRewound(QuireError):
    """Redis has lost tokens that this reader has already read.

    `seen` is the number of tokens that the reader has, `published` the number in the log now. The
    log may be shorter, or may have grown again with other tokens. The first `kept` of the reader's
    tokens are certainly still in it: continue after these.

    `is_certain` is False if the reader only got the number `seen` from its caller: then this number
    may be wrong, and nothing is lost.
    """

    def __init__(
        self,
        request_id: str,
        *,
        seen: int,
        published: int,
        kept: int = 0,
        is_certain: bool = True,
    ) -> None:
        lost = (
            f"Redis lost tokens: of the {seen} this reader has seen, {kept} are certainly in the "
            f"log, which has {published}"
        )
        beyond = (
            f"its log has {published} tokens, and the reader asked for those after the first "
            f"{seen}: either that number is wrong, or Redis lost tokens"
        )
        super().__init__(f"{request_id}: {lost if is_certain else beyond}")
        self.request_id = request_id
        self.seen = seen
        self.published = published
        self.kept = kept
        self.is_certain = is_certain


class WaitTimeout(QuireError):
    """`result(timeout=)` ran out of time. The request continues; you may wait again."""


class DurabilityUnavailable(QuireError):
    """The server cannot confirm writes to disk: no WAITAOF, or no append-only file.

    Raised before anything is sent.
    """


class BrokerUnavailable(QuireError):
    """Redis cannot be reached, refuses service, or did not answer within the retry time.

    It is unknown whether the last call took effect. Every transition may be repeated with the same
    arguments.
    """


#: The errors of an outage: Redis cannot be reached, has no memory left, or cannot confirm what it
#: writes. A program that runs on its own waits and goes on. For a caller who submits, a QueueFull
#: may also be a limit of the queue; a call that submits nothing meets no such limit.
UNAVAILABLE = (BrokerUnavailable, QueueFull, DurabilityUnavailable)


def _restored(
    kind: type[QuireError], arguments: tuple[Any, ...], fields: dict[str, Any]
) -> QuireError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error
