"""The messages of protocol version 1: the request of a producer, and the output types.

A GenerationRequest is one msgpack map. Unknown fields of the envelope are kept and passed on.
Unknown fields of the body are refused by name (see sampling.py). Another major version is refused
before any other field is read. output.py describes the output.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from enum import IntEnum
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, field_validator
from pydantic_core.core_schema import ValidationInfo

from quire.errors import InvalidRequest, ProtocolError, UnsupportedVersion
from quire.wire.codec import Unsendable, pack, unpack_map, unsendable
from quire.wire.output import (
    Activity,
    Completion,
    ErrorInfo,
    Execution,
    FinishReason,
    State,
    Timing,
    TokenChunk,
    Usage,
)
from quire.wire.refusals import FaultWithin, validated
from quire.wire.sampling import Kind, ParsedBody, SamplingParams, parse_body

#: The major version, in the field `v`. A reader refuses every other one.
PROTOCOL_VERSION: Final = 1

#: The most bytes of the encoded metadata, which is stored with the record and echoed.
MAX_METADATA_BYTES = 16 << 10

#: The most bytes of the encoded headers.
MAX_HEADERS_BYTES = 8 << 10

#: Validation context of a request that was read from the wire: older producers accepted values that
#: are refused today, and their messages must still decode.
_RECORDED = object()

#: A request id becomes part of a key and of log lines.
#: With a tilde it is `<group>~<member>`; see keys.py.
REQUEST_ID_PATTERN = r"^(?:[A-Za-z0-9._:-]{1,64}~)?[A-Za-z0-9._:-]+$"
MAX_REQUEST_ID_LENGTH = 128

#: A tenant has no colon, because a colon separates it from the idempotency key in a Redis key.
#: A session is in keys of the queue beside others, so it has no separator of these.
SESSION_ID_PATTERN = r"^[A-Za-z0-9._:-]+$"
_SESSION_ID = re.compile(SESSION_ID_PATTERN)
MAX_SESSION_ID_LENGTH = 128

TENANT_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"
_TENANT = re.compile(TENANT_PATTERN)


def is_tenant_name(name: str) -> bool:
    """Whether this is a valid tenant: the rule of the request's field, for other modules."""
    # Not `match`: Python's `$` also matches before a newline, which the field refuses.
    return _TENANT.fullmatch(name) is not None


def is_session_id(name: str) -> bool:
    """Whether this may be the name of a session."""
    return len(name) <= MAX_SESSION_ID_LENGTH and _SESSION_ID.fullmatch(name) is not None


def mint_id() -> str:
    """A new request id: 128 random bits in hex."""
    return secrets.token_hex(16)


