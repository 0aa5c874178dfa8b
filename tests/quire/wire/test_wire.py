"""The codec: whatever the bytes are, they are a plain value or a ProtocolError."""

import contextlib
import pickle
import time

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidRequest, ProtocolError
from quire.wire.codec import (
    MAX_ARRAY_LENGTH,
    MAX_MAP_LENGTH,
    MAX_MESSAGE_BYTES,
    pack,
    pack_ids,
    unpack,
    unpack_ids,
    unpack_map,
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)


@given(values)
def test_every_plain_value_comes_back_as_it_was(value):
    assert unpack(pack(value)) == value


@given(st.lists(st.integers(0, (1 << 31) - 1)))
def test_token_ids_come_back_as_they_were(token_ids):
    assert unpack_ids(pack_ids(token_ids)) == tuple(token_ids)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_a_value_or_a_protocol_error(data):
    for decode in (unpack, unpack_map, unpack_ids):
        with contextlib.suppress(ProtocolError):
            decode(data)


@given(values, st.data())
def test_a_damaged_message_is_a_value_or_a_protocol_error(value, data):
    message = bytearray(pack(value))
    position = data.draw(st.integers(0, len(message) - 1))
    message[position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        unpack(bytes(message))


@pytest.mark.parametrize(
    "message",
    [
        msgpack.packb(msgpack.ExtType(1, b"x")),
        msgpack.packb(msgpack.ExtType(1, b"")),
        msgpack.packb(msgpack.Timestamp(0)),
        msgpack.packb({1: 2}),
        msgpack.packb([0] * (MAX_ARRAY_LENGTH + 1)),
        msgpack.packb({str(key): 0 for key in range(MAX_MAP_LENGTH + 1)}),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000 + b"\xc0",
        msgpack.packb(1) * 2,
        b"\xa1\xff",
        b"",
        b"\x00" * (MAX_MESSAGE_BYTES + 1),
    ],
    ids=[
        "extension", "empty extension", "timestamp", "integer key", "long array", "large map",
        "array that promises too much", "deep nesting", "two messages", "not utf-8", "empty",
        "too many bytes",
    ],
)  # fmt: skip
def test_what_is_over_a_limit_or_not_plain_is_refused(message):
    with pytest.raises(ProtocolError):
        unpack(message)


@pytest.mark.parametrize("value", [[True], [-1], [1.0], ["1"], [1 << 31], {}, 1])
def test_only_token_ids_are_token_ids(value):
    with pytest.raises(ProtocolError):
        unpack_ids(pack(value))


def test_a_message_over_the_cap_is_refused_with_the_cap_in_the_sentence():
    with pytest.raises(InvalidRequest, match="the limit is 1048576") as caught:
        pack("x" * MAX_MESSAGE_BYTES, field="body")
    assert caught.value.field == "body"


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (object(), "metadata"),
        (1 << 64, "metadata"),
        ("\ud83d", "metadata"),
        ({"key": {1, 2}}, "metadata.key"),
        ({"a": 1, "b": [0, 0, {"c": "\udc00"}], "d": 2}, "metadata.b.2.c"),
        ([*range(1000), -(1 << 63) - 1, *range(1000)], "metadata.1000"),
        ({"a": {"\ud83d": 1}}, "metadata.a"),
    ],
)
def test_a_value_that_cannot_travel_is_refused_by_the_path_of_the_part(value, field):
    with pytest.raises(InvalidRequest) as caught:
        pack(value, field="metadata")
    assert caught.value.field == field
    assert pickle.loads(pickle.dumps(caught.value)).field == field


def test_the_part_at_fault_is_found_soon_in_a_long_value():
    value = {"rows": [{"text": "x" * 20}] * 20_000 + ["\ud83d"]}
    began = time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        pack(value)
    # Each half is packed once: with every part on its own, or all of it for each, it would be more.
    assert time.process_time() - began < 2.0
    assert caught.value.field == "message.rows.20000"
