"""Recorded messages of version 1 that must decode for ever, and encode to the same bytes today.

A golden is never changed. A new kind of message gets a new file beside the old ones.
"""

import json
from pathlib import Path

import pytest

from quire.wire.codec import pack_ids, unpack_ids
from quire.wire.logprobs import (
    PromptToken,
    TokenLogprob,
    Tokens,
    TopLogprob,
    pack_tokens,
    unpack_tokens,
)
from quire.wire.output import Completion, ErrorInfo, FinishReason, State, TokenChunk, Usage
from quire.wire.protocol import GenerationRequest, Priority

GOLDENS = Path(__file__).parents[1] / "goldens"

REQUESTS = {
    "request-tokens": GenerationRequest(
        id="0123456789abcdef0123456789abcdef", kind="tokens", created_ms=1_700_000_000_000,
        body={"prompt": [1, 128, 32_000, 151_643], "max_tokens": 16, "seed": (1 << 63) - 1},
    ),
    "request-completions": GenerationRequest(
        id="order-7:row-3", kind="completions", created_ms=1_700_000_000_001, tenant="team-a",
        priority=Priority.HIGH, deadline_ms=1_700_000_060_000, idempotency_key="2024/11/03 7",
        headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
        body={"prompt": "12+34=", "temperature": 0.5, "stop": ["\n"], "model": "abacus"},
        metadata={"row": 3, "none": None, "nested": {"list": [1, 2.5, "x"]}},
    ),
    "request-chat": GenerationRequest(
        id="c", kind="chat.completions", created_ms=0, priority=Priority.CRITICAL,
        body={"messages": [{"role": "user", "content": "gr\u00fc\u00df \u4f60\u597d \U0001f9ee"}]},
    ),
    "request-embeddings": GenerationRequest(
        id="e", kind="embeddings", created_ms=1_700_000_000_002,
        body={"input": "gr\u00fc\u00df", "dimensions": 256, "prompt_name": "query"},
    ),
    "request-scores": GenerationRequest(
        id="s", kind="scores", created_ms=0, body={"input": "a", "pair": "b"},
    ),
    "request-unknown-field": GenerationRequest(
        id="f", kind="tokens", created_ms=0, body={"prompt": [1]}, from_the_future={"a": [True]}
    ),
}  # fmt: skip

COMPLETIONS = {
    "completion-eos": Completion(
        "r", State.COMPLETED, FinishReason.EOS, model="abacus", preemptions=2,
        usage=Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4),
    ),
    "completion-vector": Completion(
        "r", State.COMPLETED, FinishReason.STOP, model="encoder", usage=Usage(prompt_tokens=7),
        vector=bytes.fromhex("cdcccd3d000020c0"),
    ),
    "completion-rejected": Completion(
        "r", State.FAILED, FinishReason.REJECTED, resumed_fingerprint_changed=True,
        error=ErrorInfo("invalid_request", "must be at most 1", "body.top_p"),
    ),
}  # fmt: skip

TOKEN_IDS = {"token-ids": (0, 1, 127, 128, 255, 256, 65_535, 65_536, (1 << 31) - 1)}

TOKENS = {
    "tokens-with-logprobs": (
        TokenLogprob(5, -0.5, "a"),
        TokenLogprob(9_000, -2.0, "\u00e9", (TopLogprob(0, -0.5, " a"), TopLogprob(7, -1e30, ""))),
        TokenLogprob((1 << 31) - 1, 0.0, "\ufffd", (TopLogprob(1, float("-inf"), "\n"),)),
    )
}  # fmt: skip

PROMPTS = {
    "tokens-with-prompt": Tokens(
        (5, 70_000), (), (
            PromptToken(1, None, "<s>"),
            PromptToken(9_000, -2.0, "\u00e9", (TopLogprob(0, -0.5, " a"),)),
        ),
    ),
    "tokens-with-prompt-and-logprobs": Tokens(
        (5,), (TokenLogprob(5, -0.5, "a", (TopLogprob(5, -0.5, "a"),)),),
        (PromptToken(1, None, "x"), PromptToken(2, float("-inf"), "\ufffd")),
    ),
}  # fmt: skip

#: Log entries as the server returns them: id, then names and values in base 16.
ENTRIES = json.loads((GOLDENS / "log-entries.json").read_text())


def golden(name: str) -> bytes:
    return (GOLDENS / f"{name}.msgpack").read_bytes()


@pytest.mark.parametrize("name", REQUESTS)
def test_a_recorded_request_is_read_and_written_as_it_was(name):
    assert GenerationRequest.decode(golden(name)) == REQUESTS[name]
    assert REQUESTS[name].encode() == golden(name)


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_recorded_completion_is_read_and_written_as_it_was(name):
    assert Completion.decode(golden(name), request_id="r") == COMPLETIONS[name]
    assert COMPLETIONS[name].encode() == golden(name)


@pytest.mark.parametrize("name", TOKEN_IDS)
def test_recorded_token_ids_are_read_and_written_as_they_were(name):
    assert unpack_ids(golden(name)) == TOKEN_IDS[name]
    assert pack_ids(TOKEN_IDS[name]) == golden(name)


@pytest.mark.parametrize("name", TOKENS)
def test_recorded_tokens_are_read_and_written_with_their_log_probabilities(name):
    ids, logprobs, prompt = unpack_tokens(golden(name))
    assert (ids, prompt) == (tuple(one.token_id for one in TOKENS[name]), ())
    assert pack_tokens(logprobs) == pack_tokens(TOKENS[name]) == golden(name)


@pytest.mark.parametrize("name", PROMPTS)
def test_a_recorded_prompt_is_read_and_written_beside_the_first_tokens(name):
    wanted = PROMPTS[name]
    assert unpack_tokens(golden(name)) == wanted
    assert pack_tokens(wanted.logprobs or wanted.ids, wanted.prompt) == golden(name)


def test_recorded_log_entries_are_read_as_they_were():
    tokens, end = (
        (entry["id"].encode(), {k.encode(): bytes.fromhex(v) for k, v in entry["fields"].items()})
        for entry in ENTRIES
    )
    assert TokenChunk.from_entry(*tokens) == TokenChunk(
        start=3, token_ids=(5, 70_000), text="a\u00e9", epoch=2, text_ends=(1, 2)
    )
    completion = Completion.from_entry("r", end[0], fields=end[1])
    assert (completion.state, completion.attempts, completion.resumes) == (State.COMPLETED, 2, 1)
    assert completion.usage == Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=4)
    assert completion.timing.total_seconds == 2.5
    assert completion.metadata == {"row": 3}


def test_every_recorded_file_is_tested():
    recorded = {path.stem for path in GOLDENS.glob("*.msgpack")}
    assert recorded == {*REQUESTS, *COMPLETIONS, *TOKEN_IDS, *TOKENS, *PROMPTS}
