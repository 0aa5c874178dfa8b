"""Everything that reads bytes from Redis or from a file, as functions of bytes alone.

A target feeds the bytes to one reader. It returns when the reader gave a value or one of the errors
it promises; anything else that is raised is a finding. Where a reader gave a value, what can be
said of every such value is asserted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgpack

from quire.batch.lines import BadLine, BatchLine, parse_line
from quire.batch.runs import RunRecord
from quire.errors import InvalidRequest, ProtocolError
from quire.queue.claim.claim import Claimed, claim_answer
from quire.queue.publish.output_log import OutputRead
from quire.queue.repair.dead_letters import dead_letter_of
from quire.queue.request.status import status_of
from quire.queue.workers.workers import worker_of
from quire.wire.codec import MAX_MESSAGE_BYTES, MAX_TOKEN_ID, pack, pack_ids, unpack, unpack_ids
from quire.wire.logprobs import PromptToken, TokenLogprob, TopLogprob, pack_tokens
from quire.wire.output import Completion, FinishReason, State, TokenChunk, Usage
from quire.wire.picture_headers import read_header
from quire.wire.pictures import MAX_PIXELS, PictureSet, part_of
from quire.wire.protocol import GenerationRequest
from tests.fuzz import files
from tests.quire.picture_files import gif_header, jpeg_header, png, webp_header

Target = Callable[[bytes], None]


def wire_message(data: bytes) -> None:
    """One msgpack message: plain values that can be sent again, or ProtocolError."""
    with contextlib.suppress(ProtocolError):
        value = unpack(data)
        # Floats are shorter on some wires than on ours, so there may be too much of it for us.
        with contextlib.suppress(InvalidRequest):
            pack(value, max_bytes=4 * MAX_MESSAGE_BYTES)


def token_ids(data: bytes) -> None:
    """An array of token ids."""
    with contextlib.suppress(ProtocolError):
        assert all(0 <= id_ <= MAX_TOKEN_ID for id_ in unpack_ids(data))


def request(data: bytes) -> None:
    """The body key, as intake reads it: envelope first, body second; what was read can be sent."""
    with contextlib.suppress(ProtocolError, InvalidRequest):
        decoded = GenerationRequest.decode(data)
        decoded.parse_body()
        sent = decoded.encode()
        assert GenerationRequest.decode(sent).encode() == sent


def completion(data: bytes) -> None:
    """The field `done`."""
    with contextlib.suppress(ProtocolError):
        decoded = Completion.decode(data, request_id="r")
        assert decoded.state.is_terminal
        decoded.encode()


def log_entry(data: bytes) -> None:
    """An output log of one entry, its id and fields taken from the bytes."""
    entry_id, fields = _entry(data)
    with contextlib.suppress(ProtocolError):
        read = OutputRead("r", [(entry_id, fields)], seen=0)
        for chunk in read.chunks:
            _check_cuts(chunk)


def claim_reply(data: bytes) -> None:
    """What CLAIM hands over, its log and its body taken from the bytes."""
    entry_id, fields = _entry(data)
    flat = [part for pair in fields.items() for part in pair]
    reply = [b"claimed", b"1", data, 1, b"0", b"", 0, [[entry_id, flat]], 0]
    # Arrival, moment, deadline, end of the target latency, limit of the answer.
    reply += [b"1", b"1", b"0", b"0", b""]
    with contextlib.suppress(ProtocolError):
        assert isinstance(claim_answer("r", "owner", reply), Claimed)


def record(data: bytes) -> None:
    """The record of a request."""
    _, fields = _entry(data)
    with contextlib.suppress(ProtocolError):
        status_of("r", fields)


def dead_letter(data: bytes) -> None:
    """An entry of the dead stream."""
    entry_id, fields = _entry(data)
    with contextlib.suppress(ProtocolError):
        dead_letter_of(entry_id, fields)


def worker_line(data: bytes) -> None:
    """A field of the registry of workers."""
    with contextlib.suppress(ProtocolError):
        worker_of(b"worker", data, now_ms=0)


def batch_run(data: bytes) -> None:
    """What a run of a batch file has told of itself."""
    with contextlib.suppress(ProtocolError):
        RunRecord.of(b"run", data)


def batch_line(data: bytes) -> None:
    """A line of a batch file: a line that can be submitted, or one that says why not."""
    line = parse_line(data.decode(errors="replace"), number=1, batch="b")
    assert isinstance(line, BatchLine | BadLine)
    if isinstance(line, BatchLine):
        line.message()


def picture(data: bytes) -> None:
    """The bytes of a picture at the door: its digest, within the limits, or InvalidRequest."""
    pictures = PictureSet()
    with contextlib.suppress(InvalidRequest):
        part = pictures.add(data, "field")
        assert pictures.by_digest == {part["sha256"]: data}
        header = read_header(data)
        assert 0 < header.width * header.height <= MAX_PIXELS


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        *(wire_message, token_ids, request, completion, log_entry, claim_reply, record),
        *(dead_letter, worker_line, batch_line, batch_run, picture, *files.TARGETS.values()),
    )
}

_DONE = Completion("r", State.COMPLETED, FinishReason.STOP, usage=Usage(3, 2), tail="x")

_REQUEST = GenerationRequest(
    id="g~r", kind="completions", body={"prompt": "12+34=", "seed": 1}, metadata={"row": [1, None]}
)

_PICTURED = GenerationRequest(
    id="p",
    kind="chat.completions",
    body={"messages": [{"role": "user", "content": [part_of("0" * 64)]}]},
)

_FIELDS = [
    {b"from": b"0", b"ids": pack_ids([1, 2]), b"text": b"ab", b"ends": pack_ids([1, 2])},
    {b"from": b"0", b"ids": pack_ids([7]), b"text": "\u00e9".encode(), b"prefix": b"1.2"},
    {b"from": b"0", b"text": b"ab", b"ids": pack_tokens(
        [TokenLogprob(1, -0.5, "a", (TopLogprob(1, -0.5, "a"),)), TokenLogprob(2, -1.5, "b")]
    )},
    {b"from": b"0", b"text": b"ab", b"ids": pack_tokens(
        [1, 2], [PromptToken(8, None, "x"), PromptToken(9, -2.5, "y", (TopLogprob(9, -2.5, "y"),))]
    )},
    {b"from": b"0", b"text": b"a", b"ids": pack_tokens(
        [TokenLogprob(1, -0.5, "\ufffd", (), b"\xe2"), TokenLogprob(2, -0.5, "b")], (5, 6, 7)
    )},
    {b"from": b"0", b"text": b"a", b"ids": pack_tokens([1, 2], 3)},
    {b"done": _DONE.encode(), b"attempts": b"1", b"resumes": b"0", b"submitted_ms": b"5",
     b"finished_ms": b"9", b"metadata": pack({"a": 1}), b"prefix": b"3.4"},
    {b"state": b"running", b"priority": b"1", b"published": b"2", b"attempts": b"1",
     b"resumes": b"0", b"deadline_ms": b"0", b"submitted_ms": b"5", b"cancel": b"1"},
    {b"id": b"r", b"reason": b"tired", b"attempts": b"1", b"bytes": b"x"},
]  # fmt: skip


def _packed(entry_id: bytes, fields: dict[bytes, bytes]) -> bytes:
    data: bytes = msgpack.packb([entry_id, fields])
    return data


#: Good bytes to begin with.
SEEDS: dict[str, list[bytes]] = {
    **files.SEEDS,
    "wire_message": [pack({"a": [1, 2.5, "x", None, True], "b": {"c": b"d"}})],
    "token_ids": [pack_ids([0, 1, 65536, MAX_TOKEN_ID])],
    "request": [_REQUEST.encode(), _PICTURED.encode()],
    "completion": [_DONE.encode()],
    "worker_line": [b"1700000000000 ready " + pack({"claims": 1.0})],
    "batch_run": [
        pack(
            dict.fromkeys(("name", "host", "tenant", "model", "ending"), "x")
            | dict.fromkeys(
                ("total", "completed", "failed", "inflight", "tokens", "began_ms", "told_ms"), 1
            )
        )
    ],
    "picture": [
        *(png(), gif_header(9, 9), jpeg_header(9, 9)),
        *(webp_header(kind, 9, 9) for kind in (b"VP8 ", b"VP8L", b"VP8X")),
    ],
    "batch_line": [
        b"""{"custom_id": "a", "method": "POST", "url": "/v1/completions",
        "body": {"prompt": "x", "max_tokens": 3}}"""
    ],
    **{
        name: [_packed(b"1-1", fields) for fields in _FIELDS]
        for name in ("log_entry", "claim_reply", "record", "dead_letter")
    },
}


def _entry(data: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """An entry id and fields out of any bytes: a msgpack pair if it is one, else cut by lines."""
    try:
        entry_id, fields = msgpack.unpackb(data, raw=True, strict_map_key=False)
        if isinstance(entry_id, bytes) and isinstance(fields, dict):
            return entry_id, {
                key: value
                for key, value in fields.items()
                if isinstance(key, bytes) and isinstance(value, bytes)
            }
    except Exception:  # noqa: BLE001 - the codec raises a dozen types; then they are lines.
        pass
    entry_id, *parts = data.split(b"\n")
    return entry_id, dict(zip(parts[::2], parts[1::2], strict=False))


def _check_cuts(chunk: TokenChunk) -> None:
    """A chunk can be cut at every token, and the parts are the whole."""
    for seen in range(chunk.start + 1, chunk.end):
        rest = chunk.after(seen)
        assert rest is not None
        assert rest.token_ids == chunk.token_ids[seen - chunk.start :]
        assert rest.logprobs == chunk.logprobs[seen - chunk.start :]
        assert not rest.told_prompt
        assert chunk.text.endswith(rest.text)
