"""Pictures of OpenAI's calls leave their bytes at the door, or are refused by field."""

import base64

import pytest

from quire.errors import InvalidRequest
from quire.openai.requests import OpenAIRequest
from quire.openai.responses.call import call_of
from quire.wire import pictures
from quire.wire.codec import MAX_MESSAGE_BYTES
from quire.wire.pictures import MAX_PICTURES, MAX_SIDE
from tests.quire.picture_files import (
    data_url,
    gif_header,
    jpeg_header,
    png,
    png_header,
    sha256,
    webp_header,
)

DIGEST = "0" * 64
TEXT = {"type": "text", "text": "What is it?"}
RED, BLUE = png(color=b"\xff\0\0"), png(color=b"\0\0\xff")


def part(url, **fields):
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def chat(*parts, role="user", **fields):
    messages = [{"role": role, "content": list(parts)}]
    return OpenAIRequest("chat.completions", {"messages": messages, **fields}, "d" * 64)


def test_the_message_has_digests_and_the_pictures_beside_it():
    call = chat(TEXT, part(data_url(RED)), part(data_url(BLUE), detail="auto"), part(data_url(RED)))
    message = call.message("a")
    assert message.request.body["messages"][0]["content"] == [
        TEXT,
        {"type": "image", "sha256": sha256(RED)},
        {"type": "image", "sha256": sha256(BLUE)},
        {"type": "image", "sha256": sha256(RED)},
    ]
    assert message.pictures == {sha256(RED): RED, sha256(BLUE): BLUE}
    assert message.digest != chat(TEXT, part(data_url(BLUE))).message("a").digest


def test_a_long_picture_makes_no_long_message():
    data = RED + bytes(MAX_MESSAGE_BYTES)
    message = chat(TEXT, part(data_url(data))).message("a")
    assert len(message.data) < 1000
    assert message.pictures == {sha256(data): data}


def test_every_choice_has_the_pictures():
    call = chat(TEXT, part(data_url(RED)), n=2, return_token_ids=True)
    assert [call.message("a", choice).pictures for choice in (0, 1)] == [{sha256(RED): RED}] * 2


@pytest.mark.parametrize("data", [gif_header(3, 3), jpeg_header(3, 3), webp_header(b"VP8L", 3, 3)])
def test_the_bytes_say_the_format_and_not_the_media_type(data):
    assert chat(part(data_url(data, "image/jpeg"))).message("a").pictures == {sha256(data): data}


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_all_messages_but_the_assistants_may_have_pictures(role):
    chat(part(data_url(RED)), role=role).check()
    with pytest.raises(InvalidRequest) as refused:
        chat(part(data_url(RED)), role="assistant").check()
    assert refused.value.field == "body.messages.0.content.0"


IN_BASE64 = base64.b64encode(RED).decode()
OF_URL, OF_PART = ".1.image_url.url", ".1"

