"""The pictures of requests in Redis: stored by a producer before SUBMIT, read by a worker.

The key of a picture follows from its bytes, so the same picture is stored once in a shard. SUBMIT
lets it live as long as its request may wait, see submit.lua.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence

from quire.errors import InvalidRequest
from quire.keys import Keys
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.wire.message import Message
from quire.wire.pictures import places_of

#: How long a stored picture waits for the SUBMIT that lets it live longer.
WAIT_MS = 10 * 60 * 1000

_log = logging.getLogger(__name__)


def storing(keys: Keys, message: Message, lacking: Sequence[str]) -> Procedure[None]:
    """Stores pictures that SUBMIT has not found. InvalidRequest for one that nobody has sent.

    One at a time, so that only one of them is in the buffers of the connection.
    """
    for digest in lacking:
        data = message.pictures.get(digest)
        if data is None:
            places = places_of(message.request.body.get("messages"))
            field = next((one.field for one in places if one.digest == digest), "body.messages")
            raise InvalidRequest(field, "names a picture that is not stored: send its bytes")
        # Another producer may have stored it meanwhile: then its longer life stays.
        store = command("set", keys.picture(digest), data, px=WAIT_MS, nx=True)
        yield RoundTrip((store,))


def reading(keys: Keys, digests: Sequence[str]) -> Procedure[Mapping[str, bytes]]:
    """See `Producer.pictures`.

    Bytes with another digest count as absent, and are deleted so that the right ones can be stored:
    any producer can write the key, and a worker caches what it computes under the digest.
    """
    found: dict[str, bytes] = {}
    for digest in dict.fromkeys(digests):
        key = keys.picture(digest)
        (data,) = yield RoundTrip((command("get", key),))
        if data is None:
            continue
        if hashlib.sha256(data).hexdigest() == digest:
            found[digest] = data
        else:
            _log.error("%s has bytes with another digest; deleted", key)
            yield RoundTrip((command("delete", key),))
    return found
