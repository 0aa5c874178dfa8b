"""The pictures of a chat: taken out of its messages at the door, and named there by a digest.

A caller sends the bytes of a picture inside a message. The request in the queue has only
`{"type": "image", "sha256": "<64 hex digits>"}` in their place, so that it stays small; the bytes
are stored under a key of their own (see keys.py). Everything here is bounded by the limits below,
and needs no library for pictures.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from quire.errors import InvalidRequest
from quire.wire.picture_headers import read_header

#: The most pictures of one request, the same one again included.
MAX_PICTURES = 32

#: The most bytes of one picture as it is sent, and of all pictures of a request.
MAX_PICTURE_BYTES = 20 << 20
MAX_REQUEST_BYTES = 64 << 20

#: The most pixels of one picture, and of all pictures of a request: 3 bytes each when decoded.
MAX_PIXELS = 50_000_000
MAX_REQUEST_PIXELS = 100_000_000

#: The longest side, in pixels: that of the formats whose sizes have two bytes.
MAX_SIDE = (1 << 16) - 1

#: The longest part of a data URL before its data.
MAX_MEDIA_TYPE_LENGTH = 128

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MEDIA_TYPE = re.compile(r"data:image/[a-z0-9.+-]{1,64};base64", re.IGNORECASE)


class Place(NamedTuple):
    """A picture of a request: the field of its part, and its digest in hexadecimal digits."""

    field: str
    digest: str


class PictureSet:
    """The pictures of one request, within its limits. `by_digest` has the bytes of each, once."""

    def __init__(self) -> None:
        self.by_digest: dict[str, bytes] = {}
        self._num, self._num_bytes, self._num_pixels = 0, 0, 0

    def add(self, data: object, field: str) -> dict[str, Any]:
        """The part that names this picture. InvalidRequest(field)."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidRequest(field, "must be the bytes of a picture")
        self._num += 1
        must_not_be_many(self._num, field)
        _must_fit(len(data), MAX_PICTURE_BYTES, field)
        data = bytes(data)
        try:
            header = read_header(data)
        except ValueError as error:
            raise InvalidRequest(field, str(error)) from None
        num_pixels = header.width * header.height
        if num_pixels > MAX_PIXELS or max(header.width, header.height) > MAX_SIDE:
            message = (
                f"has {header.width} x {header.height} pixels; at most {MAX_PIXELS} are allowed, "
                f"and {MAX_SIDE} on a side"
            )
            raise InvalidRequest(field, message)
        self._num_bytes += len(data)
        self._num_pixels += num_pixels
        must_not_be_much(self._num_bytes, self._num_pixels, field)
        digest = hashlib.sha256(data).hexdigest()
        self.by_digest.setdefault(digest, data)
        return part_of(digest)


def part_of(digest: str) -> dict[str, Any]:
    """The part of a message that names a stored picture."""
    return {"type": "image", "sha256": digest}


def taken_out(messages: object, *, is_openai: bool) -> tuple[Any, dict[str, bytes]]:
    """The messages with digests in place of their pictures, and the bytes by digest.

    A picture is an `image_url` part of OpenAI's, whose url is a data URL, or bytes that a gateway
    has fetched. Unless the call `is_openai`, it may be a part `{"type": "image", "image": bytes}`
    too. Everything else stays as it is, for `checked_messages`. InvalidRequest names the part.
    """
    if not isinstance(messages, list):
        return messages, {}
    pictures = PictureSet()
    found = [
        _without_pictures(one, f"body.messages.{index}.content", pictures, is_openai=is_openai)
        for index, one in enumerate(messages)
    ]
    return found, pictures.by_digest


def forgotten(messages: Sequence[Any]) -> tuple[list[Any], int]:
    """Checked messages with an empty text for each data URL, and how many characters these had."""
    found = [_without_urls(message) for message in messages]
    return [message for message, _ in found], sum(number for _, number in found)


