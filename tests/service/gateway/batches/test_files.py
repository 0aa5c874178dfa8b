"""`/v1/files` with OpenAI's own client, and what it refuses."""

import io
import json
import socket
import threading

import pytest
from openai import APIStatusError, BadRequestError, NotFoundError, OpenAI

from tests.service.builders import PATIENCE_SECONDS, eventually
from tests.service.gateway.builders import GatewayThread, openai_client
from tests.service.gateway.http.test_early_answers import read_all

LINES = b'{"custom_id": "a"}\n' * 3


def upload(openai: OpenAI, data: bytes = LINES, name: str = "in.jsonl", **others):
    return openai.files.create(file=(name, io.BytesIO(data)), purpose="batch", **others)


def contents(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("files/*/*"))


def test_a_file_is_uploaded_listed_read_and_deleted_by_the_unchanged_client(openai, tmp_path):
    made = upload(openai)
    assert (made.object, made.purpose, made.filename) == ("file", "batch", "in.jsonl")
    assert (made.bytes, made.status) == (len(LINES), "processed")
    assert made.expires_at - made.created_at == 2_592_000
    assert openai.files.retrieve(made.id) == made
    assert openai.files.content(made.id).read() == LINES
    assert openai.files.list().data == [made]
    assert openai.files.delete(made.id).deleted is True
    assert openai.files.list().data == []
    with pytest.raises(NotFoundError):
        openai.files.content(made.id)
    assert contents(tmp_path) == [], "the content is gone, and no upload is left"


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_list_comes_in_pages(openai, order):
    ids = [upload(openai, name=f"{n}.jsonl").id for n in range(5)]
    pages = list(openai.files.list(limit=2, order=order).iter_pages())
    assert [len(page.data) for page in pages] == [2, 2, 1]
    listed = [one.id for page in pages for one in page.data]
    # Several may have been made in the same millisecond.
    assert sorted(listed) == sorted(ids)
    assert [page.has_more for page in pages] == [True, True, False]
    assert openai.files.list(purpose="batch_output").data == []


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_an_iteration_goes_on_over_files_that_it_deletes(openai, order):
    ids = [upload(openai, name=f"{n}.jsonl").id for n in range(5)]
    deleted = [openai.files.delete(one.id).id for one in openai.files.list(limit=2, order=order)]
    assert sorted(deleted) == sorted(ids)
    assert openai.files.list().data == []


@pytest.mark.parametrize("path", ["files", "batches"])
@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("after=file-" + "0" * 32, "after"),
        ("after=%F0%9F%8E%89", "after"),
        ("limit=0", "limit"),
        ("limit=10001", "limit"),
        ("limit=1e1", "limit"),
        ("order=newest", "order"),
    ],
)
def test_a_wrong_parameter_of_a_list_is_named(gateway, path, query, param):
    reply = gateway.get(f"/v1/{path}?{query}")
    assert (reply.status, reply.error["param"]) == (400, param)


def test_a_file_expires_when_its_caller_says(openai):
    made = upload(openai, expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at - made.created_at == 3600


def test_an_expired_file_is_unknown_before_it_is_deleted(openai, fake):
    made = upload(openai)
    key = fake.broker.keys.file(made.id)
    fake.connection.hset(key, "expires_ms", 1)
    with pytest.raises(NotFoundError):
        openai.files.retrieve(made.id)
    assert openai.files.list().data == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "batch", "extra_body": {"color": "red"}}, "color"),
        (
            {"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 5}},
            "expires_after.seconds",
        ),
        (
            {"purpose": "batch", "expires_after": {"anchor": "x", "seconds": 3600}},
            "expires_after",
        ),
    ],
)
def test_a_wrong_field_is_named_and_nothing_is_stored(openai, tmp_path, fields, param):
    with pytest.raises(BadRequestError) as refused:
        openai.files.create(file=("x", io.BytesIO(LINES)), **fields)
    assert refused.value.param == param
    assert contents(tmp_path) == []


