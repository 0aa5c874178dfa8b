"""Format and size of a picture come from its header, in bounded time, whatever follows it."""

import pytest

from quire.wire import picture_headers
from quire.wire.picture_headers import MAX_JPEG_SEGMENTS, read_header
from tests.quire.picture_files import (
    gif_header,
    jpeg_header,
    jpeg_segment,
    png,
    png_header,
    webp_header,
)

#: Orientation, colours and a thumbnail, as a camera writes them; one fill byte before the last.
OF_A_CAMERA = (
    jpeg_segment(0xE1, b"Exif\0\0" + bytes(300))
    + jpeg_segment(0xC4, bytes(40))
    + jpeg_segment(0xDB, bytes(65))
    + b"\xff"
    + jpeg_segment(0xFE, b"\xff\xc0 in a comment")
)

SIZES = {
    "a whole PNG": (png(3, 2), ("PNG", 3, 2)),
    "a large PNG": (png_header(70_000, 9), ("PNG", 70_000, 9)),
    "GIF": (gif_header(640, 480), ("GIF", 640, 480)),
    "a baseline JPEG": (jpeg_header(640, 480), ("JPEG", 640, 480)),
    "a progressive JPEG": (jpeg_header(1, 65_535, marker=0xC2), ("JPEG", 1, 65_535)),
    "a JPEG of a camera": (jpeg_header(9, 8, before=OF_A_CAMERA), ("JPEG", 9, 8)),
    "WebP with loss": (webp_header(b"VP8 ", 16_383, 5), ("WebP", 16_383, 5)),
    "WebP without loss": (webp_header(b"VP8L", 16_384, 5), ("WebP", 16_384, 5)),
    "extended WebP": (webp_header(b"VP8X", 1 << 24, 5), ("WebP", 1 << 24, 5)),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_size_is_read(name):
    data, expected = SIZES[name]
    assert read_header(data) == expected


@pytest.mark.parametrize("name", SIZES)
def test_what_is_cut_off_in_its_header_has_no_size(name):
    # The whole PNG is cut behind its header as well; then the size is there.
    data = SIZES[name][0][:33]
    for length in range(len(data)):
        try:
            header = read_header(data[:length])
        except ValueError:
            continue
        assert header == SIZES[name][1]


def test_a_jpeg_of_many_segments_is_not_searched_to_its_end(monkeypatch):
    before = jpeg_segment(0xE2, b"") * (MAX_JPEG_SEGMENTS - 1)
    assert read_header(jpeg_header(4, 4, before=before)) == ("JPEG", 4, 4)
    with pytest.raises(ValueError, match="a JPEG without a readable size"):
        read_header(jpeg_header(4, 4, before=before + jpeg_segment(0xE2, b"")))
    with pytest.raises(ValueError, match="a JPEG without a readable size"):
        read_header(b"\xff\xd8" + b"\xff" * 2 * MAX_JPEG_SEGMENTS + jpeg_header(4, 4)[2:])
    monkeypatch.setattr(picture_headers, "MAX_JPEG_SEGMENTS", 10**9)
    assert read_header(jpeg_header(4, 4, before=before * 2)) == ("JPEG", 4, 4)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"BM" + bytes(100),
        b"II*\0" + bytes(100),
        b"\0\0\0\x1cftypavif" + bytes(100),
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"RIFF\x24\0\0\0WAVEfmt " + bytes(100),
        b"\x89PNG\r\n\x1a\n\0\0\0\rJUNK" + bytes(100),
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8\xff\xda\0\x08" + bytes(100),
        b"\xff\xd8\xff\xe0\0\0" * 100,
        webp_header(b"VP8X", 9, 9).replace(b"VP8X", b"ICCP"),
        png_header(0, 5),
        gif_header(5, 0),
        jpeg_header(0, 5),
        jpeg_header(5, 0),
        webp_header(b"VP8 ", 0, 7),
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(ValueError, match=r"is none of|without"):
        read_header(data)
