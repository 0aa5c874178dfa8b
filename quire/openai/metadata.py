"""The metadata of a call: a few texts that its caller gives it, within the limits of OpenAI's API.

Pure functions. Chats, responses and batches have the same limits.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import InvalidRequest
from quire.wire.codec import pack

#: The limits of OpenAI: pairs, and characters of a key and of a value.
MAX_PAIRS, MAX_KEY_LENGTH, MAX_VALUE_LENGTH = 16, 64, 512


def metadata_of(value: object) -> dict[str, str]:
    """The field `metadata` of a body; empty for a null. InvalidRequest names the pair at fault."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_PAIRS:
        raise InvalidRequest("body.metadata", f"must be a map of at most {MAX_PAIRS} texts")
    for key, text in value.items():
        if len(key) > MAX_KEY_LENGTH:
            message = f"must have keys of at most {MAX_KEY_LENGTH} characters"
            raise InvalidRequest("body.metadata", message)
        if not isinstance(text, str) or len(text) > MAX_VALUE_LENGTH:
            message = f"must be a text of at most {MAX_VALUE_LENGTH} characters"
            raise InvalidRequest(f"body.metadata.{key}", message)
    pack(value, field="body.metadata")
    return dict(value)


def metadata_from(value: object) -> dict[str, str]:
    """Reads the metadata of a call back from its record; empty for anything that is none."""
    if not isinstance(value, Mapping):
        return {}
    return {str(key): str(text) for key, text in value.items()}
