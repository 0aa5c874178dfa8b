"""Reads format and size of a picture from its header, without decoding it.

So a door can refuse a small file that would become gigabytes of pixels. Whether the rest of a
file can be decoded is found out by a worker, in a process with limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

#: The most segments of a JPEG before its frame header. Cameras write fewer than a hundred.
MAX_JPEG_SEGMENTS = 1024

#: The bytes that separate a JPEG's segments; any number of them may stand before a marker.
_FILL = 0xFF

#: The markers of a JPEG whose segment has its size: all frame headers, of every kind of coding.
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
#: Those that no segment follows, and that of the compressed data: none may precede the size.
_WITHOUT_SEGMENT = frozenset({0x00, 0x01, *range(0xD0, 0xDB)})


class Header(NamedTuple):
    """The format of a picture by its first bytes, and its size in pixels."""

    format: str
    width: int
    height: int


def read_header(data: bytes) -> Header:
    """Format and size. ValueError, with a reason for the caller, if the bytes have none.

    Looks at no more than MAX_JPEG_SEGMENTS places, however long the file is. Sources: PNG (W3C),
    section 11.2.1; JPEG (ITU T.81), annex B; GIF89a, section 18; WebP (RFC 9649), section 2.
    """
    for begin, (name, size) in _FORMATS.items():
        if data.startswith(begin):
            try:
                width, height = size(data)
            except (IndexError, ValueError):
                raise ValueError(f"is a {name} without a readable size") from None
            if not width or not height:
                raise ValueError(f"is a {name} without pixels")
            return Header(name, width, height)
    raise ValueError("is none of PNG, JPEG, WebP and GIF")


def _number(data: bytes, start: int, length: int, order: str) -> int:
    part = data[start : start + length]
    if len(part) < length:
        raise ValueError("is cut off")
    return int.from_bytes(part, "big" if order == "big" else "little")


def _png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise ValueError("begins with another chunk")
    return _number(data, 16, 4, "big"), _number(data, 20, 4, "big")


def _gif(data: bytes) -> tuple[int, int]:
    return _number(data, 6, 2, "little"), _number(data, 8, 2, "little")


def _jpeg(data: bytes) -> tuple[int, int]:
    at = 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if data[at] != _FILL:
            raise ValueError("has no marker there")
        marker = data[at + 1]
        if marker == _FILL:
            at += 1
            continue
        if marker in _WITHOUT_SEGMENT:
            raise ValueError("has data before its size")
        length = _number(data, at + 2, 2, "big")
        if marker in _FRAMES:
            return _number(data, at + 7, 2, "big"), _number(data, at + 5, 2, "big")
        if length < 2:
            raise ValueError("has a segment without a length")
        at += 2 + length
    raise ValueError("has too many segments before its size")


def _webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if data[8:12] != b"WEBP":
        raise ValueError("is another kind of RIFF")
    if kind == b"VP8X":
        return 1 + _number(data, 24, 3, "little"), 1 + _number(data, 27, 3, "little")
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = _number(data, 21, 4, "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        return _number(data, 26, 2, "little") & 0x3FFF, _number(data, 28, 2, "little") & 0x3FFF
    raise ValueError("has no frame")


_Size = Callable[[bytes], tuple[int, int]]

_FORMATS: Mapping[bytes, tuple[str, _Size]] = {
    b"\x89PNG\r\n\x1a\n": ("PNG", _png),
    b"\xff\xd8\xff": ("JPEG", _jpeg),
    b"GIF87a": ("GIF", _gif),
    b"GIF89a": ("GIF", _gif),
    b"RIFF": ("WebP", _webp),
}
