"""The tokens of a worker in memory: every character is one, with a log-probability of 0."""

from __future__ import annotations

import sys

from quire.testing.choices import choice_of
from quire.wire.logprobs import (
    PromptToken,
    TokenLogprob,
    ToldPrompt,
    TopLogprob,
    check_prompt_logprobs,
)
from quire.wire.protocol import GenerationRequest


def logprobs_of(request: GenerationRequest, text: str) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of a part of the output, as of the only tokens; none if not asked."""
    number = request.parse_body().sampling.logprobs if text else None
    if number is None:
        return ()
    return tuple(TokenLogprob(ord(one), 0.0, one, _best(ord(one), one, number)) for one in text)


def told_prompt_of(request: GenerationRequest) -> ToldPrompt:
    """What the log tells of the prompt; nothing if not requested.

    InvalidRequest if it is too long.
    """
    body = request.parse_body()
    number = body.sampling.prompt_logprobs
    if number is None:
        ids = tuple(one for one, _ in _prompt_of(request))
        return ids if body.told_prompt == "ids" else len(ids) if body.told_prompt else ()
    check_prompt_logprobs(prompt_length(request), number)
    (first, text), *others = _prompt_of(request)
    known = (PromptToken(one, 0.0, text, _best(one, text, number)) for one, text in others)
    return (PromptToken(first, None, text), *known)


def prompt_length(request: GenerationRequest) -> int:
    """The number of tokens of the prompt, with those of a choice; of a chat, of its messages."""
    return len(_prompt_of(request)) + len(choice_of(request))


def _prompt_of(request: GenerationRequest) -> list[tuple[int, str]]:
    """The tokens of the prompt and their texts. An id that is no character has the text U+FFFD."""
    parsed = request.parse_body()
    if isinstance(parsed.prompt, list):
        return [(one, _text_of(one)) for one in parsed.prompt]
    text = parsed.prompt or ""
    if parsed.messages is not None:
        text = "".join(str(message.get("content") or "") for message in parsed.messages)
    return [(ord(one), one) for one in text]


def _text_of(token_id: int) -> str:
    is_character = token_id <= sys.maxunicode and not 0xD800 <= token_id < 0xE000
    return chr(token_id) if is_character else "\N{REPLACEMENT CHARACTER}"


def _best(token_id: int, text: str, number: int) -> tuple[TopLogprob, ...]:
    return (TopLogprob(token_id, 0.0, text),)[:number]
