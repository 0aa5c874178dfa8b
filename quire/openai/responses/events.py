"""The events of a response's stream, numbered, from the tokens of its log.

The events up to a token, and their numbers, are a function of what is kept of the response and of
the tokens up to there. They do not depend on how the tokens were cut into entries of the log. So
any gateway that reads the log again sends the same events under the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quire.openai.logprobs import of_chat
from quire.openai.responses.call import ID_PREFIX, Kept
from quire.openai.responses.resource import resource, status_at_end
from quire.openai.tools.answers import call_id
from quire.openai.tools.parser import Piece, PieceKind, ToolCallParser
from quire.openai.tools.reasoning import ReasoningUse
from quire.wire.logprobs import TokenLogprob
from quire.wire.output import Completion, TokenChunk

Event = dict[str, Any]

#: The kinds of items, and how the ids of each begin.
_PREFIXES: dict[PieceKind, str] = {"content": "msg", "reasoning": "rs", "call": "fc"}

#: The names in the events of a text: that of its part, and the beginning of their types.
_TEXTS = {
    "content": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
}


class OutputEvents:
    """Makes the events of one response. Feed it the log from its beginning, in order."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._name = kept.id.removeprefix(ID_PREFIX)
        reasoning = ReasoningUse(kept.reasoning).formats
        self._parser = ToolCallParser(frozenset(kept.tools), types=kept.types, reasoning=reasoning)
        self._number = 0
        self._has_begun = False
        self._num_reasoning_tokens = 0
        #: The output items; the last one is open if `_kind` is not None.
        self._output: list[dict[str, Any]] = []
        self._kind: PieceKind | None = None
        self._num_calls = 0
        #: The text of the open item, in pieces.
        self._texts: list[str] = []
        #: The log-probabilities of tokens whose text is in no event yet, and of the open text.
        self._waiting: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []

    def opening(self) -> Iterator[Event]:
        """The events before the response runs."""
        if self._kept.is_background:
            yield self._of_response("response.created", "queued")
            yield self._of_response("response.queued", "queued")
        else:
            yield self._of_response("response.created", "in_progress")
            yield from self._begin()

    def chunk(self, chunk: TokenChunk) -> Iterator[Event]:
        """The events of a chunk, token by token; of a log without the ends of texts, at once."""
        yield from self._begin()
        begin = 0
        ends = chunk.text_ends or (len(chunk.text),)
        for index, end in enumerate(ends):
            logprobs = chunk.logprobs[index : index + 1] if chunk.text_ends else chunk.logprobs
            yield from self._token(chunk.text[begin:end], logprobs)
            begin = end

    def ending(self, end: Completion) -> Iterator[Event]:
        """The last events, with the whole response in the last one of all."""
        yield from self._begin()
        status = status_at_end(end)
        for piece in [*self._parser.feed(end.tail), *self._parser.finish()]:
            yield from self._piece(piece)
        if status == "completed" and not self._output:
            yield from self._open(Piece("content", ""))
        yield from self._close("completed" if status == "completed" else "incomplete")
        # OpenAI has no event for a cancelled response; what there is of it is incomplete.
        last = "incomplete" if status == "cancelled" else status
        yield self._event(f"response.{last}", response=self.response(end))

    def response(self, end: Completion) -> dict[str, Any]:
        """The body of the response after its end."""
        return resource(
            self._kept,
            status_at_end(end),
            output=self._output,
            end=end,
            num_reasoning_tokens=self._num_reasoning_tokens,
        )

    def _begin(self) -> Iterator[Event]:
        if not self._has_begun:
            self._has_begun = True
            yield self._of_response("response.in_progress", "in_progress")

    def _token(self, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[Event]:
        if self._kept.has_logprobs and logprobs:
            self._waiting += of_chat(logprobs)["content"]
        pieces = self._parser.feed(text)
        for piece in pieces:
            yield from self._piece(piece)
        if self._kind == "reasoning":
            self._num_reasoning_tokens += 1

    def _piece(self, piece: Piece) -> Iterator[Event]:
        if piece.kind == "arguments":
            yield from self._arguments(piece.text)
            return
        if piece.kind == "call" or piece.kind != self._kind:
            yield from self._close("completed")
            yield from self._open(piece)
        if piece.kind != "call":
            yield from self._text(piece.text)

    def _open(self, piece: Piece) -> Iterator[Event]:
        self._kind = piece.kind
        own = f"{_PREFIXES[piece.kind]}_{self._name}o{len(self._output)}"
        item: dict[str, Any] = {"id": own, "status": "in_progress"}
        if piece.kind == "call":
            called = call_id(self._kept.id, 0, self._num_calls)
            self._num_calls += 1
            item |= {"type": "function_call", "call_id": called, "name": piece.text}
            item |= {"arguments": ""}
        elif piece.kind == "reasoning":
            item |= {"type": "reasoning", "summary": [], "content": []}
        else:
            item |= {"type": "message", "role": "assistant", "content": []}
        self._output.append(item)
        yield self._event("response.output_item.added", **self._place, item=dict(item))
        if piece.kind != "call":
            added = {**self._place_of_part, "part": self._part("", [])}
            yield self._event("response.content_part.added", **added)

    def _text(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        _, kind = _TEXTS[str(self._kind)]
        fields: dict[str, Any] = {**self._place_of_part, "delta": text}
        if self._kind == "content":
            fields["logprobs"] = self._waiting
            self._logprobs += self._waiting
        self._waiting = []
        yield self._event(f"{kind}.delta", **fields)

    def _arguments(self, text: str) -> Iterator[Event]:
        self._texts.append(text)
        self._waiting = []
        place = {**self._place, "item_id": self._output[-1]["id"]}
        yield self._event("response.function_call_arguments.delta", **place, delta=text)

    def _close(self, status: str) -> Iterator[Event]:
        """The events that end the open item, if there is one."""
        if self._kind is None:
            return
        item, text = self._output[-1], "".join(self._texts)
        if self._kind == "call":
            item["arguments"] = text
            fields = {**self._place, "item_id": item["id"], "arguments": text}
            kind = "response.function_call_arguments.done"
            yield self._event(kind, **fields, name=item["name"])
        else:
            part = self._part(text, self._logprobs)
            item["content"] = [part]
            _, kind = _TEXTS[self._kind]
            fields = {**self._place_of_part, "text": text}
            if self._kind == "content":
                fields["logprobs"] = self._logprobs
            yield self._event(f"{kind}.done", **fields)
            yield self._event("response.content_part.done", **self._place_of_part, part=part)
        item["status"] = status
        self._kind, self._texts, self._logprobs = None, [], []
        yield self._event("response.output_item.done", **self._place, item=dict(item))

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        kind, _ = _TEXTS[str(self._kind)]
        part: dict[str, Any] = {"type": kind, "text": text}
        return part | ({"annotations": [], "logprobs": logprobs} if kind == "output_text" else {})

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._output) - 1}

    @property
    def _place_of_part(self) -> dict[str, Any]:
        return {**self._place, "item_id": self._output[-1]["id"], "content_index": 0}

    def _of_response(self, kind: str, status: str) -> Event:
        return self._event(kind, response=resource(self._kept, status))

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event
