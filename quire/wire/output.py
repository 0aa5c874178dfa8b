"""The output of a request: chunks of tokens, and one terminal record.

On the wire both are entries of the request's output log (see keys.py). An entry does not repeat
what its key, its id and earlier entries contain: the request id is in the key, the index of the
last token and the epoch are in the entry id, text and tokens of a completion are in its chunks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.errors import ProtocolError
from quire.records import (
    Activity,
    ErrorInfo,
    Execution,
    FinishReason,
    PromptToken,
    State,
    TerminalRecord,
    Timing,
    TokenLogprob,
    Usage,
)
from quire.wire.codec import pack, unpack_ids, unpack_map
from quire.wire.logprobs import ToldPrompt, unpack_tokens
from quire.wire.pooling import checked_vector, numbers_of

__all__ = [
    "Activity",
    "Completion",
    "ErrorInfo",
    "Execution",
    "FinishReason",
    "State",
    "Timing",
    "TokenChunk",
    "Usage",
    "is_prefix_hash",
    "split_entry_id",
]


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """One published piece of an output: tokens `start` to `end`, exclusive, and their text.

    `text_ends` holds for each token the length of `text` after that token, in code points, so that
    a reader can cut the text between two tokens; empty if the writer did not send it.
    `prefix_hash` is the hash of all tokens of the log before `end` (see history.py), empty in logs
    without hashes. `logprobs` has one record per token if the request has `logprobs`, else none.
    `told_prompt` is what the log tells of the prompt if the request asks for it: in the chunk with
    the first token of the output, for a reader that has no token yet.
    `published_at` is when the chunk was written to the log, in seconds since the Unix epoch on the
    clock of Redis, to a millisecond; None in logs of versions that did not record it.
    """

    start: int
    token_ids: tuple[int, ...]
    text: str
    epoch: int
    text_ends: tuple[int, ...] = ()
    prefix_hash: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    published_at: float | None = None
    told_prompt: ToldPrompt = ()

    @property
    def prompt_tokens(self) -> tuple[PromptToken, ...]:
        """One record per token of the prompt if the request has `prompt_logprobs`, else none."""
        told = self.told_prompt
        return (
            () if isinstance(told, int) else tuple(one for one in told if not isinstance(one, int))
        )

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The ids of the prompt if the log tells them, else none."""
        told = () if isinstance(self.told_prompt, int) else self.told_prompt
        return tuple(one if isinstance(one, int) else one.token_id for one in told)

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens the prompt has if the log tells it, else 0."""
        return self.told_prompt if isinstance(self.told_prompt, int) else len(self.told_prompt)

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def after(self, seen: int) -> TokenChunk | None:
        """The part of this chunk that is new to a reader with `seen` tokens; None if nothing is.

        Without `text_ends` the text cannot be cut between two tokens. Then it is kept whole: to see
        a few characters twice is better than to miss them.
        """
        skipped = seen - self.start
        if skipped <= 0:
            return self
        if skipped >= len(self.token_ids):
            return None
        cut = self.text_ends[skipped - 1] if self.text_ends else 0
        return replace(
            self,
            start=seen,
            token_ids=self.token_ids[skipped:],
            text=self.text[cut:],
            text_ends=tuple(end - cut for end in self.text_ends[skipped:]),
            logprobs=self.logprobs[skipped:],
            told_prompt=(),
        )

    @classmethod
    def from_entry(cls, entry_id: bytes, fields: Mapping[bytes, bytes]) -> TokenChunk:
        """Reads a log entry. ProtocolError when it is not one of ours."""
        last, epoch = split_entry_id(entry_id)
        ids, logprobs, prompt = unpack_tokens(fields.get(b"ids", b""))
        try:
            start, text = int(fields[b"from"]), fields[b"text"].decode()
            published_at = int(fields[b"at_ms"]) / 1000 if b"at_ms" in fields else None
        except (KeyError, ValueError) as error:
            raise ProtocolError(f"log entry {entry_id!r} is damaged: {error!r}") from error
        ends = unpack_ids(fields[b"ends"]) if b"ends" in fields else ()
        is_placed = start + len(ids) == last + 1 and (start == 0 or not prompt)
        if not is_placed or not ids or (ends and len(ends) != len(ids)):
            raise ProtocolError(f"log entry {entry_id!r} contradicts its own index")
        prefix = _prefix_hash(fields)
        return cls(start, ids, text, epoch, ends, prefix, logprobs, published_at, prompt)


#: How much of its text the short form of a completion shows, in characters.
MAX_SHOWN_TEXT = 60


@dataclass(frozen=True, slots=True, repr=False)
class Completion(TerminalRecord):
    """The one terminal record of a request, and its encoding; its fields are in TerminalRecord.

    The author, usually a worker, writes what only the author knows. The reader fills in `attempts`,
    `resumes`, `timing`, `metadata` and `usage.completion_tokens` from the broker's stamps in the
    terminal entry: the broker saw all attempts, the last worker only its own. `Client.result` joins
    `text`, `token_ids`, `text_ends`, `logprobs` and what the log has of the prompt; elsewhere they
    are empty, and so is what the request does not ask for.
    """

    @property
    def embedding(self) -> list[float]:
        """The numbers of `vector`, in single precision; empty for a request with an output."""
        return numbers_of(self.vector)

    def __repr__(self) -> str:
        what = repr(shortened(self.text)) if self.error is None else self.error.code
        tokens = self.usage.completion_tokens
        return f"Completion({self.request_id!r}, {self.state}, {what}, {tokens} tokens)"

    def to_dict(self) -> dict[str, Any]:
        """All fields, in the types of JSON; `embedding` in place of `vector`.

        NaN and Infinity become null.
        """
        from quire.wire.json_values import plain

        fields: dict[str, Any] = plain(self)
        del fields["vector"]
        return fields | {"embedding": plain(self.embedding)}

    def to_json(self) -> str:
        """The fields of `to_dict` as one line of JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    def encode(self) -> bytes:
        """The bytes of the field `done`: what only the author knows."""
        fields: dict[str, Any] = {
            "state": str(self.state),
            "finish_reason": str(self.finish_reason),
            "usage": asdict(self.usage),
            "error": asdict(self.error) if self.error else None,
            "preemptions": self.preemptions,
            "model": self.model,
            "resumed_fingerprint_changed": self.resumed_fingerprint_changed,
        }
        if self.tail:
            fields["tail"] = self.tail
        if self.vector:
            fields["vector"] = checked_vector(self.vector)
        if self.label:
            fields["label"] = self.label
        if self.fingerprint:
            fields["fingerprint"] = self.fingerprint
        if self.execution is not None:
            fields["execution"] = asdict(self.execution)
        return pack(fields, field="completion")

    @classmethod
    def decode(cls, data: bytes, *, request_id: str) -> Completion:
        """Reads a completion from the bytes of the field `done`, and ignores unknown fields.

        ProtocolError when the bytes are not a completion.
        """
        fields = unpack_map(data)
        try:
            error, execution = fields.get("error"), fields.get("execution")
            return cls(
                request_id=request_id,
                state=State(fields["state"]),
                finish_reason=FinishReason(fields["finish_reason"]),
                usage=Usage(**_known(fields.get("usage") or {}, Usage)),
                error=ErrorInfo(**_known(error, ErrorInfo)) if error else None,
                preemptions=int(fields.get("preemptions", 0)),
                model=fields.get("model"),
                resumed_fingerprint_changed=bool(fields.get("resumed_fingerprint_changed", False)),
                tail=str(fields.get("tail", "")),
                vector=checked_vector(fields.get("vector", b"")),
                label=str(fields.get("label", "")),
                fingerprint=str(fields.get("fingerprint", "")),
                execution=Execution(**_known(execution, Execution)) if execution else None,
            )
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"not a completion: {error!r}") from error

    @classmethod
    def from_entry(
        cls, request_id: str, entry_id: bytes, *, fields: Mapping[bytes, bytes]
    ) -> Completion:
        """Reads the terminal entry and fills in the broker's stamps."""
        published, _ = split_entry_id(entry_id)
        completion = cls.decode(fields.get(b"done", b""), request_id=request_id)
        try:
            return replace(
                completion,
                usage=replace(completion.usage, completion_tokens=published),
                timing=_timing(fields),
                attempts=int(fields.get(b"attempts", 0)),
                resumes=int(fields.get(b"resumes", 0)),
                metadata=unpack_map(fields[b"metadata"]) if fields.get(b"metadata") else {},
                prefix_hash=_prefix_hash(fields),
            )
        except ValueError as error:
            raise ProtocolError(f"terminal entry {entry_id!r} is damaged: {error!r}") from error


