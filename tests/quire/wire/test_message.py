"""The digest of a request, which its record keeps; test_conflicts.py tests its meaning."""

from dataclasses import replace

import pytest

from quire.wire.message import DIGEST_RULE, Message, digest_of
from quire.wire.protocol import GenerationRequest
from quire.wire.sampling import SamplingParams
from tests.quire.builders import make_request

SCHEMA = {"type": "object", "properties": {"b": {"enum": [1, 2.5]}, "a": {"type": "string"}}}

#: Recorded digests. If one changes, DIGEST_RULE must change too: records outlive an upgrade of
#: clients, and a new digest under the old rule would make the same request look like another one.
RECORDED = {
    "324294d56e37c5a4d9e895dfa2aff1": {"kind": "tokens", "body": {"prompt": [1, 2, 3]}},
    "3212f8dfa878276c0454add94eed1f": {
        "kind": "completions", "tenant": "gold",
        "body": {
            "prompt": "gr\u00fc\u00df", "seed": -7, "temperature": 0, "top_p": 0.95, "stop": "\n",
            "logit_bias": {"10": -1, "9": 2.5}, "model": "m", "adapter": "sql",
        },
    },
    "3217d0714a71051c1474256abf4a82": {
        "kind": "chat.completions",
        "body": {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "\u4f60\u597d"}]},
            ],
            "seed": 7, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 3,
            "response_format": {
                "type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA},
            },
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("recorded", RECORDED)
def test_what_was_recorded_once_is_made_today(recorded):
    assert digest_of(GenerationRequest(**RECORDED[recorded])).hex() == recorded


def test_a_parameter_of_a_later_version_changes_nothing_where_nobody_names_it(monkeypatch):
    class Later(SamplingParams):
        mirostat: int = 0

    monkeypatch.setitem(digest_of.__globals__["_DEFAULTS"], "mirostat", 0)
    request = make_request(body={"prompt": "x", "top_k": 3}, kind="completions")
    body = request.parse_body()

    def later(**fields):
        return digest_of(request, replace(body, sampling=Later(top_k=3, **fields)))

    assert later() == later(mirostat=0) == digest_of(request)
    assert later(mirostat=2) != digest_of(request)


def test_the_seed_has_the_last_bytes_and_no_other():
    def asked(seed):
        return digest_of(make_request(body={"prompt": [1], "seed": seed}))

    seeds = [asked(seed) for seed in (None, 0, 1, -1, 1 << 62)]
    assert len({one[:-4] for one in seeds}) == 1
    assert len({one[-4:] for one in seeds}) == 5
    assert {(len(one), one[:1]) for one in seeds} == {(15, DIGEST_RULE)}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x", "name": b"bytes"}],
        [{"role": "user", "content": "x"}] * 5000,
    ],
)
def test_a_body_that_cannot_be_compared_is_sent_all_the_same(messages):
    request = make_request(kind="chat.completions", body={"messages": messages})
    message = Message.of(request)
    assert (message.digest, message.data, message.id) == (b"", request.encode(), request.id)
