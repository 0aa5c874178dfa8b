"""Tool calls in OpenAI's responses: whole messages, and the deltas of a stream.

Pure functions of the text so far. The id of a call is a function of the answer's id and of the
call's index, so that it is the same in a stream that goes on elsewhere, and in the whole answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from quire.openai.tools.parser import Piece, ToolCallParser

#: The finish reason of an output that calls functions.
CALLED = "tool_calls"

#: Hexadecimal digits of the id of a call.
_ID_LENGTH = 24


class CallStream:
    """The deltas of one choice. `names` are those of the functions that it may call."""

    def __init__(self, answer_id: str, choice: int, names: Sequence[str]) -> None:
        self._answer_id = answer_id
        self._choice = choice
        self._parser = ToolCallParser(frozenset(names))

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._parser.num_calls > 0

    def delta(self, text: str) -> dict[str, Any]:
        """What this text adds to the message; empty if it is not known yet."""
        return self._delta_of(self._parser.feed(text))

    def last_delta(self, text: str) -> dict[str, Any]:
        """What the last text adds, with all that was held back."""
        return self._delta_of([*self._parser.feed(text), *self._parser.finish()])

    def _delta_of(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        content = "".join(one.text for one in pieces if one.kind == "content")
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
        delta: dict[str, Any] = {"content": content} if content else {}
        return delta | ({"tool_calls": list(calls.values())} if calls else {})


def message_of(answer_id: str, choice: int, names: Sequence[str], text: str) -> dict[str, Any]:
    """The message of a whole output."""
    delta = CallStream(answer_id, choice, names).last_delta(text)
    message = {"role": "assistant", "content": delta.get("content")}
    calls = delta.get("tool_calls")
    if calls is None:
        return message | {"content": message["content"] or ""}
    for call in calls:
        del call["index"]
    return message | {"tool_calls": calls}


def call_id(answer_id: str, choice: int, index: int) -> str:
    """The id of a call, in the form of OpenAI's ids."""
    named = f"{answer_id}/{choice}/{index}"
    return f"call_{hashlib.sha256(named.encode()).hexdigest()[:_ID_LENGTH]}"
