"""Reasoning and tool calls in OpenAI's responses: whole messages, and the deltas of a stream.

Pure functions of the text so far. The id of a call is a function of the answer's id and of the
call's index, so that it is the same in a stream that goes on elsewhere, and in the whole answer.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from quire.openai.tools.argument_types import ArgumentTypes
from quire.openai.tools.parser import Piece, ToolCallParser
from quire.openai.tools.reasoning import DEFAULT_REASONING, ReasoningUse

#: The finish reason of an output that calls functions.
CALLED = "tool_calls"

#: Hexadecimal digits of the id of a call.
_ID_LENGTH = 24
_NO_TYPES: ArgumentTypes = MappingProxyType({})


class MessageStream:
    """The deltas of one choice of a chat.

    `names` are those of the functions that it may call, `types` those of their arguments (see
    argument_types.py), and `reasoning` says which marks of reasoning it may have.
    """

    def __init__(
        self,
        answer_id: str,
        choice: int,
        names: Sequence[str] = (),
        *,
        types: ArgumentTypes = _NO_TYPES,
        reasoning: ReasoningUse = DEFAULT_REASONING,
    ) -> None:
        self._answer_id = answer_id
        self._choice = choice
        self._shows_reasoning = reasoning.is_shown
        self._parser = ToolCallParser(frozenset(names), types=types, reasoning=reasoning.formats)
        self._num_chars = 0
        self._num_tokens = 0
        #: For each bound of reasoning, how many tokens the text before it takes.
        self._token_bounds: list[int] = []
        self._is_counted = True

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._parser.num_calls > 0

    @property
    def is_plain(self) -> bool:
        """Whether all text that follows is content."""
        return self._parser.is_plain

    @property
    def num_reasoning_tokens(self) -> int | None:
        """How many tokens the reasoning takes, with its marks; None if it is not known.

        A token counts if a part of its text is reasoning. The log must have the ends of the texts.
        """
        if not self._is_counted:
            return None
        bounds = [*self._token_bounds]
        if len(bounds) % 2:
            bounds.append(self._num_tokens)
        return sum(bounds[1::2]) - sum(bounds[::2])

    def delta(self, text: str, ends: Sequence[int] = ()) -> dict[str, Any]:
        """What this text adds to the message; empty if it is not known yet.

        `ends` has for each token the length of the text after it, as in a TokenChunk.
        """
        delta = self._delta_of(self._parser.feed(text))
        self._count(text, ends)
        self._is_counted = self._is_counted and (bool(ends) or not text)
        return delta

    def last_delta(self, text: str) -> dict[str, Any]:
        """What the last text adds, with all that was held back. It has no token of its own."""
        delta = self._delta_of([*self._parser.feed(text), *self._parser.finish()])
        self._count(text, ())
        return delta

    def whole(self, text: str, ends: Sequence[int] = ()) -> dict[str, Any]:
        """The message of a whole output; the stream has been fed nothing."""
        delta = self._delta_of([*self._parser.feed(text), *self._parser.finish()])
        self._count(text, ends)
        self._is_counted = bool(ends)
        calls = delta.get("tool_calls")
        message = {"role": "assistant", "content": delta.get("content", None if calls else "")}
        if "reasoning_content" in delta:
            message["reasoning_content"] = delta["reasoning_content"]
        for call in calls or ():
            del call["index"]
        return message | ({"tool_calls": calls} if calls else {})

    def _count(self, text: str, ends: Sequence[int]) -> None:
        """Convert new bounds from characters to tokens. They are in this text or at its ends."""
        for bound in self._parser.reasoning_bounds[len(self._token_bounds) :]:
            within = bound - self._num_chars
            num_new = min(bisect_left(ends, within) + 1, len(ends)) if within > 0 else 0
            self._token_bounds.append(self._num_tokens + num_new)
        self._num_chars += len(text)
        self._num_tokens += len(ends)

    def _delta_of(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        texts = {"reasoning": "", "content": ""}
        calls: dict[int, dict[str, Any]] = {}
        for one in pieces:
            if one.kind == "call":
                calls[one.index] = {
                    "index": one.index,
                    "id": call_id(self._answer_id, self._choice, one.index),
                    "type": "function",
                    "function": {"name": one.text, "arguments": ""},
                }
            elif one.kind == "arguments":
                call = calls.setdefault(
                    one.index, {"index": one.index, "function": {"arguments": ""}}
                )
                call["function"]["arguments"] += one.text
            else:
                texts[one.kind] += one.text
        delta: dict[str, Any] = {}
        if texts["reasoning"] and self._shows_reasoning:
            delta["reasoning_content"] = texts["reasoning"]
        if texts["content"]:
            delta["content"] = texts["content"]
        return delta | ({"tool_calls": list(calls.values())} if calls else {})


def message_of(
    answer_id: str,
    choice: int,
    names: Sequence[str],
    text: str,
    *,
    types: ArgumentTypes = _NO_TYPES,
    reasoning: ReasoningUse = DEFAULT_REASONING,
) -> dict[str, Any]:
    """The message of a whole output."""
    return MessageStream(answer_id, choice, names, types=types, reasoning=reasoning).whole(text)


def call_id(answer_id: str, choice: int, index: int) -> str:
    """The id of a call, in the form of OpenAI's ids."""
    named = f"{answer_id}/{choice}/{index}"
    return f"call_{hashlib.sha256(named.encode()).hexdigest()[:_ID_LENGTH]}"
