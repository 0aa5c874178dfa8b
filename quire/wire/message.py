"""A request as it is sent: its wire form, and a digest of its content.

SUBMIT stores the digest in the record, in the field `asked`, where it outlives the body. If the id
exists already, SUBMIT returns the stored digest. So the client can tell whether the earlier request
was the same one; conflicts.py compares them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from quire.errors import InvalidRequest
from quire.wire.codec import pack
from quire.wire.protocol import GenerationRequest
from quire.wire.sampling import ParsedBody, SamplingParams

#: First byte of a digest: the version of the rule that made it. A changed rule needs another byte,
#: because a request may be submitted again after an upgrade of its client.
DIGEST_RULE = b"2"

#: Bytes of the digest for everything except the seed, and for the seed.
CONTENT_BYTES = 10
SEED_BYTES = 4

_ENCODER = json.JSONEncoder(sort_keys=True)

#: A parameter with its default value is left out of the digest. So the digest stays the same when a
#: later version adds parameters.
_DEFAULTS = {
    name: field.get_default(call_default_factory=True)
    for name, field in SamplingParams.model_fields.items()
}


@dataclass(frozen=True, slots=True)
class Message:
    """A request, its wire form `data`, and its digest; see `digest_of`.

    `body` is its checked body; None if the body was not checked. `kept` is stored in the record,
    beside the wire form, for as long as the results. Workers never read it.
    `pictures` are those that came with the request, by digest; SUBMIT asks for their bytes.
    """

    request: GenerationRequest
    data: bytes
    digest: bytes
    body: ParsedBody | None = None
    kept: bytes = b""
    pictures: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, request: GenerationRequest, body: ParsedBody | None = None) -> Message:
        """The message of a request. InvalidRequest when it cannot be sent.

        `body` is the parsed body of the request, if the caller has it already.
        """
        pictures = body.pictures if body is not None else {}
        return cls(request, request.encode(), digest_of(request, body), body, pictures=pictures)

    @property
    def id(self) -> str:
        return self.request.id


def digest_of(request: GenerationRequest, body: ParsedBody | None = None) -> bytes:
    """A digest of 15 bytes: rule, content, seed. Empty if the body cannot be read.

    The content is everything that determines the output, and the tenant. Equal values in another
    notation have the same digest. Priority, times, headers and metadata are not part of it. The
    last bytes are of the seed alone.
    """
    try:
        body = body or request.parse_body()
        content = {name: getattr(body.sampling, name) for name in body.sampling.model_fields_set}
        content = {name: value for name, value in content.items() if value != _DEFAULTS[name]}
        seed = content.pop("seed", None)
        if content.get("json_whitespace") == "none":
            # What earlier versions could not say is the default of what they asked for.
            del content["json_whitespace"]
        if "json_schema" in content:
            # Not sorted: the output has its properties in the order of the schema.
            content["json_schema"] = json.dumps(content["json_schema"])
        content |= {"tenant": request.tenant, "messages": _as_before(body.messages)}
        content |= {"model": body.model, "adapter": body.adapter}
        if body.pooling is not None:
            content |= {"kind": request.kind, "pooling": body.pooling.differing()}
        given = {name: value for name, value in content.items() if value is not None}
        digest = hashlib.sha256(_ENCODER.encode(given).encode())
        # Not part of the JSON: a prompt may be long, and msgpack is faster.
        digest.update(pack(body.prompt))
    except (InvalidRequest, TypeError, RecursionError):
        # A broker does not check bodies; and messages may hold values that JSON cannot express.
        return b""
    of_seed = crc32(str(seed).encode()).to_bytes(SEED_BYTES, "big")
    return DIGEST_RULE + digest.digest()[:CONTENT_BYTES] + of_seed


def _as_before(messages: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """Messages as the digests of earlier versions have them: without a content of null."""
    if messages is None:
        return None
    return [one if one["content"] is not None else {**one, "content": ""} for one in messages]
