"""Pictures as attackers send them, each with what its refusal must say; and odd ones that are good.

Knows no process: `run` sends them. The files are small and their harm is what a decoder makes of
them, or they lie about what they are.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from tests.quire.picture_files import (
    END,
    chunk,
    data_url,
    gif_header,
    jpeg_header,
    jpeg_segment,
    png,
    png_header,
    webp_header,
)

#: What a worker says of a file that its decoder cannot read.
UNREADABLE = "cannot be decoded"
_NOT_BASE64 = "is not base64"
_NOT_AS = "must begin as data:image/png;base64, does"
_NOT_URL = "must be a data URL with the base64 of a picture"
_UNKNOWN = "is none of PNG, JPEG, WebP and GIF"
#: Bytes that many compressed texts have, and their size: 64 MiB of zeros.
_BOMB = zlib.compress(bytes(64 << 20), 9)


class Hostile(NamedTuple):
    """Messages that must be refused by a field, with a text that `reason` is found in."""

    name: str
    messages: list[dict[str, Any]]
    reason: str


class Odd(NamedTuple):
    """A file that looks dangerous, and a plain one with the same pixels."""

    name: str
    data: bytes
    plain: bytes


def hostile_chats() -> Iterator[Hostile]:
    """Everything that must be refused without an address."""
    for name, url, reason in _urls():
        yield Hostile(name, [_message({"type": "image_url", "image_url": {"url": url}})], reason)
    for name, data, reason in (*_files_at_the_door(), *_files_for_the_decoder()):
        yield Hostile(name, [_message(part_of(data))], reason)
    yield from _parts()


def part_of(data: bytes, media: str = "image/png") -> dict[str, Any]:
    """A file, as OpenAI's API takes it."""
    return {"type": "image_url", "image_url": {"url": data_url(data, media)}}


def odd_files() -> Iterator[Odd]:
    """Files of many frames or with much beside their pixels: the first frame is what counts."""
    frames = [Image.new("RGB", (16, 16), (index % 256, 80, 200)) for index in range(1000)]
    for form in ("GIF", "WEBP", "PNG"):
        file = BytesIO()
        frames[0].save(file, form, save_all=True, append_images=frames[1:], lossless=True)
        moving = file.getvalue()
        yield Odd(f"{form} of {len(frames)} frames", moving, _as_png(moving))
    whole = png(20, 30)
    yield Odd("PNG with a megabyte behind its end", whole + bytes(1 << 20), whole)
    yield Odd("PNG of 20,000 empty chunks", _with_chunk(whole, chunk(b"quRe", b"") * 20_000), whole)
    # The bombs below without their harm: so it is the harm that is refused there.
    small = zlib.compress(b"text")
    texts = chunk(b"iTXt", b"a\0\x01\0\0\0" + small) + chunk(b"zTXt", b"a\0\0" + small)
    texts += chunk(b"iCCP", b"a\0\0" + small) + png_header(20, 30)[8:]
    yield Odd("PNG with small texts and its size again", _with_chunk(whole, texts), whole)
    yield Odd("JPEG of 99 scans", _jpeg_of_scans(99, side=64), _as_png(_jpeg_of_scans(1, side=64)))
    jpeg = _jpeg(30, 20)
    profile = jpeg_segment(0xE2, b"ICC_PROFILE\0\x01\xff" + bytes(60_000)) * 20
    yield Odd("JPEG with 1 MB of colour profile", jpeg[:2] + profile + jpeg[2:], _as_png(jpeg))


def _urls() -> Iterator[tuple[str, str, str]]:
    """Name, url and reason: what is no data URL of base64."""
    good = base64.b64encode(png()).decode()
    yield "empty url", "", _NOT_URL
    yield "no url", "nonsense", _NOT_URL
    yield "file url", "file:///etc/passwd", _NOT_URL
    yield "script url", "javascript:fetch('//evil.example')", _NOT_URL
    yield "data url without a comma", "data:", _NOT_AS
    yield "data url of a page", "data:text/html;base64,PGI+", _NOT_AS
    yield "data url with a parameter", f"data:image/png;name=a.png;base64,{good}", _NOT_AS
    yield "data url that is percent-encoded", "data:image/png,%89PNG%0D%0A%1A%0A", _NOT_AS
    yield "data url with an endless type", f"data:image/{'a' * 100_000};base64,{good}", _NOT_AS
    yield "base64 of nothing", "data:image/png;base64,", _UNKNOWN
    yield "percent signs as base64", "data:image/png;base64,%%%", _NOT_BASE64
    yield "base64 with line ends", f"data:image/png;base64,{good[:8]}\r\n{good[8:]}", _NOT_BASE64
    yield "base64 without its padding", f"data:image/png;base64,{good[:-3]}", _NOT_BASE64
    yield "base64 behind its padding", f"data:image/png;base64,AAA={good}", _NOT_BASE64
    yield "base64 for urls", "data:image/png;base64,_-_-", _NOT_BASE64


