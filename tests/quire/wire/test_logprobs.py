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


@given(rows)
def test_what_is_said_of_tokens_comes_back_as_it_was(logprobs):
    ids, found = unpack_tokens(pack_tokens(logprobs))
    assert ids == tuple(one.token_id for one in logprobs)
    assert found == tuple(logprobs)


@given(st.lists(st.integers(0, MAX_TOKEN_ID)))
def test_tokens_of_which_nothing_is_said_are_plain_ids(token_ids):
    assert unpack_tokens(pack_ids(token_ids)) == (tuple(token_ids), ())


def test_a_number_travels_in_single_precision_and_so_as_the_model_had_it():
    (single,) = struct.unpack("f", struct.pack("f", -math.pi))
    data = pack_tokens([TokenLogprob(7, single, "x")])
    assert unpack_tokens(data)[1] == (TokenLogprob(7, single, "x"),)
    assert len(data) == 2 + 1 + 5 + 2


@given(st.binary(max_size=100))
def test_foreign_bytes_are_tokens_or_a_protocol_error(data):
    try:
        ids, logprobs = unpack_tokens(data)
    except ProtocolError:
        return
    assert not logprobs or len(ids) == len(logprobs)


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
    ],
)
def test_what_is_no_token_is_a_protocol_error(tokens):
    with pytest.raises(ProtocolError):
        unpack_tokens(msgpack.packb(tokens))
