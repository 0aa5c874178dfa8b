"""Snapshots of recurrent states at the ends of full blocks. Knows no device and no tensor.

The keys and values of a prefix are useless without the state behind it. So a request begins behind
a cached prefix only where a snapshot of that state is kept. It is found by the hash of the prefix's
last block. A step that ends a row at such a boundary copies the row's state into a slot of this
pool. The number of slots is fixed; the least recently used snapshot gives way.

A slot is owned from the plan of a step that writes it until a step has written it, or its request
gives it up; a plan that is replaced leaves it to the next one. Otherwise it is blank or cached,
like the blocks of `engine.cache.block_pool`.
"""

from collections.abc import Callable, Iterator, Sequence

from engine.cache.block_pool import BlockPool
from engine.request import Request


class StateSnapshots:
    """Decides where snapshots are taken, finds them, and gives them up.

    Args:
        num_snapshots: slots of the pool; with 0 nothing is kept.
        every_blocks: also take one after each such number of blocks of a prompt; 0 for none.
    """

    def __init__(self, num_snapshots: int, *, block_size: int, every_blocks: int = 0) -> None:
        assert block_size >= 1 and every_blocks >= 0
        self.pool = BlockPool(num_snapshots)
        self._block_size = block_size
        self._every_tokens = every_blocks * block_size
        #: By request id and number of tokens: the slot that a step not applied yet writes, and the
        #: hash of the prefix.
        self._pending: dict[tuple[str, int], tuple[int, bytes]] = {}

    def longest(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """The most of the first `num_blocks` blocks with these hashes that have a snapshot."""
        while num_blocks and self.pool.lookup(hashes[num_blocks - 1]) is None:
            num_blocks -= 1
        return num_blocks

    def use(self, prefix_hash: bytes) -> int:
        """The slot of a snapshot, which becomes the most recently used one.

        It need not be owned: a step reads snapshots before it writes any.
        """
        slot = self.pool.lookup(prefix_hash)
        assert slot is not None
        self.pool.touch([slot])
        self.pool.free([slot])
        return slot

    def next_end(self, request: Request, hash_of: Callable[[int], bytes]) -> int | None:
        """The number of tokens after which the next snapshot of a request is taken; None for none.

        `hash_of` returns the hash of the request's first tokens, as many as whole blocks have.
        """
        if not self.pool.num_blocks:
            return None
        start = request.num_computed_tokens
        ends = (end for end in self._ends(request, start) if end > start)
        return next((end for end in ends if self._is_worth(request, end, hash_of(end))), None)

    def begin(self, request: Request, end: int, prefix_hash: bytes) -> int:
        """A slot for the state after `end` tokens, which the step being planned computes."""
        if (request.request_id, end) not in self._pending:
            (slot,) = self.pool.allocate(1)
            self._pending[request.request_id, end] = slot, prefix_hash
        return self._pending[request.request_id, end][0]

    def complete(self, request: Request, end: int) -> None:
        """Make the snapshot after `end` tokens usable, if one was begun: its step succeeded."""
        found = self._pending.pop((request.request_id, end), None)
        if found is not None:
            slot, prefix_hash = found
            self.pool.remember([slot], [prefix_hash])
            self.pool.free([slot])

    def drop(self, request: Request) -> None:
        """Give up the snapshots that were begun for a request."""
        for key in [key for key in self._pending if key[0] == request.request_id]:
            slot, _ = self._pending.pop(key)
            self.pool.free([slot])

    def violations(self) -> list[str]:
        """The violated invariants of the pool; empty if all hold. Linear in its size."""
        found = [f"snapshots: {law}" for law in self.pool.violations()]
        slots = [slot for slot, _ in self._pending.values()]
        wrong = [
            slot
            for slot in range(self.pool.num_blocks)
            if self.pool.reference_count(slot) != slots.count(slot)
        ]
        if wrong:
            found.append(f"snapshot {wrong[0]} is owned by no step, or by several")
        return found

    def _ends(self, request: Request, start: int) -> Iterator[int]:
        """Where a snapshot is worth its slot, ascending; some are at `start` or before it.

        At the last boundary that an equal prompt can begin behind, since its last token must be
        computed; where cached blocks ended that had no snapshot; and after every so many tokens.
        The cached blocks of a preempted request may end in its output, where none is taken.
        """
        last = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        ends = {last, min(request.parted_at, last)}
        if self._every_tokens:
            ends.update(range(start - start % self._every_tokens, last, self._every_tokens))
        yield from sorted(ends)

    def _is_worth(self, request: Request, end: int, prefix_hash: bytes) -> bool:
        """Whether it is begun already, or new, with a slot for it; others may have begun it."""
        if (request.request_id, end) in self._pending:
            return True
        if not self.pool.num_free or self.pool.lookup(prefix_hash) is not None:
            return False
        return all(known != prefix_hash for _, known in self._pending.values())
