"""Whole answers of many megabytes: the same as ever, in nobody's way, and only up to a limit."""

import asyncio
import json

import pytest

from quire.openai.answers import Heading, response, written_response
from quire.openai.prompts import PromptUse
from quire.wire.logprobs import PromptToken, TokenLogprob, TopLogprob
from quire.wire.output import Completion, FinishReason, State
from service.gateway import answers, idempotency
from service.gateway.answers import encode_parts
from tests.service.gateway.front import CHAT

TEXTS = ["a", "\N{GRINNING FACE}", "\n", '"', "\N{REPLACEMENT CHARACTER}"]


def completion(name, num_tokens):
    """One whose texts need to be escaped here and there."""
    logprobs = []
    for number in range(num_tokens):
        text = TEXTS[number % len(TEXTS)]
        tops = tuple(TopLogprob(n, -0.5 * n, TEXTS[n]) for n in range(number % len(TEXTS)))
        logprobs.append(TokenLogprob(number, -number / 7, text, tops))
    return Completion(
        name,
        State.COMPLETED,
        FinishReason.LENGTH,
        text="".join(one.text for one in logprobs),
        logprobs=tuple(logprobs),
        prompt_tokens=(
            PromptToken(5, None, "x"),
            *(PromptToken(one.token_id, one.logprob, one.text, one.top) for one in logprobs),
        ),
    )


@pytest.mark.parametrize("kind", ["chat.completions", "completions"])
@pytest.mark.parametrize(
    "use",
    [
        PromptUse(),
        PromptUse(has_logprobs=True),
        PromptUse(True, True),
        PromptUse(True, *[True] * 3),
    ],
)
def test_what_is_written_in_parts_is_the_response(kind, use):
    heading = Heading("req-1", kind, 1, "abacus", prompt=use)
    choices = [completion("a", 0), completion("b", 1), completion("c", 50), completion("d", 32)]
    arguments = {"num_prompts": 2, "prompts": ["p", "q"] if use.is_kept else []}
    parts = list(written_response(heading, choices, **arguments))
    whole = response(heading, choices, **arguments)
    assert json.loads("".join(parts)) == whole
    if use.has_logprobs:
        told = whole if kind == "chat.completions" else whole["choices"][0]
        assert told["prompt_logprobs"] == [None]
    assert max(map(len, parts)) < 3000


def test_while_large_answers_are_written_others_have_their_turns():
    heading = Heading("req-1", "chat.completions", 1, "abacus")
    large = [completion("a", 5000)]

    async def turns_of_others() -> int:
        parts = written_response(heading, large, num_prompts=1)
        writing = asyncio.create_task(encode_parts(parts))
        turns = 0
        while not writing.done():
            await asyncio.sleep(0)
            turns += 1
        assert json.loads(await writing) == response(heading, large, num_prompts=1)
        return turns

    assert asyncio.run(turns_of_others()) > 5


def test_more_than_a_whole_answer_may_hold_is_refused_before_the_queue_has_it(gateway, fake):
    # One more than the most that 25 numbers by each token leave room for.
    num_tokens = idempotency.MAX_COMPLETE_LOGPROBS // (5 * 5) + 1
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 4}
    body |= {"n": 5, "max_tokens": num_tokens}
    reply = gateway.ask("POST", CHAT, body)
    assert (reply.status, reply.error["param"]) == (400, "logprobs")
    assert "stream" in reply.error["message"]
    assert not fake.requests
    for fits in ({"max_tokens": num_tokens - 1}, {"logprobs": False, "top_logprobs": None}):
        assert gateway.ask("POST", CHAT, body | fits).status == 200
    assert gateway.ask("POST", CHAT, body | {"stream": True}).status == 200


def test_a_call_that_names_no_length_gets_one_that_a_whole_answer_can_hold(gateway, fake):
    chat = {"messages": [{"role": "user", "content": "x"}], "n": 5}
    scored = chat | {"logprobs": True, "top_logprobs": 4}
    most = idempotency.MAX_COMPLETE_LOGPROBS // (5 * 5)
    for body, limit in (
        (chat, None),
        (scored, most),
        (scored | {"stream": True}, None),
        (scored | {"max_tokens": 5}, None),
    ):
        fake.requests.clear()
        assert gateway.ask("POST", CHAT, body).status == 200
        assert [one.answer_limit for one in fake.requests] == [limit] * 5
        assert [one.body.get("max_tokens") for one in fake.requests] == [body.get("max_tokens")] * 5


def test_what_came_as_a_stream_and_is_too_large_as_a_whole_is_followed(gateway, monkeypatch):
    monkeypatch.setattr(answers, "MAX_COMPLETE_LOGPROBS", 25)
    with gateway.stream(logprobs=1) as stream:
        stream.rest()
    reply = gateway.get(f"/v1/requests/{stream.request_id}")
    assert (reply.status, reply.error["code"]) == (400, "answer_too_large")
    with gateway.resume(stream.request_id) as again:
        assert "".join(event.text for event in again.rest()) == "one two three"
    monkeypatch.setattr(answers, "MAX_COMPLETE_LOGPROBS", 26)
    assert gateway.get(f"/v1/requests/{stream.request_id}").status == 200
