"""Log-probabilities among the ids of a log: what is written comes back, and only what is ours."""

import math
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ProtocolError
from quire.wire.codec import MAX_TOKEN_ID, pack_ids
from quire.wire.logprobs import (
    MAX_TOP_LOGPROBS,
    PromptToken,
    TokenLogprob,
    TopLogprob,
    pack_tokens,
    unpack_tokens,
)

fields = (
    st.integers(0, MAX_TOKEN_ID),
    st.floats(max_value=0.0, width=32, allow_nan=False),
    st.text(max_size=9),
)
tops = st.lists(st.builds(TopLogprob, *fields), max_size=MAX_TOP_LOGPROBS).map(tuple)
rows = st.lists(st.builds(TokenLogprob, *fields, tops), min_size=1, max_size=5)
first = st.builds(PromptToken, fields[0], st.none(), fields[2])
prompts = st.builds(
    lambda first, others: (first, *others),
    first,
    st.lists(st.builds(PromptToken, *fields, tops), max_size=5),
)
ids = st.lists(fields[0], min_size=1, max_size=5)


@given(rows)
def test_what_is_said_of_tokens_comes_back_as_it_was(logprobs):
    found = unpack_tokens(pack_tokens(logprobs))
    assert found.ids == tuple(one.token_id for one in logprobs)
    assert (found.logprobs, found.prompt) == (tuple(logprobs), ())


@given(rows | ids, prompts)
def test_the_tokens_of_a_prompt_come_back_beside_those_of_the_output(tokens, prompt):
    alone, found = unpack_tokens(pack_tokens(tokens)), unpack_tokens(pack_tokens(tokens, prompt))
    assert found == alone._replace(prompt=prompt)


@given(st.lists(st.integers(0, MAX_TOKEN_ID)))
def test_tokens_of_which_nothing_is_said_are_plain_ids(token_ids):
    assert unpack_tokens(pack_ids(token_ids)) == (tuple(token_ids), (), ())
    assert pack_tokens(token_ids) == pack_ids(token_ids)


def test_a_number_travels_in_single_precision_and_so_as_the_model_had_it():
    (single,) = struct.unpack("f", struct.pack("f", -math.pi))
    data = pack_tokens([TokenLogprob(7, single, "x")])
    assert unpack_tokens(data).logprobs == (TokenLogprob(7, single, "x"),)
    assert len(data) == 2 + 1 + 5 + 2


@given(st.binary(max_size=100))
def test_foreign_bytes_are_tokens_or_a_protocol_error(data):
    try:
        found = unpack_tokens(data)
    except ProtocolError:
        return
    assert not found.logprobs or len(found.ids) == len(found.logprobs)


#: Only the first token has no log-probability, and it has no others beside it.
DAMAGED_PROMPTS = [
    None,
    [],
    [None],
    [1, -1],
    [1, None],
    [True],
    0,
    -1,
    True,
    1.0,
    [[]],
    [[1, -0.5, "a"]],
    [[1, None, b"a"]],
    [[-1, None, "a"]],
    [[1, None, "a", 2, -0.5, "b"]],
    [[1, None, "a"], [1, None, "a"]],
    [[1, None, "a"], [1, -0.5]],
    [[1, None, "a"], [1, -0.5, "a", 2, None, "b"]],
    [[1, None, "a"], 1],
    [[1, None, "a"], [1, -0.5, "a"] * (MAX_TOP_LOGPROBS + 2)],
]


@pytest.mark.parametrize(
    "tokens",
    [
        [[]],
        [[1]],
        [[1, -0.5]],
        [[1, -0.5, "a", 2]],
        [[1, -0.5, "a"], 2],
        [2, [1, -0.5, "a"]],
        [[-1, -0.5, "a"]],
        [[True, -0.5, "a"]],
        [[1, -1, "a"]],
        [[1, math.nan, "a"]],
        [[1, -0.5, b"a"]],
        [[1, -0.5, "a", 2, -0.5, None]],
        [[1, -0.5, "a"] * (MAX_TOP_LOGPROBS + 2)],
        {"1": -0.5},
        {"tokens": [1]},
        {"tokens": [1], "prompt": [], "more": []},
        {"tokens": [1, [2, -0.5, "a"]], "prompt": [[1, None, "a"]]},
        {"tokens": {"tokens": [1], "prompt": [[1, None, "a"]]}, "prompt": [[1, None, "a"]]},
        *({"tokens": [1], "prompt": prompt} for prompt in DAMAGED_PROMPTS),
    ],
)
def test_what_is_no_token_is_a_protocol_error(tokens):
    with pytest.raises(ProtocolError):
        unpack_tokens(msgpack.packb(tokens))


def test_bytes_that_are_no_text_come_back_and_are_a_text_to_earlier_readers():
    part = TopLogprob(2, -0.5, " \ufffd", b" \xf0\x9f")
    own = TopLogprob(3, -0.5, "\ufffd", "\ufffd".encode())
    private = TopLogprob(4, -0.5, "\U0010fff0")
    token = TokenLogprob(1, -1.0, "\ufffd", (part, own, private), b"\x80")
    first = PromptToken(1, None, "\ufffd", (), b"\x80")
    prompt = (first, PromptToken(2, -1.0, part.text, (part,), part.raw))
    packed = pack_tokens([token], prompt)
    assert unpack_tokens(packed) == ((1,), (token,), prompt)
    (row,) = msgpack.unpackb(packed)["tokens"]
    assert row[2::3] == ["\U0010ff80", " \U0010fff0\U0010ff9f", *row[8::3]]
    assert all(isinstance(text, str) for text in row[2::3])


@pytest.mark.parametrize("told", [(5, 6, 7), 3, 200_000])
def test_ids_or_the_number_of_a_prompt_are_told_with_the_first_tokens(told):
    assert unpack_tokens(pack_tokens([1, 2], told)) == ((1, 2), (), told)