def test_a_body_that_is_no_form_is_refused(gateway: GatewayThread, tmp_path):
    plain = gateway.ask("POST", "/v1/files", {"purpose": "batch"})
    assert (plain.status, plain.error["code"]) == (400, "invalid_request")
    kind = "multipart/form-data; boundary=b"
    torn = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    missing = gateway.ask("POST", "/v1/files", torn, Content_Type=kind)
    assert (missing.status, missing.error["param"]) == (400, "file")
    broken = gateway.ask("POST", "/v1/files", b"no boundary at all", Content_Type=kind)
    assert broken.status == 400
    assert contents(tmp_path) == []


KIND = "multipart/form-data; boundary=b"
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n'
FORM = PURPOSE + HEAD + b"\r\n" + LINES + b"\r\n--b--\r\n"


def test_a_form_that_is_cut_off_is_refused_wherever_that_is(gateway, openai, tmp_path):
    last = FORM.rindex(b"--\r\n")
    for size in (*range(1, last, 7), *range(last - 8, last + 2)):
        cut = gateway.ask("POST", "/v1/files", FORM[:size], Content_Type=KIND)
        assert (cut.status, cut.error["code"]) == (400, "invalid_request"), FORM[:size]
    assert contents(tmp_path) == []
    assert openai.files.list().data == []
    # The line end after the last boundary may be missing.
    assert gateway.ask("POST", "/v1/files", FORM[: last + 2], Content_Type=KIND).status == 200


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_a_form_that_goes_on_after_its_end_is_refused(gateway, tmp_path, size):
    # The file has the boundary of its form in it, so it seems to end early.
    body = FORM + LINES + b"\r\n--b--\r\n"
    parts = (body[first : first + size] for first in range(0, len(body), size))
    refused = gateway.ask("POST", "/v1/files", parts, Content_Type=KIND)
    assert (refused.status, refused.error["code"]) == (400, "invalid_request")
    assert "after the last boundary" in refused.error["message"]
    assert contents(tmp_path) == []
    parts = (FORM[first : first + size] for first in range(0, len(FORM), size))
    assert gateway.ask("POST", "/v1/files", parts, Content_Type=KIND).body["bytes"] == len(LINES)


@pytest.mark.parametrize(
    "lengths",
    [
        [f"Content-Length: {len(FORM) + 1}"],
        [f"Content-Length: {len(FORM) - 20}"],
        ["Transfer-Encoding: chunked"],
    ],
)
def test_a_body_that_is_shorter_than_its_length_leaves_nothing(gateway, openai, tmp_path, lengths):
    lines = ["POST /v1/files HTTP/1.1", "Host: x", f"Content-Type: {KIND}", *lengths, "", ""]
    is_chunked = lengths[0].endswith("chunked")
    # The last chunk, of size 0, never comes.
    body = b"%x\r\n%b\r\n" % (len(FORM), FORM) if is_chunked else FORM
    with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_SECONDS) as caller:
        caller.sendall("\r\n".join(lines).encode() + body)
        caller.shutdown(socket.SHUT_WR)
        assert b" 200 " not in read_all(caller)
    eventually(lambda: contents(tmp_path) == [], "the part that came is deleted")
    assert openai.files.list().data == []


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Content-Transfer-Encoding: base64", 415),
        ("Content-Transfer-Encoding: quoted-printable", 415),
        ("content-encoding: gzip", 415),
        ("Content-Transfer-Encoding: binary", 200),
        ("Content-Encoding: identity", 200),
    ],
)
def test_a_part_whose_bytes_are_encoded_is_not_taken_as_they_are(gateway, tmp_path, header, status):
    head = HEAD + header.encode() + b"\r\n"
    reply = gateway.ask("POST", "/v1/files", FORM.replace(HEAD, head), Content_Type=KIND)
    assert reply.status == status
    if status == 415:
        assert (reply.error["code"], reply.error["param"]) == (
            "unsupported_encoding", header.partition(":")[0],
        )  # fmt: skip
        assert contents(tmp_path) == []


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_file_above_the_limit_is_refused_while_it_comes(start, tmp_path, is_announced):
    gateway = start(files_folder=tmp_path / "files", max_file_bytes=100_000)
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    body = [head, *[b"x" * 10_000] * (40 if is_announced else 12), b"\r\n--b--\r\n"]
    sent = b"".join(body) if is_announced else iter(body)
    reply = gateway.ask("POST", "/v1/files", sent, Content_Type="multipart/form-data; boundary=b")
    assert (reply.status, reply.error["code"]) == (413, "file_too_large")
    eventually(lambda: contents(tmp_path) == [], "the part that came is deleted")