def _files_at_the_door() -> Iterator[tuple[str, bytes, str]]:
    """Name, file and reason: what the header tells."""
    tiff = b"II*\0" + struct.pack("<IH", 8, 1) + struct.pack("<HHII", 256, 3, 1, 9) + bytes(4)
    yield "SVG", b"<svg xmlns='http://www.w3.org/2000/svg'/>", _UNKNOWN
    yield "BMP", b"BM" + bytes(60), _UNKNOWN
    yield "TIFF as a PNG", tiff, _UNKNOWN
    yield "EPS as a PNG", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", _UNKNOWN
    yield "AVIF as a PNG", b"\0\0\0\x1cftypavif" + bytes(16), _UNKNOWN
    yield "gzip of a PNG", zlib.compress(png(), wbits=31), _UNKNOWN
    yield "PNG cut in its header", png()[:12], "without a readable size"
    yield "PNG of 3.6 billion pixels", png_header(60_000, 60_000), "60000 x 60000 pixels"
    yield "PNG of no pixels", png_header(0, 9), "without pixels"
    yield "PNG that is one line", png_header(2**31 - 1, 1), "65535 on a side"
    yield "GIF of 4.3 billion pixels", gif_header(65_535, 65_535), "65535 x 65535 pixels"
    yield "JPEG of 4.3 billion pixels", jpeg_header(65_535, 65_535), "65535 x 65535 pixels"
    many = jpeg_segment(0xE1, b"") * 2000
    yield "JPEG of 2,000 segments", jpeg_header(9, 9, before=many), "without a readable size"
    yield "WebP of 281 trillion pixels", webp_header(b"VP8X", 1 << 24, 1 << 24), "pixels; at most"


def _files_for_the_decoder() -> Iterator[tuple[str, bytes, str]]:
    """Name, file and reason: what only decoding tells, in the process with limits."""
    yield "PNG without data", png_header(64, 64) + END, UNREADABLE
    yield "PNG cut in its data", png(64, 64)[:60], UNREADABLE
    yield "GIF without a frame", gif_header(16, 16), UNREADABLE
    whole = png(8, 8)
    text = chunk(b"iTXt", b"a\0\x01\0\0\0" + _BOMB)
    yield "PNG with a bomb as text", _with_chunk(whole, text), UNREADABLE
    text = chunk(b"zTXt", b"a\0\0" + _BOMB)
    yield "PNG with a bomb as old text", _with_chunk(whole, text), UNREADABLE
    profile = chunk(b"iCCP", b"a\0\0" + _BOMB)
    yield "PNG with a bomb as a colour profile", _with_chunk(whole, profile), UNREADABLE
    texts = b"".join(chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 20))) for _ in range(99))
    yield "PNG with 99 MB of small texts", _with_chunk(whole, texts), UNREADABLE
    second = png_header(60_000, 60_000)[8:]
    yield "PNG with a second, larger size", _with_chunk(whole, second), "pixels|" + UNREADABLE
    frame = b"," + struct.pack("<HHHHB", 0, 0, 60_000, 60_000, 0) + b"\x08\x01\x00\x00;"
    yield "GIF with a frame beyond its screen", gif_header(1, 1) + frame, "pixels"
    webp = BytesIO()
    Image.new("RGB", (300, 300)).save(webp, "WEBP")
    lying = webp_header(b"VP8X", 1, 1) + webp.getvalue()[12:]
    yield "WebP with a frame beyond its canvas", lying, UNREADABLE
    yield "WebP cut in its data", webp.getvalue()[:-40], UNREADABLE
    yield "JPEG cut in its data", _jpeg(64, 64)[:300], UNREADABLE
    yield "JPEG of 20,000 scans", _jpeg_of_scans(20_000), "takes more than .* seconds"


def _parts() -> Iterator[Hostile]:
    """What is no part with a picture, or one of a message that has none."""
    good = part_of(png())
    for name, part, reason in (
        ("detail", {**good, "image_url": {**good["image_url"], "detail": "high"}}, "not supported"),
        ("picture that is a text", {"type": "image_url", "image_url": "text"}, "must be a map"),
        ("picture of others", {"type": "image", "sha256": "0" * 64}, "must be text or image_url"),
        ("sound", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, ""),
    ):
        yield Hostile(name, [_message(part)], reason)
    yield Hostile("33 pictures", [_message(*[good] * 33)], "one too many")
    large = part_of(png_header(7000, 7000))
    yield Hostile("147 million pixels", [_message(*[large] * 3)], "may have 100000000 pixels")
    asked = {"role": "user", "content": "Which?"}
    said = {"role": "assistant", "content": [good]}
    yield Hostile("picture of the assistant", [asked, said, asked], "cannot have a picture")


def _message(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def _with_chunk(file: bytes, found: bytes) -> bytes:
    """A PNG with more chunks behind its header."""
    end = len(png_header(1, 1))
    return file[:end] + found + file[end:]


def _jpeg(width: int, height: int, **options: Any) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (height, width), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(noise).save(file, "JPEG", **options)
    return file.getvalue()


def _as_png(file: bytes) -> bytes:
    """The first frame of a file."""
    made = BytesIO()
    Image.open(BytesIO(file)).convert("RGB").save(made, "PNG")
    return made.getvalue()


def _jpeg_of_scans(count: int, *, side: int = 2048) -> bytes:
    """A progressive JPEG whose last scan, which refines every block, comes `count` times."""
    file = BytesIO()
    Image.new("L", (side, side), 99).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * count + data[-2:]
