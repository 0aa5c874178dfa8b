"""How the model calls what is on a server: owners, entries of a log, ends, numbers for ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.wire.output import Completion, ErrorInfo, FinishReason, State, TokenChunk
from tests.simulation.model_state import NOBODY, Chunk, End

TOO_LATE = ErrorInfo("deadline_exceeded", "too late")
#: What a worker writes at the end, by the reason in the model.
ENDINGS = {
    "completed": (State.COMPLETED, FinishReason.LENGTH, None),
    "cancelled": (State.CANCELLED, FinishReason.CANCELLED, None),
    "deadline_exceeded": (State.EXPIRED, FinishReason.DEADLINE, TOO_LATE),
}


def log_entry(entry_id: bytes, fields: Mapping[bytes, bytes]) -> Chunk | End:
    if b"done" not in fields:
        chunk = TokenChunk.from_entry(entry_id, fields)
        return Chunk(chunk.start, chunk.token_ids, chunk.epoch)
    at, epoch = (int(part) for part in entry_id.split(b"-"))
    completion = Completion.from_entry("", entry_id, fields=fields)
    return End(at, epoch, reason_of(completion), completion.attempts, completion.resumes)


def reason_of(completion: Completion) -> str:
    return completion.error.code if completion.error else str(completion.state)


def owner_name(owner: int) -> str:
    return f"{owner:032x}" if owner != NOBODY else ""


def owner_number(name: bytes) -> int:
    return int(name, 16) if name else NOBODY


def number(numbers: dict[Any, int], entry_id: Any) -> int:
    """The number of an id; one that was never seen gets the next."""
    return numbers.setdefault(entry_id, len(numbers) + 1)
