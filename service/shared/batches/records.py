"""The records of files and batches, and their form in OpenAI's API. Knows no Redis and no HTTP."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import InvalidRequest
from quire.wire.codec import reading

#: Ids of files and batches: a prefix, and 128 bits in hex.
FILE_ID = re.compile(r"file-[0-9a-f]{32}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")

#: The purpose of an uploaded file, and that of a result file.
INPUT, OUTPUT = "batch", "batch_output"

#: The statuses that a batch does not leave.
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})

#: Seconds for which OpenAI lets a file be kept.
MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS = 3600, 2_592_000

#: The units of a completion window. OpenAI knows `24h` only.
_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([mhd])")

#: The longest completion window.
MAX_WINDOW_SECONDS = 7 * 86_400

#: The moments of a batch that its body names, beside those that it always has.
_MOMENTS = (
    *("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"),
)

#: The fields of a record as Redis returns them.
Fields = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file. Times are unix ms of Redis' clock; `uses` counts the open batches that read it."""

    id: str
    tenant: str
    purpose: str
    filename: str
    num_bytes: int
    created_ms: int
    expires_ms: int
    uses: int = 0

    @classmethod
    def of(cls, file_id: str, fields: Fields) -> "FileRecord | None":
        """The record; None if the file is not published. ProtocolError."""
        if fields.get(b"state") != b"published":
            return None
        with reading("the record of a file"):
            return cls(
                id=file_id,
                tenant=fields[b"tenant"].decode(),
                purpose=fields[b"purpose"].decode(),
                filename=fields[b"filename"].decode(),
                num_bytes=int(fields[b"bytes"]),
                created_ms=int(fields[b"created_ms"]),
                expires_ms=int(fields[b"expires_ms"]),
                uses=int(fields.get(b"uses", 0)),
            )

    @property
    def body(self) -> dict[str, Any]:
        """The file in OpenAI's API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_ms // 1000,
            "expires_at": self.expires_ms // 1000,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class Counts:
    """The lines of a batch: all of them, those with a result, and those with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def body(self) -> dict[str, int]:
        return {"total": self.total, "completed": self.completed, "failed": self.failed}


@dataclass(frozen=True, slots=True)
class BatchUsage:
    """The tokens of all completed lines."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def body(self) -> dict[str, Any]:
        """The usage in OpenAI's API."""
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch.

    `moments`: status -> when the batch entered it, unix ms. `offset`: every line that begins before
    this byte of the input has a result in the work of the epoch `work_epoch`, which is 0 before the
    first save; `num_read` lines precede it. `digest` is that of the body which created it.
    `priority` is the number of its class, and `faults` counts defects of batchers.
    """

    id: str
    status: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_ms: int
    expires_ms: int
    digest: str = ""
    priority: int = 0
    metadata: Mapping[str, str] | None = None
    model: str = ""
    output_seconds: int | None = None
    counts: Counts = Counts()
    usage: BatchUsage = BatchUsage()
    errors: tuple[Mapping[str, Any], ...] = ()
    output_file_id: str = ""
    error_file_id: str = ""
    moments: Mapping[str, int] = field(default_factory=dict)
    epoch: int = 0
    offset: int = 0
    num_read: int = 0
    work_epoch: int = 0
    faults: int = 0

    @classmethod
    def of(cls, batch_id: str, fields: Fields) -> "BatchRecord | None":
        """The record; None if there is none. ProtocolError."""
        if not fields:
            return None

        def number(name: bytes) -> int:
            return int(fields.get(name, 0))

        def text(name: bytes) -> str:
            return fields.get(name, b"").decode()

        with reading("the record of a batch"):
            output_seconds = number(b"output_seconds")
            return cls(
                id=batch_id,
                status=fields[b"status"].decode(),
                tenant=fields[b"tenant"].decode(),
                endpoint=fields[b"endpoint"].decode(),
                input_file_id=fields[b"input_file_id"].decode(),
                completion_window=fields[b"completion_window"].decode(),
                created_ms=int(fields[b"created_ms"]),
                expires_ms=int(fields[b"expires_ms"]),
                digest=text(b"digest"),
                priority=number(b"priority"),
                metadata=json.loads(fields.get(b"metadata", b"null")),
                model=text(b"model"),
                output_seconds=output_seconds or None,
                counts=Counts(number(b"total"), number(b"completed"), number(b"failed")),
                usage=BatchUsage(
                    number(b"prompt_tokens"),
                    number(b"cached_tokens"),
                    number(b"completion_tokens"),
                    number(b"reasoning_tokens"),
                ),
                errors=tuple(json.loads(fields.get(b"errors", b"[]"))),
                output_file_id=text(b"output_file_id"),
                error_file_id=text(b"error_file_id"),
                moments={name: at for name in _MOMENTS if (at := number(f"{name}_ms".encode()))},
                epoch=number(b"epoch"),
                offset=number(b"offset"),
                num_read=number(b"num_read"),
                work_epoch=number(b"work_epoch"),
                faults=number(b"faults"),
            )

    @property
    def body(self) -> dict[str, Any]:
        """The batch in OpenAI's API."""
        moments = {
            f"{name}_at": self.moments[name] // 1000 if name in self.moments else None
            for name in _MOMENTS
        }
        errors = {"object": "list", "data": list(self.errors)} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id or None,
            "error_file_id": self.error_file_id or None,
            "created_at": self.created_ms // 1000,
            "expires_at": self.expires_ms // 1000,
            **moments,
            "request_counts": self.counts.body,
            "usage": self.usage.body,
            "metadata": self.metadata,
        }


def window_seconds(window: object) -> int:
    """The seconds of a completion window, such as `24h`. InvalidRequest."""
    found = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_SECONDS:
        message = "must be a number of minutes, hours or days, such as 24h, and at most 7d"
        raise InvalidRequest("body.completion_window", message)
    return seconds


def expiry_seconds(value: object, *, name: str) -> int | None:
    """The seconds of an `expires_after`; None if it is not given. InvalidRequest."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or value.get("anchor") != "created_at":
        raise InvalidRequest(f"body.{name}", "must be a map whose anchor is created_at")
    if unknown := sorted(set(value) - {"anchor", "seconds"}):
        raise InvalidRequest(f"body.{name}.{unknown[0]}", "unknown field")
    seconds = value.get("seconds")
    is_number = isinstance(seconds, int) and not isinstance(seconds, bool)
    if not is_number or not MIN_EXPIRY_SECONDS <= int(seconds or 0) <= MAX_EXPIRY_SECONDS:
        limits = f"{MIN_EXPIRY_SECONDS} to {MAX_EXPIRY_SECONDS}"
        raise InvalidRequest(f"body.{name}.seconds", f"must be an integer of {limits}")
    return int(seconds or 0)
