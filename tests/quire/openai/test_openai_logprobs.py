"""What is answered about log-probabilities is what OpenAI's clients read."""

import json
import math
from itertools import count, islice

import pytest

from quire.openai.logprobs import (
    MIN_LOGPROB,
    columns_of_completion,
    columns_of_prompt,
    filled,
    of_chat,
    written,
)
from quire.wire.logprobs import PromptToken, TokenLogprob, TopLogprob

TOKENS = [
    TokenLogprob(1, -0.5, "é", (TopLogprob(1, -0.5, "é"), TopLogprob(2, -1.0, " a"))),
    TokenLogprob(
        3, -3.0, "\ufffd", (TopLogprob(4, -0.25, "\ufffd"), TopLogprob(5, -math.inf, "b"))
    ),
    TokenLogprob(6, 0.0, "end"),
]


def of_completion(*tokens, **given):
    return filled(columns_of_completion(*tokens, **given))


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


#: A space and an emoji in three tokens, and another emoji that begins with the same byte.
PARTS = [
    TokenLogprob(1, -0.5, " \ufffd", (), b" \xf0"),
    TokenLogprob(
        2, -0.5, "\ufffd",
        (TopLogprob(2, -0.5, "\ufffd", b"\x9f\x98"), TopLogprob(9, -1.0, "\ufffd", b"\x9f\xa6")),
        b"\x9f\x98",
    ),
    TokenLogprob(3, -0.5, "\ufffd", (), b"\x80"),
    TokenLogprob(4, -0.5, "!"),
]  # fmt: skip


def test_parts_of_a_character_have_their_bytes_and_do_not_collide():
    content = of_chat(PARTS)["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == " \U0001f600!"
    assert [one["bytes"] for one in content[1]["top_logprobs"]] == [[0x9F, 0x98], [0x9F, 0xA6]]
    found = of_completion(PARTS, ends=[1, 1, 2, 3])
    assert found["tokens"] == [r"bytes: \xf0", r"bytes:\x9f\x98", r"bytes:\x80", "!"]
    assert found["top_logprobs"][1] == {r"bytes:\x9f\x98": -0.5, r"bytes:\x9f\xa6": -1.0}


@pytest.mark.parametrize("ends", [(1, 1, 2, 3), ()])
def test_offsets_are_in_the_text_also_where_a_character_has_several_tokens(ends):
    # Where each token begins; those inside of a character where it begins.
    assert of_completion(PARTS, ends=ends)["text_offset"] == [0, 1, 1, 2]
    prompt = [PromptToken(one.token_id, -1.0, one.text, (), one.raw) for one in PARTS]
    both = [*prompt, *PARTS]
    assert of_completion(both, ends=ends)["text_offset"] == [0, 1, 1, 2, 3, 4, 4, 5]
    kept = of_completion(both, echoed=" \U0001f600!", ends=ends)
    assert kept["text_offset"] == [0, 1, 1, 2, 3, 4, 4, 5]


def test_what_json_cannot_say_is_the_least_of_openais_numbers():
    (entry,) = of_chat([TokenLogprob(1, -math.inf, "a")])["content"]
    assert entry["logprob"] == MIN_LOGPROB


PROMPT = [
    PromptToken(1, None, "<s>"),
    PromptToken(7, -0.25, "a", (TopLogprob(7, -0.25, "a"), TopLogprob(8, -math.inf, "b"))),
    PromptToken(9, -3.0, "c", (TopLogprob(7, -0.25, "a"),)),
]


def test_the_tokens_of_a_prompt_are_maps_by_token_id_with_the_ranks_that_are_known():
    assert list(columns_of_prompt(PROMPT)) == [
        None,
        {
            "7": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
            "8": {"logprob": MIN_LOGPROB, "rank": 2, "decoded_token": "b"},
        },
        {
            "9": {"logprob": -3.0, "rank": None, "decoded_token": "c"},
            "7": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
        },
    ]


def test_a_completion_that_echoes_its_prompt_begins_with_its_tokens():
    assert of_completion([*PROMPT, TOKENS[2]]) == {
        "tokens": ["<s>", "a", "c", "end"],
        "token_logprobs": [None, -0.25, -3.0, 0.0],
        "top_logprobs": [None, {"a": -0.25, "b": MIN_LOGPROB}, {"a": -0.25, "c": -3.0},
                         {"end": 0.0}],
        "text_offset": [0, 3, 4, 5],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("echoed", "texts", "offsets"),
    [
        ("ac", ["<s>", "a", "c"], [0, 0, 1]),
        # The text of bytes that are no character alone.
        ("aéa😀a b", ["<s>", "a", *"��", "a", *"����", "a", " b"],
         [0, 0, 1, 1, 2, 3, 3, 3, 3, 4, 5]),
        # A tokenizer that changes the text.
        ("A B", ["a", " b"], [0, 0]),
        ("a" + "x" * 99 + "b", ["a", *["?"] * 99, "b"], [0, *[1] * 100]),
    ],
)  # fmt: skip
def test_offsets_are_those_in_the_text_that_is_shown(echoed, texts, offsets):
    tokens = [*(PromptToken(7, -1.0, text) for text in texts), TOKENS[2], TOKENS[2]]
    behind = [len(echoed), len(echoed) + len(TOKENS[2].text)]
    assert of_completion(tokens, echoed=echoed)["text_offset"] == [*offsets, *behind]


@pytest.mark.parametrize(
    "make",
    [
        dict,
        lambda: {"a": iter(()), "b": None, "c": [1, "x"], "d": {"e": iter(range(40))}},
        lambda: {"choices": [{"a": iter([{"b": 1}] * 17)}, {}], "é": [{"f": []}]},
        lambda: iter(range(33)),
        list,
    ],
)
def test_what_is_written_in_parts_is_what_is_filled(make):
    assert json.loads("".join(written(make()))) == filled(make())


def test_no_more_is_made_than_what_is_taken():
    numbers = count()
    parts = written({"numbers": numbers})
    assert "".join(islice(parts, 3)).startswith('{"numbers":[0,1')
    assert next(numbers) < 40
