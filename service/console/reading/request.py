"""One request: its record, what it asks, the beginning and the end of its log, and its life."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import InvalidRequest, ProtocolError, UnknownRequest
from quire.queue.request.status import RequestStatus
from quire.queue.roles import Observer
from quire.transport.procedure import Procedure, RoundTrip, command
from quire.wire.codec import reading
from quire.wire.json_values import plain
from quire.wire.output import Completion, TokenChunk
from quire.wire.protocol import GenerationRequest

#: The entries of a log that are read from each of its ends.
END_ENTRIES = 512

#: The largest body that is decoded, in bytes.
MAX_BODY_BYTES = 1 << 20

#: The most characters of a prompt, and of each end of an output.
MAX_TEXT = 32_768

#: The fields of a record beside those of its status.
_FIELDS = (
    *("epoch", "claimed_ms", "first_token_ms", "finished_ms", "resumed_from", "losses"),
    *("answer", "answer_limit", "due_ms"),
)

#: The parts of a body that are shown by themselves.
_CONTENT = ("prompt", "messages", "input", "pair")


@dataclass(frozen=True, slots=True)
class Stint:
    """What one claim has published: tokens `start` to `end`, exclusive, in `num_chunks` entries.

    The times are those of its first and last entry in the log, unix ms; None if it does not say.
    """

    epoch: int
    start: int
    end: int
    num_chunks: int
    began_ms: int | None
    ended_ms: int | None


@dataclass(frozen=True, slots=True)
class Log:
    """An output log, or its two ends. `is_whole`: no entry between the two was left out.

    `head` and `tail` are the texts of the ends; without a gap all text is in `head`.
    """

    stints: Sequence[Stint] = ()
    head: str = ""
    tail: str = ""
    num_entries: int = 0
    is_whole: bool = True
    seen: int = 0
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks. `trouble` says why the rest is missing, if it is."""

    kind: str = ""
    content: str = ""
    num_characters: int = 0
    parameters: Mapping[str, Any] = field(default_factory=dict)
    envelope: Mapping[str, Any] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Life:
    """Everything about one request. The times of the record are unix ms, None if not reached."""

    status: RequestStatus
    asked: Asked
    log: Log
    epoch: int
    claimed_ms: int | None
    first_token_ms: int | None
    finished_ms: int | None
    scheduled_ms: int | None
    expires_seconds: float | None
    max_tokens: int | None
    num_losses: int

    @property
    def is_open(self) -> bool:
        return not self.status.state.is_terminal


def life_of(broker: Observer, request_id: str) -> Life:
    """The life of a request. UnknownRequest, BrokerUnavailable, ProtocolError."""
    status = broker.status(request_id)
    return broker.run(_life(broker, status))


def _life(broker: Observer, status: RequestStatus) -> Procedure[Life]:
    keys, request_id = broker.keys, status.request_id
    record, body, output = keys.of_request(request_id)
    values, size, expires_ms, scheduled, length, head = yield RoundTrip(
        (
            command("hmget", record, _FIELDS),
            command("strlen", body),
            command("pttl", record),
            command("zscore", keys.delay, request_id),
            command("xlen", output),
            command("xrange", output, count=END_ENTRIES),
        )
    )
    tail: Sequence[Any] = ()
    if length > len(head):
        (newest,) = yield RoundTrip((command("xrevrange", output, count=END_ENTRIES),))
        tail = newest[::-1]
    data = b""
    if 0 < size <= MAX_BODY_BYTES:
        (data,) = yield RoundTrip((command("get", body),))
    fields = dict(zip(_FIELDS, values, strict=True))
    with reading(f"the record of {request_id}"):
        numbers = {name: int(value) if value else None for name, value in fields.items()}
    limit = numbers["answer_limit"]
    return Life(
        status=status,
        asked=_asked(data or b"", size=int(size), is_open=not status.state.is_terminal),
        log=log_of(request_id, head, tail, num_entries=int(length)),
        epoch=numbers["epoch"] or 0,
        claimed_ms=numbers["claimed_ms"],
        first_token_ms=numbers["first_token_ms"],
        finished_ms=numbers["finished_ms"],
        scheduled_ms=None if scheduled is None else int(scheduled),
        expires_seconds=expires_ms / 1000 if expires_ms > 0 else None,
        # A limit of 0 is none: then `answer` is an estimate.
        max_tokens=(numbers["answer"] if limit is None else limit) or None,
        num_losses=numbers["losses"] or 0,
    )