class Priority(IntEnum):
    """The four priority classes. A higher class is read and admitted first, and preempted last."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    CRITICAL = 3

    @classmethod
    def parse(cls, value: object) -> Priority:
        """Reads a name in any case, or the number. ValueError for anything else."""
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        if isinstance(value, int) and not isinstance(value, bool) and value in set(cls):
            return cls(value)
        raise ValueError(f"must be one of {', '.join(p.name.lower() for p in cls)}")


class GenerationRequest(BaseModel):
    """One unit of generation that a service requests. Immutable; the caller mints its id."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    v: Literal[1] = PROTOCOL_VERSION
    id: Annotated[
        str, Strict(), Field(pattern=REQUEST_ID_PATTERN, max_length=MAX_REQUEST_ID_LENGTH)
    ] = Field(default_factory=mint_id)
    kind: Kind
    body: dict[str, Any]
    tenant: Annotated[str, Strict(), Field(pattern=TENANT_PATTERN)] = "default"
    priority: Annotated[Priority, BeforeValidator(Priority.parse)] = Priority.NORMAL
    #: Unix milliseconds on the broker's clock.
    deadline_ms: Annotated[int, Strict(), Field(gt=0, lt=1 << 53)] | None = None
    #: Not queued before this time, in unix milliseconds on the broker's clock.
    not_before_ms: Annotated[int, Strict(), Field(gt=0, lt=1 << 53)] | None = None
    idempotency_key: Annotated[str, Strict(), Field(min_length=1, max_length=255)] | None = None
    #: The requests of a tenant with the same session run one after the other, as submitted.
    session_id: (
        Annotated[
            str, Strict(), Field(pattern=SESSION_ID_PATTERN, max_length=MAX_SESSION_ID_LENGTH)
        ]
        | None
    ) = None
    #: How long it should take from when it may be claimed. It only ranks the request.
    target_latency_ms: Annotated[int, Strict(), Field(gt=0, lt=1 << 53)] | None = None
    #: The most tokens of the output if the body has no `max_tokens`; the queue may set fewer.
    answer_limit: Annotated[int, Strict(), Field(gt=0, lt=1 << 31)] | None = None
    #: Only the tokens of the prompt are counted, in the usage of the terminal record.
    counts_only: Annotated[bool, Strict()] | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    created_ms: Annotated[int, Strict(), Field(ge=0)] = Field(
        default_factory=lambda: time.time_ns() // 1_000_000
    )

    @field_validator("metadata")
    @classmethod
    def _small_metadata(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        value = _within(value, MAX_METADATA_BYTES)
        if info.context is not _RECORDED and _is_beyond_json(value):
            raise ValueError("must not hold NaN or Infinity: JSON has neither")
        return value

    @field_validator("headers")
    @classmethod
    def _small_headers(cls, value: dict[str, str]) -> dict[str, str]:
        return _within(value, MAX_HEADERS_BYTES)

    def encode(self) -> bytes:
        """The wire form. InvalidRequest when a value cannot be encoded and decoded again."""
        fields: dict[str, Any] = {"v": self.v, "id": self.id, "kind": self.kind, "body": self.body}
        # The body is not dumped: it may be long, and that is slow. It is set above, so that the
        # order of the fields in the wire form stays.
        fields |= self.model_dump(exclude_none=True, exclude={"body"})
        # The dump would drop nulls inside the caller's own maps.
        fields |= {"metadata": self.metadata, "priority": int(self.priority)}
        try:
            data = pack(fields, field="body")
        except Unsendable as error:
            raise InvalidRequest(error.path or "body", error.message) from error
        # The codec can write maps that it refuses to read. A worker could only put such a request
        # among the dead letters.
        try:
            unpack_map(data)
        except ProtocolError as error:
            found = unsendable(fields, field="")
            raise InvalidRequest(found.path or "body", found.message) from error
        return data

    @classmethod
    def decode(cls, data: bytes) -> GenerationRequest:
        """Reads the wire form.

        ProtocolError when the bytes are not a message of ours, UnsupportedVersion for another major
        version, InvalidRequest for a field of the envelope. The body is not checked; see
        `parse_body`.
        """
        fields = unpack_map(data)
        if "v" not in fields:
            raise ProtocolError("message has no protocol version")
        if type(fields["v"]) is not int or fields["v"] != PROTOCOL_VERSION:
            raise UnsupportedVersion(fields["v"])
        return validated(cls, fields, context=_RECORDED)

    def parse_body(self) -> ParsedBody:
        """Checks the body. Called at submit and again at claim, because the wire is not trusted."""
        return parse_body(self.kind, self.body)


def _within(value: dict[str, Any], max_bytes: int) -> dict[str, Any]:
    try:
        unpack_map(pack(value, max_bytes=max_bytes))
    except Unsendable as error:
        raise FaultWithin(error.path, error.message) from error
    except InvalidRequest as error:
        raise ValueError(error.message) from error
    except ProtocolError as error:
        found = unsendable(value, field="")
        raise FaultWithin(found.path, found.message) from error
    return value


def _is_beyond_json(value: object) -> bool:
    """Whether it holds NaN or Infinity. Not recursive: the depth comes from the caller."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, float) and not math.isfinite(one):
            return True
        if isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, list | tuple):
            waiting.extend(one)
    return False


__all__ = [
    "PROTOCOL_VERSION",
    "Activity",
    "Completion",
    "ErrorInfo",
    "Execution",
    "FinishReason",
    "GenerationRequest",
    "Kind",
    "ParsedBody",
    "Priority",
    "SamplingParams",
    "State",
    "Timing",
    "TokenChunk",
    "Usage",
    "mint_id",
]