#: What follows a text in the content, and the end of the path of the fault.
HOSTILE = {
    "no url": ({"type": "image_url", "image_url": {}}, OF_URL),
    "a bare url": ({"type": "image_url", "image_url": data_url(RED)}, ".1.image_url"),
    "no map": ({"type": "image_url"}, ".1.image_url"),
    "a list": (part([data_url(RED)]), OF_URL),
    "an address": (part("https://example.com/a.png"), OF_URL),
    "an inner address": (part("http://169.254.169.254/latest/meta-data"), OF_URL),
    "a file": (part("file:///etc/passwd"), OF_URL),
    "a relative path": (part("../../etc/passwd"), OF_URL),
    "another scheme": (part("gopher://127.0.0.1:6379/_FLUSHALL"), OF_URL),
    "text in base64": (part("data:text/html;base64,PGI+"), OF_URL),
    "no base64": (part("data:image/png,%89PNG"), OF_URL),
    "parameters": (part(f"data:image/png;charset=utf-8;base64,{IN_BASE64}"), OF_URL),
    "no comma": (part("data:image/png;base64" + "A" * 1000), OF_URL),
    "a long type": (part(f"data:image/{'x' * 200};base64,{IN_BASE64}"), OF_URL),
    "white space": (part(f"data:image/png;base64,{IN_BASE64[:8]}\n{IN_BASE64[8:]}"), OF_URL),
    "url-safe base64": (part("data:image/png;base64,_-__"), OF_URL),
    "bad padding": (part(f"data:image/png;base64,{IN_BASE64.rstrip('=')}="), OF_URL),
    "data after padding": (part("data:image/png;base64,QQ==QQ=="), OF_URL),
    "no ASCII": (part("data:image/png;base64,é"), OF_URL),
    "half a surrogate pair": (part("data:image/png;base64,\ud800"), OF_URL),
    "no bytes": (part("data:image/png;base64,"), OF_URL),
    "BMP": (part(data_url(b"BM" + bytes(60), "image/bmp")), OF_URL),
    "SVG": (part(data_url(b"<svg/>", "image/svg+xml")), OF_URL),
    "a PDF": (part(data_url(b"%PDF-1.7", "image/png")), OF_URL),
    "cut off": (part(data_url(RED[:20])), OF_URL),
    "no pixels": (part(data_url(png_header(0, 1 << 20))), OF_URL),
    "a bomb": (part(data_url(png_header(50_000, 50_000))), OF_URL),
    "a bomb of GIF": (part(data_url(gif_header(65_535, 65_535))), OF_URL),
    "a bomb of WebP": (part(data_url(webp_header(b"VP8X", 1 << 24, 1 << 24))), OF_URL),
    "a bomb of JPEG": (part(data_url(jpeg_header(65_500, 65_500))), OF_URL),
    "a long side": (part(data_url(png_header(MAX_SIDE + 1, 1))), OF_URL),
    "the largest numbers": (part(data_url(png_header((1 << 32) - 1, (1 << 32) - 1))), OF_URL),
    "low detail": (part(data_url(RED), detail="low"), ".1.image_url.detail"),
    "a detail of a list": (part(data_url(RED), detail=["auto"]), ".1.image_url.detail"),
    "a picture of another": ({"type": "image", "sha256": DIGEST}, ".1.type"),
    "bytes": ({"type": "image", "image": IN_BASE64}, ".1.type"),
    "sound": ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, ".1.type"),
    "a film": ({"type": "video_url", "video_url": {"url": data_url(RED)}}, ".1.type"),
    "a document": ({"type": "file", "file": {"file_id": "file-1"}}, ".1.type"),
    "no known type": ({"type": "picture", "picture": data_url(RED)}, ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_picture_is_refused_by_its_field(name):
    given, place = HOSTILE[name]
    with pytest.raises(InvalidRequest) as refused:
        chat(TEXT, given).check()
    assert refused.value.field == f"body.messages.0.content{place}"
    assert len(refused.value.message) < 200


LIMITS = [
    ("MAX_PICTURE_BYTES", len(RED), 1),
    ("MAX_REQUEST_BYTES", 2 * len(RED), 2),
    ("MAX_PIXELS", 6, 1),
    ("MAX_REQUEST_PIXELS", 12, 2),
    ("MAX_PICTURES", 2, 2),
]


@pytest.mark.parametrize(("limit", "most", "number"), LIMITS)
def test_each_limit_is_exact_and_names_the_first_picture_beyond_it(
    monkeypatch, limit, most, number
):
    larger = png(7, 1) + bytes(9)
    beyond = [part(data_url(RED))] * number + [part(data_url(larger))]
    beyond = beyond[-1:] if number == 1 else beyond
    monkeypatch.setattr(pictures, limit, most)
    chat(*[part(data_url(RED))] * number).check()
    with pytest.raises(InvalidRequest) as refused:
        chat(*beyond).check()
    assert refused.value.field == f"body.messages.0.content.{len(beyond) - 1}.image_url.url"


def test_a_picture_that_is_too_long_is_not_decoded(monkeypatch):
    monkeypatch.setattr(pictures.base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    monkeypatch.setattr(pictures, "MAX_PICTURE_BYTES", 100)
    with pytest.raises(InvalidRequest, match="at most 100 are allowed"):
        chat(part("data:image/png;base64," + "A" * 1000)).check()


def response(*parts, role="user", **fields):
    return call_of({"input": [{"role": role, "content": list(parts)}], **fields}, name="n")


def shown(data, **fields):
    return {"type": "input_image", "image_url": data_url(data), **fields}


def test_a_response_keeps_the_digest_and_its_chat_has_the_bytes():
    call = response({"type": "input_text", "text": "What?"}, shown(RED, detail="auto"))
    assert call.items[0]["content"] == [
        {"type": "input_text", "text": "What?"},
        {"type": "input_image", "sha256": sha256(RED), "detail": "auto", "file_id": None,
         "image_url": None},
    ]  # fmt: skip
    message = OpenAIRequest("chat.completions", call.chat, "d" * 64).message("a")
    assert message.pictures == {sha256(RED): RED}
    assert message.request.body["messages"] == [
        {"role": "user", "content": [
            {"type": "text", "text": "What?"}, {"type": "image", "sha256": sha256(RED)},
        ]}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"type": "input_image"}, ".image_url"),
        ({"type": "input_image", "sha256": DIGEST}, ".image_url"),
        ({"type": "input_image", "image_url": {"url": data_url(RED)}}, ".image_url"),
        ({"type": "input_image", "image_url": "https://example.com/a.png"}, ".image_url"),
        (shown(png_header(50_000, 50_000)), ".image_url"),
        (shown(RED, detail="high"), ".detail"),
        (shown(RED, file_id="file-1"), ".file_id"),
        ({"type": "input_file", "file_data": ""}, ".type"),
        ({"type": "input_audio", "input_audio": {}}, ".type"),
    ],
)
def test_a_hostile_picture_of_a_response_is_refused_by_its_field(given, place):
    with pytest.raises(InvalidRequest) as refused:
        response({"type": "input_text", "text": "What?"}, given)
    assert refused.value.field == f"body.input.0.content.1{place}"


@pytest.mark.parametrize("role", ["assistant", "system"])
def test_only_the_user_of_a_response_has_pictures(role):
    with pytest.raises(InvalidRequest) as refused:
        response(shown(RED), role=role)
    assert refused.value.field == "body.input.0.content.0.type"


def test_a_request_with_the_most_pictures_is_valid():
    chat(*[part(data_url(RED))] * MAX_PICTURES).check()