def log_of(request_id: str, head: Sequence[Any], tail: Sequence[Any], *, num_entries: int) -> Log:
    """The log of a request from the entries at its two ends, which may overlap."""
    last_of_head = head[-1][0] if head else b"0-0"
    rest = [entry for entry in tail if _order(entry[0]) > _order(last_of_head)]
    is_whole = len(head) + len(rest) >= num_entries
    chunks, completion = _taken_apart(request_id, head)
    later, end = _taken_apart(request_id, rest)
    completion = completion or end
    head_text = "".join(chunk.text for chunk in chunks)
    tail_text = "".join(chunk.text for chunk in later)
    tail_text += completion.tail if completion is not None else ""
    if is_whole:
        head_text, tail_text = head_text + tail_text, ""
    all_chunks = [*chunks, *later]
    return _cut(
        Log(
            stints=_stints(all_chunks),
            head=head_text,
            tail=tail_text,
            num_entries=num_entries,
            is_whole=is_whole,
            seen=all_chunks[-1].end if all_chunks else 0,
            completion=completion,
        )
    )


def _cut(log: Log) -> Log:
    """The same log with texts that are short enough for a page."""
    if len(log.head) + len(log.tail) <= 2 * MAX_TEXT:
        return log
    whole = log.head + log.tail
    return replace(log, head=log.head[:MAX_TEXT], tail=whole[-MAX_TEXT:], is_whole=False)


def _taken_apart(
    request_id: str, entries: Iterable[Any]
) -> tuple[list[TokenChunk], Completion | None]:
    """Chunks and end of these entries; one that is not ours is left out."""
    chunks: list[TokenChunk] = []
    completion = None
    for entry_id, fields in entries:
        try:
            if b"done" in fields:
                completion = Completion.from_entry(request_id, entry_id, fields=fields)
            elif b"ids" in fields:
                chunks.append(TokenChunk.from_entry(entry_id, fields))
        except ProtocolError:
            continue
    return chunks, completion


def _stints(chunks: Sequence[TokenChunk]) -> list[Stint]:
    """What each claim has published, in order."""
    found: list[Stint] = []
    for chunk in chunks:
        at_ms = None if chunk.published_at is None else round(chunk.published_at * 1000)
        last = found[-1] if found else None
        if last is None or last.epoch != chunk.epoch:
            found.append(Stint(chunk.epoch, chunk.start, chunk.end, 1, at_ms, at_ms))
        else:
            found[-1] = replace(
                last, end=chunk.end, num_chunks=last.num_chunks + 1, ended_ms=at_ms or last.ended_ms
            )
    return found


def _asked(data: bytes, *, size: int, is_open: bool) -> Asked:
    if size > MAX_BODY_BYTES:
        return Asked(trouble=f"The request has {size:,} bytes, too many for this page.")
    if not data:
        if is_open:
            return Asked(trouble="The prompt and the parameters are gone.")
        return Asked(trouble="The prompt and the parameters were deleted when the request ended.")
    try:
        request = GenerationRequest.decode(data)
    except (ProtocolError, InvalidRequest) as error:
        return Asked(trouble=f"The request cannot be read: {error}")
    return asked_of(request)


def asked_of(request: GenerationRequest) -> Asked:
    """What a request asks, cut to the size of a page."""
    body = request.body
    content = "\n\n".join(_content(body[name]) for name in _CONTENT if name in body)
    envelope = {
        name: plain(getattr(request, name))
        for name in ("metadata", "headers", "idempotency_key")
        if getattr(request, name)
    }
    return Asked(
        kind=str(request.kind),
        content=content[:MAX_TEXT],
        num_characters=len(content),
        parameters={name: plain(value) for name, value in body.items() if name not in _CONTENT},
        envelope=envelope,
    )


def _content(value: Any) -> str:
    """A prompt or messages as text; whatever it is, since nobody has checked it yet."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        return "\n\n".join(f"{one.get('role', '?')}:\n{_content(_said(one))}" for one in value)
    shown = plain(value)
    return shown if isinstance(shown, str) else repr(shown)


def _said(message: Mapping[str, Any]) -> Any:
    if message.get("type") == "image" and isinstance(message.get("sha256"), str):
        return f"[picture {message['sha256']}]"
    known = message.get("content")
    return known if known is not None else {k: v for k, v in message.items() if k != "role"}


def _order(entry_id: bytes) -> tuple[int, int]:
    first, _, second = entry_id.partition(b"-")
    return int(first), int(second)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a log has after the tokens that a page shows. `is_reset`: the log was rewritten."""

    text: str
    seen: int
    is_reset: bool = False
    has_ended: bool = False


def piece_after(broker: Observer, request_id: str, seen: int) -> Piece:
    """The text after `seen` tokens. UnknownRequest, BrokerUnavailable, ProtocolError."""
    read = broker.read_output({request_id: seen}).get(request_id)
    if read is None:
        status = broker.status(request_id)
        # Redis may have lost tokens that the page has shown.
        return Piece("", min(seen, status.published), is_reset=status.published < seen)
    text, end, has_ended = "", seen, False
    for item in read:
        if isinstance(item, Completion):
            text, has_ended = text + item.tail, True
        else:
            text, end = text + item.text, item.end
    return Piece(text, end, has_ended=has_ended)


__all__ = ["Asked", "Life", "Log", "Piece", "Stint", "UnknownRequest", "life_of", "piece_after"]
