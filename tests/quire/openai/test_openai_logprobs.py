"""What is answered about log-probabilities is what OpenAI's clients read."""

import math

from quire.openai.logprobs import MIN_LOGPROB, of_chat, of_completion
from quire.wire.logprobs import TokenLogprob, TopLogprob

TOKENS = [
    TokenLogprob(1, -0.5, "é", (TopLogprob(1, -0.5, "é"), TopLogprob(2, -1.0, " a"))),
    TokenLogprob(
        3, -3.0, "\ufffd", (TopLogprob(4, -0.25, "\ufffd"), TopLogprob(5, -math.inf, "b"))
    ),
    TokenLogprob(6, 0.0, "end"),
]


def test_a_chat_has_an_entry_for_each_token_with_its_bytes_where_they_are_known():
    first, second, third = of_chat(TOKENS)["content"]
    assert first == {
        "token": "é", "logprob": -0.5, "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            {"token": " a", "logprob": -1.0, "bytes": [32, 97]},
        ],
    }  # fmt: skip
    assert second["bytes"] is None and second["top_logprobs"][0]["bytes"] is None
    assert third == {"token": "end", "logprob": 0.0, "bytes": [101, 110, 100], "top_logprobs": []}


def test_a_completion_has_columns_and_a_map_of_the_best_that_always_knows_the_one_that_came():
    assert of_completion(TOKENS) == {
        "tokens": ["é", "\ufffd", "end"],
        "token_logprobs": [-0.5, -3.0, 0.0],
        "top_logprobs": [
            {"é": -0.5, " a": -1.0},
            {"\ufffd": -0.25, "b": MIN_LOGPROB},
            {"end": 0.0},
        ],
        "text_offset": [0, 1, 2],
    }


def test_what_json_cannot_say_is_the_least_of_openais_numbers():
    (entry,) = of_chat([TokenLogprob(1, -math.inf, "a")])["content"]
    assert entry["logprob"] == MIN_LOGPROB