def bytes_of_url(url: object, field: str) -> bytes:
    """The bytes in a data URL; bytes are returned as they are. InvalidRequest(field)."""
    if isinstance(url, bytes):
        return url
    if not isinstance(url, str):
        raise InvalidRequest(field, "must be a data URL with the base64 of a picture")
    if url[:5].lower() != "data:":
        message = "must be a data URL with the base64 of a picture: nothing is fetched from here"
        raise InvalidRequest(field, message)
    comma = url.find(",", 0, MAX_MEDIA_TYPE_LENGTH)
    if not _MEDIA_TYPE.fullmatch(url[: max(comma, 0)]):
        raise InvalidRequest(field, "must begin as data:image/png;base64, does")
    length = len(url) - comma - 1
    _must_fit(length // 4 * 3 - 2, MAX_PICTURE_BYTES, field)
    try:
        return base64.b64decode(url[comma + 1 :], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(field, "is not base64") from None


def check_detail(detail: object, field: str) -> None:
    """InvalidRequest for an OpenAI `detail` that would change how a model sees the picture."""
    if detail not in (None, "auto"):
        message = "is not supported: the model decides; leave it out, or set it to auto"
        raise InvalidRequest(field, message)


def check_part(part: Mapping[str, Any], role: str, field: str) -> None:
    """InvalidRequest unless a part of type `image` names a stored picture, in a fit message."""
    if role == "assistant":
        raise InvalidRequest(field, "a message of the assistant cannot have a picture")
    digest = part.get("sha256")
    if part.keys() != {"type", "sha256"} or not isinstance(digest, str):
        raise InvalidRequest(field, "must name a stored picture, by sha256 alone")
    if not _DIGEST.fullmatch(digest):
        raise InvalidRequest(f"{field}.sha256", "must be 64 hexadecimal digits in lower case")


def must_not_be_many(number: int, field: str) -> None:
    """InvalidRequest(field) if this picture is one too many."""
    if number > MAX_PICTURES:
        raise InvalidRequest(field, f"is one too many: a request may have {MAX_PICTURES} pictures")


def must_not_be_much(num_bytes: int, num_pixels: int, field: str) -> None:
    """InvalidRequest(field) if the pictures of a request up to this one are too much together."""
    if num_bytes > MAX_REQUEST_BYTES:
        message = f"is too much: the pictures of a request may take {MAX_REQUEST_BYTES} bytes"
        raise InvalidRequest(field, message)
    if num_pixels > MAX_REQUEST_PIXELS:
        message = f"is too much: the pictures of a request may have {MAX_REQUEST_PIXELS} pixels"
        raise InvalidRequest(field, message)


def places_of(messages: object) -> Iterator[Place]:
    """The stored pictures of messages, in their order; what cannot be read is left out."""
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            digest = part.get("sha256") if isinstance(part, Mapping) else None
            if isinstance(digest, str) and part.get("type") == "image":
                yield Place(f"body.messages.{index}.content.{number}", digest)


def digests_of(messages: object) -> list[str]:
    """The digests of the stored pictures of messages, each once, in their order.

    No more than a request may have: nobody may have checked the messages yet.
    """
    places = islice(places_of(messages), MAX_PICTURES)
    return list(dict.fromkeys(place.digest for place in places))


def _without_pictures(message: Any, field: str, pictures: PictureSet, *, is_openai: bool) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(map(_may_be_picture, content)):
        return message
    parts = [
        _named(part, f"{field}.{number}", pictures, is_openai=is_openai)
        for number, part in enumerate(content)
    ]
    return {**message, "content": parts}


def _without_urls(message: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    content = message.get("content")
    if not isinstance(content, list) or not any(map(_may_be_picture, content)):
        return message, 0
    number = sum(len(part["image_url"]["url"]) for part in content if _may_be_picture(part))
    empty = {"type": "text", "text": ""}
    parts = [empty if _may_be_picture(part) else part for part in content]
    return {**message, "content": parts}, number


def _may_be_picture(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _named(part: Any, field: str, pictures: PictureSet, *, is_openai: bool) -> Any:
    """The part, or the one that names its picture."""
    if not _may_be_picture(part):
        return part
    if part["type"] == "image_url":
        given = part.get("image_url")
        if not isinstance(given, Mapping):
            raise InvalidRequest(f"{field}.image_url", "must be a map with a url")
        check_detail(given.get("detail"), f"{field}.image_url.detail")
        data = bytes_of_url(given.get("url"), f"{field}.image_url.url")
        return pictures.add(data, f"{field}.image_url.url")
    if is_openai:
        raise InvalidRequest(f"{field}.type", "must be text or image_url")
    if "image" in part:
        return pictures.add(part["image"], f"{field}.image")
    return part


def _must_fit(num_bytes: int, most: int, field: str) -> None:
    if num_bytes > most:
        raise InvalidRequest(field, f"takes {num_bytes} bytes; at most {most} are allowed")
