"""Which blocks hold the KV of which request. Knows no priorities, no device and no tensor.

Blocks are allocated for tokens about to be computed, never for tokens that may come. A request is
admitted when all of its *known* tokens fit. The blocks of its later chunks are then promised, that
is, reserved as a number, so that two half-computed prompts can never starve each other.

Every operation either succeeds or leaves the state as it was.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from struct import Struct

from engine.batch import BlockCopy
from engine.cache.block_pool import BlockPool
from engine.request import Request

#: Bytes of a content hash. 128 bits: a collision would serve one request another one's KV.
HASH_BYTES = 16
#: The hash of no bytes, copied for each block: creating one from its parameters takes longer.
NEW_HASH = hashlib.blake2b(digest_size=HASH_BYTES)
#: Personalizes the hash of a salt, so that no salt can be chosen to collide with a block's content.
SALT = b"salt"
#: Likewise for the name of an adapter.
ADAPTER = b"adapter"


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request: on the device, or on the host after a swap, never on both."""

    device_block_ids: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)
    #: Blocks that admission reserved for known tokens and that are not allocated yet.
    num_promised: int = 0
    #: Leading full blocks whose hashes the pool knows.
    num_remembered: int = 0


class KVCache:
    """Block tables, prefix matching, and swapping to a bounded host pool."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self.num_promised = 0
        self._tables: dict[str, BlockTable] = {}
        self._host_blocks_in_flight: list[int] = []
        self._pack = Struct(f"{block_size}i").pack

    @property
    def num_available(self) -> int:
        """Blocks that are free and promised to nobody."""
        return self.pool.num_free - self.num_promised

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens: 0, 1, 16, 17 -> 0, 1, 1, 2 with 16-token blocks."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, request_id: str) -> Sequence[int]:
        """A read-only, live view of the request's device blocks, in position order."""
        return self._tables[request_id].device_block_ids

    def holds(self, request_id: str) -> bool:
        return request_id in self._tables

    def is_swapped(self, request_id: str) -> bool:
        table = self._tables.get(request_id)
        return table is not None and bool(table.host_block_ids)

    def lacking_blocks(self, request: Request, *, without: Sequence[str] = ()) -> Iterator[int]:
        """Blocks lacking to admit a request with all its known tokens; negative if some are left.

        Yields the number as things are; then without the first, the first two, ... requests of
        `without`, so that a preemption can be checked before it is committed.
        """
        lacking = self._blocks_to_admit(request) - self.num_available
        yield lacking
        # A block shared with the request does not count: freed, it would have to be revived for it.
        shared = set() if self.is_swapped(request.request_id) else set(self._match_prefix(request))
        given_up: Counter[int] = Counter()
        for request_id in without:
            table = self._tables[request_id]
            given_up.update(table.device_block_ids)
            lacking -= table.num_promised + sum(
                given_up[block_id] == self.pool.reference_count(block_id)
                for block_id in table.device_block_ids
                if block_id not in shared
            )
            yield lacking

    def admit(self, request: Request) -> int:
        """Open a block table with the blocks found in the prefix cache, and promise the rest.

        Returns the number of tokens whose KV is already there: a multiple of the block size and
        less than `num_tokens`, because the last token has to be computed for its logits.
        """
        assert request.request_id not in self._tables
        assert self._blocks_to_admit(request) <= self.num_available
        hits = self._match_prefix(request)
        self.pool.touch(hits)
        promised = self.blocks_for(request.num_tokens) - len(hits)
        self._tables[request.request_id] = BlockTable(
            device_block_ids=hits, num_promised=promised, num_remembered=len(hits)
        )
        self.num_promised += promised
        return len(hits) * self.block_size

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Make the table hold `num_tokens` tokens; False, and unchanged, when the pool cannot."""
        table = self._tables[request_id]
        missing = self.blocks_for(num_tokens) - len(table.device_block_ids)
        if missing <= 0:
            return True
        from_promise = min(missing, table.num_promised)
        if missing - from_promise > self.num_available:
            return False
        table.num_promised -= from_promise
        self.num_promised -= from_promise
        table.device_block_ids.extend(self.pool.allocate(missing))
        return True

    def grow_by_a_block(self, requests: Sequence[Request]) -> bool:
        """`grow` these to all their tokens, for which each lacks at most one block; all or none."""
        short = []
        for request in requests:
            table = self._tables[request.request_id]
            if len(table.device_block_ids) * self.block_size < request.num_tokens:
                short.append(table)
        promised = [table for table in short if table.num_promised]
        if len(short) - len(promised) > self.num_available:
            return False
        for table in promised:
            table.num_promised -= 1
        self.num_promised -= len(promised)
        for table, block_id in zip(short, self.pool.allocate(len(short)), strict=True):
            table.device_block_ids.append(block_id)
        return True

    def shrink(self, request_id: str, num_tokens: int) -> None:
        """Free the blocks beyond `num_tokens` tokens; the request must have none promised."""
        table = self._tables[request_id]
        assert table.num_promised == 0
        kept = self.blocks_for(num_tokens)
        self.pool.free(table.device_block_ids[kept:])
        del table.device_block_ids[kept:]

    def remember(self, computed: Iterable[tuple[Request, int]]) -> None:
        """Put newly filled blocks into the prefix cache; `computed` says how many tokens of each.

        Called only after the step succeeded.
        """
        if not self.enable_prefix_caching:
            return
        block_ids: list[int] = []
        hashes: list[bytes] = []
        for request, num_computed in computed:
            table = self._tables[request.request_id]
            first, end = table.num_remembered, num_computed // self.block_size
            if first < end:
                hashes += self._block_hashes(request, end)[first:end]
                block_ids += table.device_block_ids[first:end]
                table.num_remembered = end
        self.pool.remember(block_ids, hashes)

    def free(self, request_id: str) -> None:
        """Free all that the request holds on device and host; it may hold nothing."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.num_promised -= table.num_promised
            self.pool.free(table.device_block_ids)
            self.host_pool.free(table.host_block_ids)

    def can_swap_out(self, request: Request) -> bool:
        return 0 < self.blocks_for(request.num_computed_tokens) <= self.host_pool.num_free

    def swap_out(self, request: Request) -> list[BlockCopy]:
        """Move the computed blocks to the host; returns the copies the runner must make first."""
        table = self._tables[request.request_id]
        assert self.can_swap_out(request)
        assert not table.host_block_ids
        num_computed = self.blocks_for(request.num_computed_tokens)
        device_ids, table.device_block_ids = table.device_block_ids, []
        table.host_block_ids = self.host_pool.allocate(num_computed)
        self.num_promised -= table.num_promised
        table.num_promised = table.num_remembered = 0
        self.pool.free(device_ids)
        return [BlockCopy(*pair) for pair in zip(device_ids, table.host_block_ids, strict=False)]

    def swap_in(self, request: Request) -> list[BlockCopy]:
        """Bring the blocks back; returns the copies the runner must make before the step's rows."""
        table = self._tables[request.request_id]
        assert table.host_block_ids
        needed = self._blocks_to_admit(request)
        assert needed <= self.num_available
        host_ids, table.host_block_ids = table.host_block_ids, []
        table.device_block_ids = self.pool.allocate(len(host_ids))
        table.num_promised = needed - len(host_ids)
        self.num_promised += table.num_promised
        # A step swaps out before it swaps in: freed now, these could be overwritten before they
        # are read.
        self._host_blocks_in_flight += host_ids
        return [BlockCopy(*pair) for pair in zip(host_ids, table.device_block_ids, strict=True)]

    def end_of_step(self) -> None:
        """Free the host blocks that the last plan swaps in: later copies come after its own."""
        self.host_pool.free(self._host_blocks_in_flight)
        self._host_blocks_in_flight = []

    def violations(self, alive_request_ids: set[str]) -> list[str]:
        """The cache's invariants that do not hold; empty when all is well.

        Linear in pool and tables.
        """
        found = [f"device: {law}" for law in self.pool.violations()]
        found += [f"host: {law}" for law in self.host_pool.violations()]
        for pool, tables in (
            (self.pool, [table.device_block_ids for table in self._tables.values()]),
            (
                self.host_pool,
                [self._host_blocks_in_flight]
                + [table.host_block_ids for table in self._tables.values()],
            ),
        ):
            entries = sum(len(block_ids) for block_ids in tables)
            if sum(map(pool.reference_count, range(pool.num_blocks))) != entries:
                found.append("sum of references != sum of table entries")
        if self.num_promised != sum(table.num_promised for table in self._tables.values()):
            found.append("promised blocks do not add up")
        if self.num_available < 0:
            found.append("more blocks are promised than free")
        if any(t.device_block_ids and t.host_block_ids for t in self._tables.values()):
            found.append("a request is on the device and on the host at once")
        if leaked := self._tables.keys() - alive_request_ids:
            found.append(f"{len(leaked)} finished requests hold blocks")
        return found

    def _blocks_to_admit(self, request: Request) -> int:
        """Blocks that admission takes from `num_available`: new ones, and cached ones revived."""
        total = self.blocks_for(request.num_tokens)
        if self.is_swapped(request.request_id):
            return total
        hits = self._match_prefix(request)
        return total - sum(self.pool.reference_count(block_id) > 0 for block_id in hits)

    def _match_prefix(self, request: Request) -> list[int]:
        """The longest run of leading blocks whose content is on the device."""
        if not self.enable_prefix_caching:
            return []
        hits: list[int] = []
        num_blocks = (request.num_tokens - 1) // self.block_size
        for block_hash in islice(self._block_hashes(request, num_blocks), num_blocks):
            block_id = self.pool.lookup(block_hash)
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def _block_hashes(self, request: Request, num_blocks: int) -> Sequence[bytes]:
        """Hashes of at least the first `num_blocks` full blocks; each covers all tokens before it.

        The live list and not a copy: a long generation asks for it at every block it fills.
        """
        hashes = request.block_hashes
        while len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else _root(request)
            start = len(hashes) * self.block_size
            tokens = self._pack(*request.token_ids_between(start, start + self.block_size))
            block_hash = NEW_HASH.copy()
            block_hash.update(parent + tokens)
            hashes.append(block_hash.digest())
        return hashes


def _root(request: Request) -> bytes:
    """The parent hash of the first block; requests share blocks only if salt and adapter agree."""
    salt = request.cache_salt.encode()
    root = hashlib.blake2b(salt, digest_size=HASH_BYTES, person=SALT).digest()
    if request.adapter is None:
        return root
    # The root has a fixed length, so no two pairs of salt and adapter make the same bytes.
    pair = root + request.adapter.encode()
    return hashlib.blake2b(pair, digest_size=HASH_BYTES, person=ADAPTER).digest()
