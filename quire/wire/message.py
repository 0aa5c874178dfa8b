"""A request as it is sent: its wire form, and what it asks in a few bytes.

SUBMIT keeps those bytes in the record, where they outlive the request, and answers with them for an
id that it knows. So whoever submits is told whether it is the same request that is there; how that
is judged is conflicts.py's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from zlib import crc32

from quire.errors import InvalidRequest
from quire.wire.codec import pack
from quire.wire.protocol import GenerationRequest
from quire.wire.sampling import ParsedBody, SamplingParams

#: What `asked` begins with: the rule by which it was made. Another rule takes another byte, for a
#: request may be submitted again after its client was renewed.
ASKED_RULE = b"1"

#: How many bytes of it are of all but the seed, and how many of the seed.
ASKED_BYTES = 10
SEED_BYTES = 4

_ENCODER = json.JSONEncoder(sort_keys=True)

#: A parameter that says what it would say unnamed does not count. So the same is asked when a later
#: version knows of more parameters.
_DEFAULTS = {
    name: field.get_default(call_default_factory=True)
    for name, field in SamplingParams.model_fields.items()
}


@dataclass(frozen=True, slots=True)
class Message:
    """A request and what is sent of it: `data` is its wire form, `asked` see `asked_by`."""

    request: GenerationRequest
    data: bytes
    asked: bytes

    @classmethod
    def of(cls, request: GenerationRequest, body: ParsedBody | None = None) -> Message:
        """The message of a request. InvalidRequest when it cannot be sent.

        `body` is that of the request, where it was checked already.
        """
        return cls(request, request.encode(), asked_by(request, body))

    @property
    def id(self) -> str:
        return self.request.id


def asked_by(request: GenerationRequest, body: ParsedBody | None = None) -> bytes:
    """What decides about the output, and whose it is, as 15 bytes; none where that is not known.

    How it is written does not matter, nor do priority, moments, headers and metadata. The seed has
    bytes of its own, at the end.
    """
    try:
        body = body or request.parse_body()
        told = {name: getattr(body.sampling, name) for name in body.sampling.model_fields_set}
        told = {name: value for name, value in told.items() if value != _DEFAULTS[name]}
        seed = told.pop("seed", None)
        if "json_schema" in told:
            # The order of its properties is that of the output.
            told["json_schema"] = json.dumps(told["json_schema"])
        told |= {"tenant": request.tenant, "messages": body.messages}
        told |= {"model": body.model, "adapter": body.adapter}
        given = {name: value for name, value in told.items() if value is not None}
        digest = hashlib.sha256(_ENCODER.encode(given).encode())
        # Apart, because a prompt may be long, and JSON is slower.
        digest.update(pack(body.prompt))
    except (InvalidRequest, TypeError, RecursionError):
        # A broker does not check bodies; and messages may have what JSON has not.
        return b""
    of_seed = crc32(str(seed).encode()).to_bytes(SEED_BYTES, "big")
    return ASKED_RULE + digest.digest()[:ASKED_BYTES] + of_seed