def shortened(text: str) -> str:
    """The beginning of a text, for what people look at."""
    return text if len(text) <= MAX_SHOWN_TEXT else f"{text[: MAX_SHOWN_TEXT - 1]}…"


def split_entry_id(entry_id: bytes) -> tuple[int, int]:
    """Index and epoch from the id of an output log entry. ProtocolError for any other text."""
    index, _, epoch = entry_id.partition(b"-")
    try:
        return int(index), int(epoch)
    except ValueError as error:
        raise ProtocolError(f"{entry_id!r} is not the id of a log entry") from error


def is_prefix_hash(text: str) -> bool:
    """Whether this has the form of a prefix hash; see history.py."""
    return re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,9}", text) is not None


def _prefix_hash(fields: Mapping[bytes, bytes]) -> str:
    value = fields.get(b"prefix", b"").decode(errors="replace")
    if value and not is_prefix_hash(value):
        raise ProtocolError("a log entry has an invalid prefix hash")
    return value


def _known(
    fields: Mapping[str, Any], record: type[Usage | ErrorInfo | Execution]
) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in record.__slots__}


def _timing(fields: Mapping[bytes, bytes]) -> Timing:
    submitted = fields.get(b"submitted_ms")

    def since(stamp: bytes) -> float | None:
        if not submitted or not fields.get(stamp):
            return None
        return (int(fields[stamp]) - int(submitted)) / 1000

    return Timing(
        queue_seconds=since(b"claimed_ms"),
        first_token_seconds=since(b"first_token_ms"),
        total_seconds=since(b"finished_ms"),
    )
