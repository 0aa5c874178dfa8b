"""What an answer has of its prompts: log-probabilities of their tokens, and their text (`echo`).

A request in the queue knows no `echo`: it asks for `prompt_logprobs`, which its log then has, and
whoever writes the answer puts the prompt in front of the output. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequest
from quire.openai.logprobs import texts_of
from quire.wire.logprobs import PromptToken
from quire.wire.protocol import Kind

#: The fields of a call that only its answer needs: a request in the queue does not have them.
ANSWERED: Mapping[str, frozenset[str]] = {
    "completions": frozenset({"echo"}),
    "chat.completions": frozenset({"metadata", "store"}),
}

_LENGTHS = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True, slots=True)
class PromptUse:
    """What an answer has of its prompts.

    If it `has_logprobs`, `prompt_logprobs` was asked for. If a prompt `is_echoed`, the text of each
    of its choices begins with it. It is a text that `is_kept` with the call, or that of its tokens
    in the log. If it `is_alone`, the answer does not show the output.
    """

    has_logprobs: bool = False
    is_echoed: bool = False
    is_kept: bool = False
    is_alone: bool = False

    def text(self, kept: str, tokens: Sequence[PromptToken]) -> str:
        """What stands before an output: the kept text, that of the tokens, or without echo none."""
        if not self.is_echoed:
            return ""
        return kept if self.is_kept else "".join(texts_of(tokens))

    def field(self, name: str | None) -> str | None:
        """The field that the caller wrote, for one of the request that an error names."""
        is_own = name == "body.prompt_logprobs" and self.is_echoed and not self.has_logprobs
        return "body.echo" if is_own else name


NO_PROMPT = PromptUse()


def prompt_use_of(kind: Kind, body: Mapping[str, Any]) -> PromptUse:
    """What the answer to a body has. InvalidRequest for an `echo` that is no boolean."""
    if kind not in ("completions", "chat.completions"):
        return NO_PROMPT
    has_logprobs, echo = body.get("prompt_logprobs") is not None, body.get("echo")
    if kind == "chat.completions" or echo is None or echo is False:
        # A chat has no such field: the check of its body refuses it.
        return PromptUse(has_logprobs)
    if echo is not True:
        raise InvalidRequest("body.echo", "must be true or false")
    prompt = body.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    return PromptUse(
        has_logprobs,
        is_echoed=True,
        # Of a shortened prompt only the worker knows what is left.
        is_kept=isinstance(first, str) and body.get("truncate_prompt_tokens") is None,
        is_alone=any(_is_zero(body.get(name)) for name in _LENGTHS),
    )


def without_echo(kind: Kind, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the request for a prompt of this body, which asks for all that `echo` needs.

    No request has an output of 0 tokens, so one token is generated in its place.
    """
    use, fields = prompt_use_of(kind, body), dict(body)
    if not use.is_echoed:
        return fields
    del fields["echo"]
    fields |= {name: 1 for name in _LENGTHS if _is_zero(fields.get(name))}
    number = fields.get("logprobs")
    if number is None and not use.is_kept:
        # Only the worker knows the text of the tokens.
        number = 0
    if fields.get("prompt_logprobs") is None and number is not None:
        fields["prompt_logprobs"] = number
    return fields


def prompt_fields(use: PromptUse) -> dict[str, Any]:
    """The fields of a call's record about its prompts; none if the answer has nothing of them."""
    names = [name for name in PromptUse.__slots__ if getattr(use, name)]
    return {"prompt": names} if names else {}


def prompt_use_from(fields: Mapping[str, Any]) -> PromptUse:
    """Reads these fields back."""
    names = fields.get("prompt")
    if not isinstance(names, list):
        return NO_PROMPT
    return PromptUse(**{name: name in names for name in PromptUse.__slots__})


def _is_zero(value: object) -> bool:
    return type(value) is int and value == 0
