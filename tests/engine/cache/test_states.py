"""Slots of recurrent states, and which of a slot's buffers a step reads and writes."""

import numpy as np
import pytest

from engine.batch import StateCopy
from engine.cache.state_slots import StateSlots
from engine.cache.state_tags import StateTags
from engine.errors import DeviceFailed
from engine.request import NO_SLOT
from tests.engine.builders import make_request


def turn(tags: StateTags, *rows: tuple[int, int, int]):
    """The turn of rows (slot, start, end)."""
    slots, starts, ends = np.array(rows).T
    return tags.turn(slots, starts, ends)


def computed(tags: StateTags, *rows: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Reads and writes of rows that were computed."""
    found = turn(tags, *rows)
    tags.commit(found)
    return list(zip(found.reads.tolist(), found.writes.tolist(), strict=True))


def test_a_request_reads_what_its_last_step_wrote_and_writes_the_other_buffer():
    tags = StateTags(2)
    assert computed(tags, (1, 0, 8), (0, 0, 3)) == [(tags.zero, 2), (tags.zero, 0)]
    assert computed(tags, (0, 3, 4), (1, 8, 20)) == [(0, 1), (2, 3)]
    assert computed(tags, (0, 4, 5), (1, 20, 21)) == [(1, 0), (3, 2)]


def test_the_same_rows_may_be_computed_again_and_again():
    tags = StateTags(1)
    computed(tags, (0, 0, 8))
    for _ in range(3):
        assert computed(tags, (0, 8, 9)) == [(0, 1)]
    assert computed(tags, (0, 8, 12)) == [(0, 1)]
    assert computed(tags, (0, 12, 13)) == [(1, 0)]


def test_a_step_that_failed_leaves_what_it_read_and_nothing_of_what_it_wrote():
    tags = StateTags(1)
    computed(tags, (0, 0, 8))
    turn(tags, (0, 8, 9))
    with pytest.raises(DeviceFailed, match="slot 0 is not that after 9 tokens"):
        turn(tags, (0, 9, 10))
    assert computed(tags, (0, 8, 9)) == [(0, 1)]


def test_a_state_after_another_number_of_tokens_is_never_read():
    tags = StateTags(2)
    computed(tags, (0, 0, 8), (1, 0, 4))
    for row in ((0, 4, 5), (1, 8, 9), (1, 3, 4)):
        with pytest.raises(DeviceFailed, match="recurrent state"):
            turn(tags, row)
    with pytest.raises(DeviceFailed, match="slot 0 has no recurrent state after 7 tokens"):
        tags.buffer_after(0, 7)


def test_a_new_owner_finds_no_state_of_the_one_before():
    tags = StateTags(1)
    computed(tags, (0, 0, 8))
    computed(tags, (0, 8, 9))
    turn(tags, (0, 0, 2))
    for start in (8, 9):
        with pytest.raises(DeviceFailed):
            turn(tags, (0, start, start + 1))


def test_padding_reads_zeros_and_writes_what_nobody_reads():
    tags = StateTags(1)
    assert computed(tags, (0, 0, 8), (NO_SLOT, 0, 1)) == [(tags.zero, 0), (tags.zero, tags.trash)]
    with pytest.raises(DeviceFailed):
        turn(tags, (NO_SLOT, 8, 9))


def test_a_state_that_is_put_back_is_the_only_one_of_its_slot():
    tags = StateTags(2)
    computed(tags, (1, 0, 5))
    assert tags.buffer_after(1, 5) == 2
    assert tags.put(1, 9) == tags.buffer_after(1, 9)
    with pytest.raises(DeviceFailed):
        tags.buffer_after(1, 5)


def admitted(slots: StateSlots, name: str, *, computed: int = 0):
    request = make_request(name)
    slots.take(request)
    request.num_computed_tokens = computed
    return request


def test_slots_are_counted_and_come_back():
    slots = StateSlots(2, 0)
    first, second = admitted(slots, "a"), admitted(slots, "b")
    assert {first.state_slot, second.state_slot} == {0, 1}
    assert not slots.has_room(num_gone=0)
    assert slots.has_room(num_gone=1)
    assert slots.violations([first, second]) == []
    slots.free(first)
    slots.free(first)
    assert first.state_slot == NO_SLOT
    assert slots.has_room(num_gone=0)
    assert slots.violations([second]) == []


def test_a_swap_names_the_state_it_moves_and_keeps_the_host_slot_until_it_is_copied():
    slots = StateSlots(1, 1)
    request = admitted(slots, "a", computed=3)
    moves = slots.begin_step()
    slots.swap_out(request)
    assert moves.out == [StateCopy(0, 0, 3)]
    assert (request.state_slot, request.host_state_slot) == (NO_SLOT, 0)
    assert not slots.can_swap_out(request)
    moves = slots.begin_step()
    slots.swap_in(request)
    assert (moves.out, moves.back) == ([], [StateCopy(0, 0, 3)])
    assert not slots.can_swap_out(request)
    assert slots.violations([request]) == []
    slots.begin_step()
    assert slots.can_swap_out(request)


def test_what_a_step_restores_is_not_swapped_by_it_and_not_restored_for_a_later_owner():
    slots = StateSlots(2, 1)
    moves = slots.begin_step()
    first, second = admitted(slots, "a", computed=8), admitted(slots, "b")
    slots.restore(first, 5, 8)
    assert moves.restored == [StateCopy(5, first.state_slot, 8)]
    assert not slots.can_swap_out(first)
    assert slots.can_swap_out(second)
    slots.free(first)
    assert moves.restored == []
    slots.begin_step()
    third = admitted(slots, "c", computed=8)
    slots.restore(third, 5, 8)
    slots.begin_step()
    assert slots.can_swap_out(third)


def test_a_lost_or_shared_slot_breaks_a_law():
    slots = StateSlots(2, 1)
    request = admitted(slots, "a")
    lost = ["slots of states are not those of the requests alive"]
    assert slots.violations([]) == lost
    other = make_request("b")
    other.state_slot = request.state_slot
    assert slots.violations([request, other]) == lost
    other.state_slot, other.host_state_slot = NO_SLOT, 0
    assert slots.violations([request, other]) == [
        "slots of swapped states are not those of the requests alive"
    ]


def test_a_model_without_a_state_needs_no_slot():
    slots = StateSlots(0, 0)
    request = admitted(slots, "a")
    slots.swap_out(request)
    slots.swap_in(request)
    slots.free(request)
    assert slots.has_room(num_gone=0) and slots.can_swap_out(request)
    assert request.state_slot == NO_SLOT
    assert slots.violations([request]) == []
