"""What is kept of a response: read back as it was, and nothing else is taken for it."""

import pytest

from quire.errors import ProtocolError
from quire.openai.responses.call import Kept
from quire.wire.codec import pack, unpack_map

KEPT = Kept(
    {"id": "resp_1", "created_at": 1, "background": False},
    items=[{"type": "message", "id": "msg_1"}], num_own=1, tools=("weather",),
    has_logprobs=True, reasoning=("think",),
)  # fmt: skip


def test_it_is_read_back_as_it_was():
    assert Kept.decode(KEPT.encode()) == KEPT


def test_what_an_earlier_version_has_kept_is_read():
    """The first version knew no reasoning."""
    fields = unpack_map(KEPT.encode())
    del fields["reasoning"]
    assert Kept.decode(pack(fields)).reasoning == ()


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"v": None},
        {"shown": 1},
        {"shown": {}},
        {"items": None},
        {"items": [1]},
        {"items": [{}]},
        {"own": "many"},
        {"tools": 3},
        {"reasoning": 3},
    ],
)
def test_anything_else_is_refused(change):
    fields = unpack_map(KEPT.encode())
    with pytest.raises(ProtocolError):
        Kept.decode(pack(fields | change))
    with pytest.raises(ProtocolError):
        Kept.decode(b"\xc1")
