"""The ends of a queue: one entry of the stream `ends` for each request and batch that has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.errors import ProtocolError
from quire.keys import GROUP_SEPARATOR
from quire.records import ErrorInfo, FinishReason, State, Usage
from quire.wire.output import Completion, split_entry_id
from quire.wire.protocol import Priority


@dataclass(frozen=True, slots=True)
class End:
    """One request has ended. What is not here is in its result, as long as that is kept.

    `position` is the cursor of a reader that goes on after this end: for consumers of a group and
    brokers the id of its entry, and otherwise a text without meaning for others (see
    shard_cursor.py). `usage` has the tokens of the log; an end without a worker has no
    `prompt_tokens`. `ended_at` and `submitted_at` are seconds since the Unix epoch on the clock of
    Redis, to a millisecond; a request that was requeued was submitted then.
    """

    position: str
    request_id: str
    tenant: str
    priority: Priority
    state: State
    finish_reason: FinishReason
    usage: Usage
    submitted_at: float
    ended_at: float
    model: str | None = None
    error: ErrorInfo | None = None

    @property
    def group(self) -> str | None:
        """The group that the request is in."""
        group, separator, _ = self.request_id.partition(GROUP_SEPARATOR)
        return group if separator else None

    @classmethod
    def from_entry(cls, entry_id: bytes, fields: Mapping[bytes, bytes]) -> End:
        """Reads an entry. ProtocolError when it is not one of ours."""
        try:
            ended_ms, _ = split_entry_id(entry_id)
            request_id = fields[b"id"].decode()
            completion = Completion.decode(fields[b"done"], request_id=request_id)
            usage = replace(completion.usage, completion_tokens=int(fields[b"tokens"]))
            return cls(
                position=entry_id.decode(),
                request_id=request_id,
                tenant=fields[b"tenant"].decode(),
                priority=Priority(int(fields[b"priority"])),
                state=completion.state,
                finish_reason=completion.finish_reason,
                usage=usage,
                submitted_at=int(fields[b"submitted_ms"]) / 1000,
                ended_at=ended_ms / 1000,
                model=completion.model,
                error=completion.error,
            )
        except (KeyError, ValueError) as error:
            raise ProtocolError(f"the end {entry_id!r} is damaged: {error!r}") from error


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """One batch over HTTP has ended. The rest is in its record, as long as that is kept.

    `status` is completed, failed, expired or cancelled. `total` counts the lines, and is 0 if the
    input was refused; `completed` and `failed` count those with a result and with an error. Times
    are as in `End`.
    """

    position: str
    batch_id: str
    tenant: str
    status: str
    total: int
    completed: int
    failed: int
    created_at: float
    ended_at: float

    @staticmethod
    def is_in(fields: Mapping[bytes, bytes]) -> bool:
        """Whether an entry tells the end of a batch, and not that of a request."""
        return b"batch" in fields

    @classmethod
    def from_entry(cls, entry_id: bytes, fields: Mapping[bytes, bytes]) -> BatchEnd:
        """Reads an entry. ProtocolError when it is not one of ours."""
        try:
            ended_ms, _ = split_entry_id(entry_id)
            return cls(
                position=entry_id.decode(),
                batch_id=fields[b"batch"].decode(),
                tenant=fields[b"tenant"].decode(),
                status=fields[b"state"].decode(),
                total=int(fields[b"total"]),
                completed=int(fields[b"completed"]),
                failed=int(fields[b"failed"]),
                created_at=int(fields[b"submitted_ms"]) / 1000,
                ended_at=ended_ms / 1000,
            )
        except (KeyError, ValueError) as error:
            raise ProtocolError(f"the end {entry_id!r} is damaged: {error!r}") from error
