"""What is written of a response in parts is the response, and no part is long."""

import json

from quire.openai.logprobs import compact_ascii
from quire.openai.responses.call import Kept
from quire.openai.responses.events import OutputEvents
from quire.openai.responses.writing import written_response
from quire.wire.logprobs import TokenLogprob, TopLogprob
from quire.wire.output import Completion, FinishReason, State, TokenChunk

NUM_TOKENS = 1000
KEPT = Kept(
    {"id": "resp_1", "created_at": 1, "background": False, "metadata": {"output": "x"}},
    items=[], num_own=0, tools=(), has_logprobs=True,
)  # fmt: skip
END = Completion("r", State.COMPLETED, FinishReason.EOS)


def chunk_of(num_tokens: int) -> TokenChunk:
    top = tuple(TopLogprob(n, -0.5 * n, "\N{GRINNING FACE}") for n in range(20))
    return TokenChunk(
        0,
        tuple(range(num_tokens)),
        "a" * num_tokens,
        1,
        tuple(range(1, num_tokens + 1)),
        logprobs=tuple(TokenLogprob(n, -n / 7, "a", top) for n in range(num_tokens)),
    )


def test_every_event_and_the_body_are_written_in_short_parts():
    events = OutputEvents(KEPT)
    told = [*events.opening(), *events.chunk(chunk_of(NUM_TOKENS)), *events.ending(END)]
    body = events.response(END)
    assert len(body["output"][0]["content"][0]["logprobs"]) == NUM_TOKENS
    for whole in [*told, body]:
        parts = list(written_response(whole, encode=compact_ascii))
        assert "".join(parts) == compact_ascii(whole)
        assert max(map(len, parts)) < 50_000
    assert len(json.dumps(body)) > 1_000_000, "the body is much longer than a part"


def test_empty_lists_and_maps_are_written_as_such():
    for value in ({}, [], {"output": []}, {"item": {}}, {"logprobs": []}, {"logprobs": None}):
        assert "".join(written_response(value, encode=compact_ascii)) == compact_ascii(value)
