"""Which of a slot's two buffers has the state after how many tokens. Knows no request, no device.

A step that computes tokens `s .. e - 1` of a request reads the buffer with the state after s tokens
and writes the other one, which then has the state after e. So the same rows can be computed again,
as after a failure or when a step in flight is corrected: what they read is still there. A state
after any other number of tokens is never read. Before token 0 the state is zero.

Snapshots of states have one buffer each, which only copies read and write.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import DeviceFailed
from engine.request import NO_SLOT

IntArray = NDArray[np.int64]

#: Buffers of each slot.
BUFFERS = 2
#: The tag of a buffer without a state that may be read.
_NOTHING = -1


class Turn(NamedTuple):
    """The buffers of a step's rows, two [rows] arrays, and the lengths after it, [rows]."""

    reads: IntArray
    writes: IntArray
    ends: IntArray


class Copied(NamedTuple):
    """A buffer, and another one that gets its content."""

    source: int
    destination: int


class StateTags:
    """The tags of `num_slots` slots, whose buffers are `BUFFERS * slot` and the one after it.

    Two more buffers belong to no slot: `zero` has the state before the first token and is never
    written, `trash` takes the states of padding and is never read. Behind them are the buffers of
    `num_snapshots` snapshots.
    """

    def __init__(self, num_slots: int, num_snapshots: int = 0) -> None:
        self.zero = BUFFERS * num_slots
        self.trash = self.zero + 1
        self.first_snapshot = self.trash + 1
        self.num_buffers = self.first_snapshot + num_snapshots
        self._tags = np.full(self.num_buffers, _NOTHING, dtype=np.int64)

    def turn(self, slots: IntArray, starts: IntArray, ends: IntArray) -> Turn:
        """The buffers that a step reads and writes; `NO_SLOT` stands for a row of padding.

        The written buffers have no valid state until `commit`.

        Raises:
            DeviceFailed: a slot has no state after a row's first `start` tokens.
        """
        is_real, is_first = slots != NO_SLOT, starts == 0
        first = BUFFERS * np.where(is_real, slots, 0)
        found = self._tags_from(first) == starts[:, None]
        if not (is_first | (found.any(axis=1) & is_real)).all():
            row = int(np.flatnonzero(~(is_first | (found.any(axis=1) & is_real)))[0])
            raise DeviceFailed(
                f"the recurrent state in slot {slots[row]} is not that after {starts[row]} tokens"
            )
        source = np.where(is_first, 1, found.argmax(axis=1))
        writes = np.where(is_real, first + 1 - source, self.trash)
        self._tags[writes[is_real]] = _NOTHING
        # Of a slot that starts anew, both buffers are those of an earlier owner.
        self._tags[(first + source)[is_real & is_first]] = _NOTHING
        return Turn(np.where(is_first, self.zero, first + source), writes, ends)

    def commit(self, turn: Turn) -> None:
        """Note that the buffers of a turn have been written."""
        is_real = turn.writes != self.trash
        self._tags[turn.writes[is_real]] = turn.ends[is_real]

    def buffer_after(self, slot: int, num_tokens: int) -> int:
        """The buffer with the state after `num_tokens` tokens.

        Raises:
            DeviceFailed: the slot has no such state.
        """
        for buffer in range(BUFFERS * slot, BUFFERS * (slot + 1)):
            if self._tags[buffer] == num_tokens:
                return buffer
        raise DeviceFailed(f"slot {slot} has no recurrent state after {num_tokens} tokens")

    def put(self, slot: int, num_tokens: int) -> int:
        """The buffer that gets a state after `num_tokens` tokens from elsewhere."""
        first = BUFFERS * slot
        self._tags[first : first + BUFFERS] = num_tokens, _NOTHING
        return first

    def keep(self, slot: int, snapshot: int, num_tokens: int) -> Copied:
        """The copy that makes a snapshot of a slot's state after `num_tokens` tokens.

        Raises:
            DeviceFailed: the slot has no such state.
        """
        copied = Copied(self.buffer_after(slot, num_tokens), self.first_snapshot + snapshot)
        self._tags[copied.destination] = num_tokens
        return copied

    def restore(self, snapshot: int, slot: int, num_tokens: int) -> Copied:
        """The copy that gives a slot the state of a snapshot, after `num_tokens` tokens.

        Raises:
            DeviceFailed: the snapshot is that of another number of tokens.
        """
        source = self.first_snapshot + snapshot
        if self._tags[source] != num_tokens:
            raise DeviceFailed(f"snapshot {snapshot} is not the state after {num_tokens} tokens")
        return Copied(source, self.put(slot, num_tokens))

    def _tags_from(self, first: IntArray) -> IntArray:
        """[rows, BUFFERS], the tags of the slots whose first buffers are `first`."""
        tags: IntArray = self._tags[first[:, None] + np.arange(BUFFERS)]
        return tags
