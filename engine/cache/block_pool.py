"""The allocator of all physical KV blocks. Knows no request, no token and no device.

A block is in exactly one of three states:

    blank    unused, its content is not needed
    cached   unused, but its content is known by hash and may be reused
    owned    referenced by at least one block table

so `num_blank + num_cached + num_owned == num_blocks` always holds. Blank and cached blocks are
free. Blank blocks are allocated first, then cached blocks, the least recently used first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Allocates blocks `0 .. num_blocks - 1`, counts references, and finds content by hash."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0
        self.num_blocks = num_blocks
        self._reference_counts = [0] * num_blocks
        self._hash_of_block: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        # Popped from the end: a new pool allocates 0, 1, 2, ... which makes traces readable.
        self._blank = list(range(num_blocks - 1, -1, -1))
        # Least recently used first. An OrderedDict is a linked list with constant-time removal of
        # any entry, which is needed when a block is reused before it is evicted.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, cached blocks included."""
        return len(self._blank) + len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_free

    def reference_count(self, block_id: int) -> int:
        """Number of block tables that contain the block."""
        return self._reference_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each; evict cached blocks only if necessary.

        `count` must not exceed `num_free`.
        """
        assert 0 <= count <= self.num_free
        block_ids = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._reference_counts[block_id] = 1
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; cached blocks become owned."""
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                del self._cached[block_id]
            self._reference_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference on each block.

        Processes the blocks in reverse order, so that the end of a freed sequence is evicted before
        its beginning: the first blocks of a prefix can be used without the last ones, but not the
        other way round.
        """
        for block_id in reversed(block_ids):
            assert self._reference_counts[block_id] > 0, f"block {block_id} freed twice"
            self._reference_counts[block_id] -= 1
            if self._reference_counts[block_id] == 0:
                if self._hash_of_block[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._cached[block_id] = None

    def lookup(self, block_hash: bytes) -> int | None:
        """The owned or cached block with this content; None if there is none."""
        return self._block_of_hash.get(block_hash)

    def remember(self, block_ids: Iterable[int], hashes: Iterable[bytes]) -> None:
        """Record the content hashes of owned blocks, one for each.

        If two requests have computed the same content in different blocks, only the first block
        gets the hash.
        """
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            assert self._reference_counts[block_id] > 0
            if self._hash_of_block[block_id] is None:
                first = self._block_of_hash.setdefault(block_hash, block_id)
                if first == block_id:
                    self._hash_of_block[block_id] = block_hash

    def violations(self) -> list[str]:
        """The violated invariants of the pool; empty if all hold. Linear in the pool's size."""
        found = []
        free = [*self._blank, *self._cached]
        if len(set(free)) != len(free):
            found.append("a block is free twice")
        if any(self._reference_counts[block_id] for block_id in free):
            found.append("a block is free and owned at once")
        if sum(count > 0 for count in self._reference_counts) != self.num_owned:
            found.append("blank + cached + owned != total")
        if any(self._hash_of_block[block_id] is None for block_id in self._cached):
            found.append("a cached block has no hash")
        if any(self._hash_of_block[b] != h for h, b in self._block_of_hash.items()):
            found.append("the hash tables contradict each other")
        return found

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of_block[block_id]
        assert block_hash is not None
        del self._block_of_hash[block_hash]
        self._hash_of_block[block_id] = None
        return block_id