def test_a_file_at_the_limit_is_taken(start, tmp_path):
    gateway = start(files_folder=tmp_path / "files", max_file_bytes=100_000)
    with openai_client(gateway.url) as openai:
        assert upload(openai, b"x" * 100_000).bytes == 100_000


def test_a_tenant_has_a_limit_of_files(start, tmp_path):
    gateway = start(files_folder=tmp_path / "files", max_files=2)
    with openai_client(gateway.url) as openai:
        first = upload(openai)
        upload(openai)
        with pytest.raises(APIStatusError) as refused:
            upload(openai)
        assert (refused.value.status_code, refused.value.code) == (429, "too_many_files")
        assert len(contents(tmp_path)) == 2
        openai.files.delete(first.id)
        upload(openai)


def test_a_tenant_sees_its_own_files_only(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-number-0000001 search\nsk-number-0000002 archive\n")
    gateway = start(files_folder=tmp_path / "files", keys_file=keys)
    first, second = (
        OpenAI(base_url=gateway.url, api_key=f"sk-number-000000{n}", max_retries=0) for n in (1, 2)
    )
    with first, second:
        made = upload(first)
        assert first.files.list().data == [made]
        assert second.files.list().data == []
        for call in (second.files.retrieve, second.files.content, second.files.delete):
            with pytest.raises(NotFoundError):
                call(made.id)
        assert first.files.content(made.id).read() == LINES
    assert gateway.get("/v1/files").status == 401


@pytest.mark.parametrize("name", ["file-1", "../files", "file-" + "0" * 32])
def test_a_name_that_no_file_has_is_unknown(gateway, name):
    reply = gateway.get(f"/v1/files/{name}/content".replace("..", "%2e%2e"))
    assert reply.status == 404


def test_a_gateway_without_a_folder_says_so(start):
    gateway = start()
    reply = gateway.ask("POST", "/v1/files", b"x")
    assert (reply.status, reply.error["code"]) == (404, "files_not_enabled")


def test_a_content_that_is_missing_is_an_outage_and_not_an_empty_file(openai, tmp_path):
    made = upload(openai)
    (tmp_path / "files" / "files" / made.id).unlink()
    with pytest.raises(APIStatusError) as refused:
        openai.files.content(made.id)
    assert (refused.value.status_code, refused.value.code) == (503, "storage_unavailable")


def test_a_caller_that_hangs_up_leaves_nothing_behind(gateway, tmp_path):
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    going_on = threading.Event()

    def body():
        yield head + b"x" * 1000
        eventually(lambda: contents(tmp_path), "the upload has begun")
        going_on.set()
        raise ConnectionAbortedError

    kind = "multipart/form-data; boundary=b"
    with pytest.raises(ConnectionAbortedError):
        gateway.send("POST", "/v1/files", body(), Content_Type=kind)
    assert going_on.is_set()
    eventually(lambda: contents(tmp_path) == [], "the part that came is deleted")


def test_a_caller_that_sends_nothing_more_is_not_waited_for(start, tmp_path):
    gateway = start(files_folder=tmp_path / "files", body_timeout_seconds=0.1)
    release = threading.Event()

    def body():
        yield b"--b\r\n"
        release.wait(20)
        yield b"--b--\r\n"

    replies = []

    def ask():
        kind = "multipart/form-data; boundary=b"
        replies.append(gateway.ask("POST", "/v1/files", body(), Content_Type=kind))

    asking = threading.Thread(target=ask)
    asking.start()
    responses = "quire_gateway_responses_total"
    eventually(
        lambda: gateway.metric(responses, route="files", status="408") == 1, "it was answered"
    )
    release.set()
    asking.join()
    assert json.loads(replies[0].text)["error"]["code"] == "body_timeout"
