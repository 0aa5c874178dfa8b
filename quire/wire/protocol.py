"""The messages of protocol version 1: what a producer sends and what comes back.

A GenerationRequest is one msgpack map. Unknown fields of the envelope are kept and passed on,
unknown fields of the body are refused by name (see sampling.py), and another major version is
refused before anything else is looked at. What comes back is described in output.py.
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
from quire.wire.output import Completion, ErrorInfo, FinishReason, State, Timing, TokenChunk, Usage
from quire.wire.refusals import FaultWithin
from quire.wire.sampling import Kind, ParsedBody, SamplingParams, parse_body, validated

#: The major version written into `v`. A reader refuses every other one.
PROTOCOL_VERSION: Final = 1

#: The most bytes of the encoded metadata: it is stored with the record and echoed.
MAX_METADATA_BYTES = 16 << 10

#: The most bytes of the encoded headers.
MAX_HEADERS_BYTES = 8 << 10

#: Tells the validators of a request that it was sent already: what older producers let through is
#: read all the same.
_RECORDED = object()

#: What a request id may be: it becomes a part of a key and of a log line.
#: With a tilde it is `<group>~<member>`; see keys.py.
REQUEST_ID_PATTERN = r"^(?:[A-Za-z0-9._:-]{1,64}~)?[A-Za-z0-9._:-]+$"
MAX_REQUEST_ID_LENGTH = 128

#: A tenant has no colon, so that tenant and idempotency key cannot run into one another.
TENANT_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"
_TENANT = re.compile(TENANT_PATTERN)


def is_tenant_name(name: str) -> bool:
    """Whether a tenant can be called so: what the field of a request says, for all others."""
    # A `$` of Python's would let a line's end pass, which the field refuses.
    return _TENANT.fullmatch(name) is not None


def mint_id() -> str:
    """A fresh request id: 128 random bits in hex."""
    return secrets.token_hex(16)


class Priority(IntEnum):
    """The four classes of urgency. A better class is read, admitted and kept first."""

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
    """One unit of generation a service asks for; immutable, named by an id its caller minted."""

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
    #: The earliest time it may be queued, unix milliseconds on the broker's clock.
    not_before_ms: Annotated[int, Strict(), Field(gt=0, lt=1 << 53)] | None = None
    idempotency_key: Annotated[str, Strict(), Field(min_length=1, max_length=255)] | None = None
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
        """The wire form. InvalidRequest when a value cannot be sent, or not read again."""
        fields: dict[str, Any] = {"v": self.v, "id": self.id, "kind": self.kind, "body": self.body}
        # A body may be long, and a dump of it is slow; the order of the fields stays as it was.
        fields |= self.model_dump(exclude_none=True, exclude={"body"})
        # The dump must not drop nulls inside the caller's own maps.
        fields |= {"metadata": self.metadata, "priority": int(self.priority)}
        try:
            data = pack(fields, field="body")
        except Unsendable as error:
            raise InvalidRequest(error.path or "body", error.message) from error
        # The codec writes maps that no reader takes; a worker could only bury such a request.
        try:
            unpack_map(data)
        except ProtocolError as error:
            found = unsendable(fields, field="")
            raise InvalidRequest(found.path or "body", found.message) from error
        return data

    @classmethod
    def decode(cls, data: bytes) -> GenerationRequest:
        """Reads the wire form.

        ProtocolError when the bytes are not ours, UnsupportedVersion for another major version,
        InvalidRequest for a field of the envelope. The body is not looked into: see `parse_body`.
        """
        fields = unpack_map(data)
        if "v" not in fields:
            raise ProtocolError("message has no protocol version")
        if type(fields["v"]) is not int or fields["v"] != PROTOCOL_VERSION:
            raise UnsupportedVersion(fields["v"])
        return validated(cls, fields, context=_RECORDED)

    def parse_body(self) -> ParsedBody:
        """Checks the body. Called at submit and again at claim: the wire is never trusted."""
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
    """Whether a number in it is none of JSON's; without a call for each of its levels."""
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
    "Completion",
    "ErrorInfo",
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
