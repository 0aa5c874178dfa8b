"""Small files of pictures, whole or only their headers, made without a library."""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib

PNG_BEGIN = b"\x89PNG\r\n\x1a\n"


def png(width: int = 3, height: int = 2, *, color: bytes = b"\x10\x20\x30") -> bytes:
    """A whole PNG of one colour."""
    rows = (b"\0" + color * width) * height
    return PNG_BEGIN + _ihdr(width, height) + chunk(b"IDAT", zlib.compress(rows)) + END


def png_header(width: int, height: int) -> bytes:
    """The begin of a PNG of any size."""
    return PNG_BEGIN + _ihdr(width, height)


def gif_header(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0)


def jpeg_header(width: int, height: int, *, before: bytes = b"", marker: int = 0xC0) -> bytes:
    """A JPEG up to its frame header; `before` are segments that precede it."""
    frame = struct.pack(">BBHBHHB", 0xFF, marker, 17, 8, height, width, 3) + bytes(9)
    return b"\xff\xd8" + (before or jpeg_segment(0xE0, b"JFIF\0")) + frame


def jpeg_segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(data)) + data


def webp_header(kind: bytes, width: int, height: int) -> bytes:
    if kind == b"VP8X":
        body = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    elif kind == b"VP8L":
        body = b"\x2f" + ((width - 1) | (height - 1) << 14).to_bytes(4, "little")
    else:
        body = bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", width, height)
    chunk = kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def data_url(data: bytes, media: str = "image/png") -> str:
    return f"data:{media};base64,{base64.b64encode(data).decode()}"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _ihdr(width: int, height: int) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG, with its length and its checksum."""
    checked = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checked


END = chunk(b"IEND", b"")
