"""The typed errors of Quire; every one of them is a `QuireError`.

QuireError
├── InvalidRequest        a request that can never be served; names the field
│   └── RequestConflict       its id is that of another request
├── ProtocolError         bytes that are not a message of Quire
│   └── UnsupportedVersion    a message of Quire, of a major version this reader does not know
├── QueueFull             a limit of the queue is reached, or Redis has no memory left
├── UnknownRequest        there is no request with this id
│   └── ResultExpired         there was one, but its retention has passed
├── RequestFailed         the request has ended without completing; carries the Completion
│   ├── Cancelled             because a caller asked for it
│   └── DeadlineExceeded      because its deadline passed
├── OutputRewound         the log does not go on where its reader is: Redis lost tokens
├── DurabilityUnavailable the server cannot promise what a durable broker needs
├── WaitTimeout           `result(timeout=)` ran out; the request goes on
└── BrokerUnavailable     Redis cannot be reached, or its reply was lost
"""

from __future__ import annotations

from typing import Any

from quire.records import TerminalRecord


class QuireError(Exception):
    """The root of the tree: `except QuireError` catches all that Quire raises on purpose.

    All of them can be pickled: a pool of processes hands an error on as it was raised.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with the finished message as its only argument.
        return _restored, (type(self), self.args, self.__dict__)


class InvalidRequest(QuireError):
    """A request that can never be served. `field` is the path of the fault, such as `body.top_p`.

    `index` is its place among several that were submitted together, from 0.
    """

    def __init__(self, field: str, message: str, *, index: int | None = None) -> None:
        place = "" if index is None else f"request {index}: "
        super().__init__(f"{place}{field}: {message}")
        self.field = field
        self.message = message
        self.index = index


class RequestConflict(InvalidRequest):
    """The id `request_id` is that of another request, which is unchanged.

    Raised after everything was sent: the others submitted with it are in the queue.
    """

    def __init__(self, request_id: str, *, index: int | None = None) -> None:
        message = f"{request_id} is there already and asks for something else"
        super().__init__("request_id", message, index=index)
        self.request_id = request_id


class ProtocolError(QuireError):
    """Bytes that are not a message of this protocol: malformed, foreign, or over a limit."""


class UnsupportedVersion(ProtocolError):
    """A message whose major version this reader does not know; `found` is the version it names."""

    def __init__(self, found: object) -> None:
        super().__init__(f"protocol version {found!r} is not supported")
        self.found = found


class QueueFull(QuireError):
    """A limit is reached; try again later.

    `limit` is the one reached: waiting `requests`, their `tokens`, open requests of the `tenant`,
    or the `memory` of Redis. `accepted` are the ids of those submitted together that are queued.
    """

    def __init__(
        self, message: str, *, limit: str = "requests", accepted: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.accepted = accepted


class UnknownRequest(QuireError):
    """There is no request with this id in the queue: never submitted, or already expired."""

    def __init__(self, request_id: str, message: str = "no such request") -> None:
        super().__init__(f"{request_id}: {message}")
        self.request_id = request_id


class ResultExpired(UnknownRequest):
    """The request was known to this handle, and its keys are gone.

    Its retention has passed; or Redis has lost its data, and the request with them.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id, "it is gone: its retention has passed, or Redis lost it")


class RequestFailed(QuireError):
    """The request is terminal and did not complete.

    `code` is stable and for programs, `message` for people; `field` is what is wrong in a rejected
    request. `completion` is the terminal record, with the text and tokens published until then when
    the error comes from `result()`.
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
    """The request was cancelled by a caller."""


class DeadlineExceeded(RequestFailed):
    """The request's deadline, or its longest time in the queue, passed before it was complete."""


class OutputRewound(QuireError):
    """Redis has lost what this reader had already read.

    `seen` is the number of tokens the reader has, `published` the number in the log now. The log
    may be shorter, or may have grown past the reader's place again with other tokens. The first
    `kept` of the reader's tokens are certainly still in it: read on after those.

    `is_certain` is False where nothing but the number that the reader was given says that the log
    was ever so long: it may as well be a wrong number.
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
            f"its log has {published} tokens, and what comes after the first {seen} was asked for: "
            "either that number is wrong, or Redis lost tokens"
        )
        super().__init__(f"{request_id}: {lost if is_certain else beyond}")
        self.request_id = request_id
        self.seen = seen
        self.published = published
        self.kept = kept
        self.is_certain = is_certain


class WaitTimeout(QuireError):
    """`result(timeout=)` ran out of time. The request goes on; waiting again is harmless."""


class DurabilityUnavailable(QuireError):
    """The server cannot wait for its disk: no WAITAOF, or no append-only file.

    Raised before anything is sent.
    """


class BrokerUnavailable(QuireError):
    """Redis cannot be reached, refuses service, or did not answer within the bounded retries.

    Whether the last call took effect is unknown. Every transition may be repeated with the same
    arguments; only `read_ingress` may not.
    """


def _restored(
    kind: type[QuireError], arguments: tuple[Any, ...], fields: dict[str, Any]
) -> QuireError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error
