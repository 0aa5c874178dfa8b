"""Snapshots of recurrent states: where they are worth taking, and which one gives way."""

import pytest

from engine.cache.state_snapshots import StateSnapshots
from engine.cache.state_tags import StateTags
from engine.errors import DeviceFailed
from tests.engine.builders import make_request


def make_snapshots(num_snapshots: int = 2, **options) -> StateSnapshots:
    return StateSnapshots(num_snapshots, **({"block_size": 4} | options))


def prefix_hash(name: str):
    """The hashes of a text whose prefixes are named by it and their lengths."""
    return lambda num_tokens: f"{name}{num_tokens}".encode()


def ends(snapshots: StateSnapshots, request, name: str = "t") -> list[int]:
    """Where the request's rows end for snapshots, each of which is taken."""
    found = []
    while (end := snapshots.next_end(request, prefix_hash(name))) is not None:
        snapshots.begin(request, end, prefix_hash(name)(end))
        request.num_computed_tokens = end
        snapshots.complete(request, end)
        found.append(end)
    return found


@pytest.mark.parametrize(
    ("prompt", "expected"), [(1, []), (4, []), (5, [4]), (8, [4]), (9, [8]), (15, [12])]
)
def test_one_is_taken_at_the_last_boundary_that_an_equal_prompt_can_begin_behind(prompt, expected):
    assert ends(make_snapshots(), make_request(prompt=prompt)) == expected


def test_one_is_taken_where_a_cached_prompt_was_left():
    request = make_request(prompt=19)
    request.parted_at = 8
    assert ends(make_snapshots(), request) == [8, 16]


def test_and_after_every_so_many_blocks():
    assert ends(make_snapshots(9, every_blocks=2), make_request(prompt=29)) == [8, 16, 24, 28]
    request = make_request(prompt=29)
    request.num_computed_tokens = 12
    assert ends(make_snapshots(9, every_blocks=2), request) == [16, 24, 28]


def test_none_is_taken_of_what_is_kept_or_begun_by_another():
    snapshots = make_snapshots()
    first, second = make_request("a", prompt=9), make_request("b", prompt=9)
    snapshots.begin(first, 8, b"t8")
    assert snapshots.next_end(first, prefix_hash("t")) == 8
    assert snapshots.next_end(second, prefix_hash("t")) is None
    assert snapshots.next_end(second, prefix_hash("other")) == 8
    snapshots.complete(first, 8)
    assert snapshots.next_end(second, prefix_hash("t")) is None
    assert snapshots.violations() == []


def test_none_is_taken_without_a_slot_that_no_step_writes():
    snapshots = make_snapshots(1)
    first, second = make_request("a", prompt=9), make_request("b", prompt=9)
    assert snapshots.begin(first, 8, b"a8") == snapshots.begin(first, 8, b"a8") == 0
    assert snapshots.next_end(first, prefix_hash("a")) == 8
    assert snapshots.next_end(second, prefix_hash("b")) is None
    snapshots.complete(first, 8)
    assert snapshots.next_end(second, prefix_hash("b")) == 8
    assert make_snapshots(0).next_end(first, prefix_hash("a")) is None


def test_a_prefix_is_usable_up_to_its_last_snapshot_that_a_step_has_written():
    snapshots = make_snapshots()
    request = make_request(prompt=20)
    hashes = [b"t4", b"t8", b"t12", b"t16"]
    snapshots.begin(request, 8, b"t8")
    assert snapshots.longest(hashes, 4) == 0
    snapshots.complete(request, 12)
    assert snapshots.longest(hashes, 4) == 0
    snapshots.complete(request, 8)
    assert [snapshots.longest(hashes, count) for count in range(5)] == [0, 0, 2, 2, 2]


def test_the_least_recently_used_one_gives_way():
    snapshots = make_snapshots()
    for name in "ab":
        assert ends(snapshots, make_request(name, prompt=5), name) == [4]
    slot = snapshots.use(b"a4")
    assert ends(snapshots, make_request("c", prompt=5), "c") == [4]
    assert snapshots.use(b"a4") == slot
    assert [snapshots.longest([name], 1) for name in (b"a4", b"b4", b"c4")] == [1, 0, 1]


def test_what_was_begun_for_a_request_that_is_gone_is_given_up():
    snapshots = make_snapshots(3)
    first, second = make_request("a", prompt=9), make_request("b", prompt=9)
    for request in (first, second):
        snapshots.begin(request, 8, request.request_id.encode())
    snapshots.drop(first)
    snapshots.complete(first, 8)
    assert (snapshots.pool.num_owned, snapshots.pool.num_cached) == (1, 0)
    snapshots.drop(second)
    assert (snapshots.pool.num_blank, snapshots.violations()) == (3, [])


def test_a_snapshot_that_no_step_writes_or_two_do_breaks_a_law():
    snapshots = make_snapshots()
    (slot,) = snapshots.pool.allocate(1)
    assert snapshots.violations() == [f"snapshot {slot} is owned by no step, or by several"]
    request = make_request(prompt=9)
    snapshots._pending[request.request_id, 8] = slot, b"t8"
    assert snapshots.violations() == []
    snapshots._pending[request.request_id, 12] = slot, b"t12"
    assert snapshots.violations() == [f"snapshot {slot} is owned by no step, or by several"]


def test_a_snapshot_has_a_buffer_of_its_own_and_is_that_of_one_number_of_tokens():
    tags = StateTags(2, 2)
    assert (tags.first_snapshot, tags.num_buffers) == (6, 8)
    tags.put(1, 8)
    assert tags.keep(1, 1, 8) == (2, 7)
    assert tags.restore(1, 0, 8) == (7, 0)
    assert tags.buffer_after(0, 8) == 0
    with pytest.raises(DeviceFailed, match="snapshot 1 is not the state after 4 tokens"):
        tags.restore(1, 0, 4)
    with pytest.raises(DeviceFailed, match="snapshot 0 is not"):
        tags.restore(0, 0, 8)
    with pytest.raises(DeviceFailed, match="slot 1 has no recurrent state after 9 tokens"):
        tags.keep(1, 0, 9)
