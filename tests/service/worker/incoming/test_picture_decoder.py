"""The process that decodes pictures: right pixels, named refusals, and a death of its own."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from quire.errors import InvalidRequest
from quire.wire import pictures
from service.worker.bounded.process import ProcessFailed
from service.worker.incoming import picture_decoder
from service.worker.incoming.picture_decoder import Decoded, PictureDecoder
from tests.quire.picture_files import END, jpeg_header, png, png_header
from tests.service.worker.constraints.test_probe import is_running

FIELD = "body.messages.0.content.1"
MIB = 1 << 20
RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.fixture
def make() -> Iterator[Callable[..., PictureDecoder]]:
    made: list[PictureDecoder] = []

    def make_one(*, cpu_seconds: float = 20.0, mib: int = 512, **others: Any) -> PictureDecoder:
        made.append(PictureDecoder(cpu_seconds=cpu_seconds, memory_bytes=mib * MIB, **others))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


def file_of(image: Image.Image, name: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def two_colours(mode: str = "RGB") -> Image.Image:
    """Red above blue, 4 pixels wide and 2 high."""
    image = Image.new("RGB", (4, 2), RED)
    image.paste(BLUE, (0, 1, 4, 2))
    return image.convert(mode)


def one(decoder: PictureDecoder, data: bytes) -> Decoded:
    (found,) = decoder.decode_all([(FIELD, data)])
    return found


def rows(decoder: PictureDecoder, data: bytes) -> list[list[tuple[int, ...]]]:
    found = one(decoder, data)
    assert len(found.rgb) == 3 * found.width * found.height
    pixels = [tuple(found.rgb[at : at + 3]) for at in range(0, len(found.rgb), 3)]
    return [pixels[at : at + found.width] for at in range(0, len(pixels), found.width)]


def test_the_pixels_are_those_of_the_file(make):
    decoder, whole = make(), [[RED] * 4, [BLUE] * 4]
    for name, options in {"PNG": {}, "WEBP": {"lossless": True}, "GIF": {}}.items():
        assert rows(decoder, file_of(two_colours(), name, **options)) == whole, name
    assert rows(decoder, file_of(two_colours("P"), "PNG")) == whole
    assert rows(decoder, file_of(Image.new("CMYK", (2, 1)), "JPEG")) == [[(255, 255, 255)] * 2]
    large = one(decoder, file_of(Image.new("RGB", (900, 700), BLUE), "PNG"))
    assert (large.width, large.height, large.rgb) == (900, 700, bytes(BLUE) * 630_000)


def test_the_first_frame_counts_and_the_orientation_of_a_camera(make):
    decoder = make()
    frames = [Image.new("RGB", (1, 1), BLUE)]
    first = Image.new("RGB", (1, 1), RED)
    moving = file_of(first, "GIF", save_all=True, append_images=frames)
    assert rows(decoder, moving) == [[RED]]
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = rows(decoder, file_of(two_colours(), "WEBP", lossless=True, exif=exif))
    assert turned == [[BLUE, RED]] * 4


def test_transparent_pixels_are_white_and_16_bits_become_8(make):
    decoder = make()
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (0, 0, 255, 255))
    assert rows(decoder, file_of(clear, "PNG")) == [[(255, 255, 255), BLUE]]
    grey = Image.new("I;16", (1, 1), 0x8000)
    assert rows(decoder, file_of(grey, "PNG")) == [[(128, 128, 128)]]


DAMAGED = {
    "nothing behind the header": png_header(100, 100),
    "no pixels": png_header(100, 100) + END,
    "cut off": file_of(Image.new("RGB", (64, 64)), "JPEG")[:-100],
    "cut off in the middle": png(200, 200)[:-60],
    "a header of JPEG": jpeg_header(10, 10),
    "another format": file_of(Image.new("RGB", (4, 4)), "BMP"),
    "no picture": b"<svg/>",
    "nothing": b"",
}


def test_a_damaged_file_is_refused_by_its_field_and_the_process_goes_on(make):
    decoder = make()
    one(decoder, png())
    process = decoder.process_id
    for name, data in DAMAGED.items():
        with pytest.raises(InvalidRequest) as refused:
            one(decoder, data)
        assert (refused.value.field, refused.value.message) == (FIELD, "cannot be decoded"), name
    assert rows(decoder, png(1, 1, color=bytes(RED))) == [[RED]]
    assert decoder.process_id == process


def test_more_pixels_than_may_be_are_refused_unread(make, monkeypatch):
    monkeypatch.setattr(picture_decoder, "MAX_PIXELS", 5)
    with pytest.raises(InvalidRequest, match="has more than 5 pixels"):
        one(make(), png(3, 2))


def test_what_takes_too_much_memory_or_time_ends_the_process_and_the_next_one_is_new(make):
    data = file_of(Image.new("RGB", (7000, 7000)), "PNG")
    decoder = make(mib=16)
    one(decoder, png())
    first = decoder.process_id
    with pytest.raises(InvalidRequest) as refused:
        one(decoder, data)
    assert refused.value.message == "takes more than 16 MiB of memory to decode"
    assert first is not None and not is_running(first)
    assert rows(decoder, png(1, 1, color=bytes(BLUE))) == [[BLUE]]
    assert decoder.process_id != first
    with pytest.raises(InvalidRequest) as refused:
        one(make(cpu_seconds=0.01), data)
    assert refused.value.message == "takes more than 0.01 seconds to decode"


def test_a_process_that_others_kill_says_nothing_about_the_picture(make):
    killed: list[int] = []

    def kill() -> None:
        if len(killed) < most and decoder.process_id not in killed:
            killed.append(decoder.process_id)
            os.kill(decoder.process_id, signal.SIGKILL)

    most = 1
    decoder = make(on_poll=kill)
    assert rows(decoder, png(1, 1, color=bytes(RED))) == [[RED]]
    assert len(killed) == 1
    most = 10
    decoder.close()
    with pytest.raises(ProcessFailed):
        one(decoder, png())


def answer_of(width: Any, height: Any, pixels: bytes = b"", **others: Any) -> bytes:
    told = {"refusal": "", "width": width, "height": height, "cpu_seconds": 0.0}
    return json.dumps(told | {"must_restart": False} | others).encode() + b"\n" + pixels


@pytest.mark.parametrize(
    "answer",
    [
        *(b"[]\n", b"x" * 5000, b"{}\n", answer_of(99999, 99999), answer_of(0, 0)),
        *(answer_of(-1, -1, b"abc"), answer_of(1.0, 1, b"abc"), answer_of(1, 1, b"abcd")),
        *(answer_of(1, 1, b"abc", refusal="no"), answer_of(1, 1, b"abc", refusal=None)),
        answer_of(1, 1, b"abc", cpu_seconds=-1),
    ],
)
def test_an_answer_that_is_not_ours_says_nothing_about_the_picture_and_ends_its_process(
    make, monkeypatch, answer
):
    decoder = make()
    with monkeypatch.context() as patched:
        patched.setattr(
            decoder._process,
            "ask",
            lambda question, *, is_whole, seconds: (
                bytearray(answer) if is_whole(bytearray(answer)) else None
            ),
        )
        with pytest.raises(ProcessFailed, match="answers"):
            one(decoder, png())
    assert decoder.process_id is None


def test_the_pictures_of_a_request_share_its_time(make, monkeypatch):
    monkeypatch.setattr(pictures, "MAX_REQUEST_BYTES", 1 << 40)
    monkeypatch.setattr(pictures, "MAX_REQUEST_PIXELS", 1 << 40)
    slow = file_of(Image.effect_noise((2000, 2000), 50).convert("RGB"), "PNG")
    files = [(f"{FIELD}.{number}", slow) for number in range(50)]
    decoder = make(cpu_seconds=1.0)
    assert len(decoder.decode_all(files[:1])) == 1
    with pytest.raises(InvalidRequest, match="seconds to decode after those before") as refused:
        decoder.decode_all(files)
    assert refused.value.field != f"{FIELD}.0"
    assert "than 1 seconds" not in refused.value.message


@pytest.mark.parametrize(
    ("limit", "most"), [("MAX_REQUEST_BYTES", 2 * len(png())), ("MAX_REQUEST_PIXELS", 12)]
)
def test_pictures_that_are_too_much_together_are_refused_whoever_sent_them(
    make, monkeypatch, limit, most
):
    files = [(f"{FIELD}.{number}", png()) for number in range(3)]
    decoder = make()
    assert len(decoder.decode_all(files)) == 3
    monkeypatch.setattr(pictures, limit, most)
    with pytest.raises(InvalidRequest, match="is too much") as refused:
        decoder.decode_all(files)
    assert refused.value.field == f"{FIELD}.2"
