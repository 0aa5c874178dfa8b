"""The block tables of requests. Knows no priorities, no device and no tensor.

Beside its blocks a running request may hold a slot for a recurrent state: see `state_slots`. Then
a cached prefix can be used only as far as it has a snapshot of that state: see `state_snapshots`.

Blocks are allocated for tokens that the next step computes, never for future tokens. A request is
admitted when all of its *known* tokens fit. The blocks of its later chunks are then promised: their
number is reserved, so that two half-computed prompts can never block each other.

Every operation either succeeds or leaves the state unchanged.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, takewhile

from engine.batch import BlockCopy
from engine.cache.block_hashes import BlockHashes
from engine.cache.block_pool import BlockPool
from engine.cache.state_slots import StateMoves, StateSlots
from engine.cache.state_snapshots import StateSnapshots
from engine.config import EngineConfig
from engine.request import NO_SLOT, Request


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request: on the device or, after a swap, on the host, never on both."""

    device_block_ids: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)
    #: Number of blocks that are reserved for known tokens, but not yet allocated.
    num_promised: int = 0
    #: Number of leading full blocks whose hashes are recorded in the pool.
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
        num_state_slots: int = 0,
        num_host_state_slots: int = 0,
        num_state_snapshots: int = 0,
        snapshot_every_blocks: int = 0,
    ) -> None:
        assert not num_state_slots or enable_prefix_caching == (num_state_snapshots > 0)
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.states = StateSlots(num_state_slots, num_host_state_slots)
        self.snapshots = StateSnapshots(
            num_state_snapshots, block_size=block_size, every_blocks=snapshot_every_blocks
        )
        self.enable_prefix_caching = enable_prefix_caching
        self.num_promised = 0
        self._tables: dict[str, BlockTable] = {}
        self._host_blocks_in_flight: list[int] = []
        self._hashes = BlockHashes(block_size)

    @classmethod
    def of(cls, config: EngineConfig) -> "KVCache":
        """The cache of an engine."""
        return cls(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_host_blocks=config.num_host_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            num_state_slots=config.num_state_slots,
            num_host_state_slots=config.num_host_state_slots,
            num_state_snapshots=config.num_state_snapshots,
            snapshot_every_blocks=config.state_snapshot_blocks,
        )

    @property
    def num_available(self) -> int:
        """Number of blocks that are free and not promised."""
        return self.pool.num_free - self.num_promised

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for `num_tokens` tokens: 0, 1, 16, 17 -> 0, 1, 1, 2 for blocks of 16."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, request_id: str) -> Sequence[int]:
        """A read-only, live view of the request's device blocks, in position order."""
        return self._tables[request_id].device_block_ids

    def holds(self, request_id: str) -> bool:
        return request_id in self._tables

    def is_swapped(self, request_id: str) -> bool:
        table = self._tables.get(request_id)
        return table is not None and bool(table.host_block_ids)

    @property
    def num_swapped(self) -> int:
        """Requests whose KV is on the host."""
        if not self.host_pool.num_owned:
            return 0
        return sum(bool(table.host_block_ids) for table in self._tables.values())

    def lacking_blocks(self, request: Request, *, without: Sequence[str] = ()) -> Iterator[int]:
        """The number of missing blocks for admitting a request; negative if more than enough.

        Yields the current number; then the number after preempting the first request of `without`,
        the first two, and so on, so that preemptions can be checked before they are made.
        """
        lacking = self._blocks_to_admit(request) - self.num_available
        yield lacking
        # A block that the request itself would reuse does not count: admission takes it again.
        shared = set() if self.is_swapped(request.request_id) else set(self._match_prefix(request))
        released: Counter[int] = Counter()
        for request_id in without:
            table = self._tables[request_id]
            released.update(table.device_block_ids)
            lacking -= table.num_promised + sum(
                released[block_id] == self.pool.reference_count(block_id)
                for block_id in table.device_block_ids
                if block_id not in shared
            )
            yield lacking

    def admit(self, request: Request) -> int:
        """Create a block table from the blocks in the prefix cache, and promise the other blocks.

        Returns the number of tokens whose keys and values are cached: a multiple of the block size,
        and at most `max_cached_tokens`, because later tokens must be computed for their logits.
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
        self.states.take(request)
        num_cached = len(hits) * self.block_size
        if self.states.is_needed:
            request.parted_at = len(self._cached_prefix(request)) * self.block_size
            if hits:
                snapshot = self.snapshots.use(self._hashes.of_prefix(request, num_cached))
                self.states.restore(request, snapshot, num_cached)
        return num_cached

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Extend the table to `num_tokens` tokens; False and no change if blocks are missing."""
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
        """`grow` these requests to all their tokens, each by at most one block; all or none."""
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
        """Free the blocks after `num_tokens` tokens; the request must have no promised blocks."""
        table = self._tables[request_id]
        assert table.num_promised == 0
        kept = self.blocks_for(num_tokens)
        self.pool.free(table.device_block_ids[kept:])
        del table.device_block_ids[kept:]

    def next_snapshot(self, request: Request) -> int | None:
        """The number of tokens where its row must end, so that a snapshot can be taken there."""
        return self.snapshots.next_end(request, partial(self._hashes.of_prefix, request))

    def snapshot_slot(self, request: Request, end: int, next_snapshot: int | None) -> int:
        """The slot for a snapshot behind a row planned up to `end`; `NO_SLOT` if none is taken."""
        if next_snapshot != end:
            return NO_SLOT
        return self.snapshots.begin(request, end, self._hashes.of_prefix(request, end))

    def remember(self, computed: Iterable[tuple[Request, int]]) -> None:
        """Record newly filled blocks, and snapshots that were begun, in the prefix cache.

        `computed` has the requests, each with its number of computed tokens. Call it only after the
        step has succeeded.
        """
        if not self.enable_prefix_caching:
            return
        block_ids: list[int] = []
        hashes: list[bytes] = []
        for request, num_computed in computed:
            table = self._tables[request.request_id]
            first, end = table.num_remembered, num_computed // self.block_size
            if first < end:
                hashes += self._hashes.of_blocks(request, end)[first:end]
                block_ids += table.device_block_ids[first:end]
                table.num_remembered = end
            if self.states.is_needed:
                self.snapshots.complete(request, num_computed)
        self.pool.remember(block_ids, hashes)

    def free(self, request_id: str) -> None:
        """Free all blocks of the request, on device and host; it may have none."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            self.num_promised -= table.num_promised
            self.pool.free(table.device_block_ids)
            self.host_pool.free(table.host_block_ids)

    def release(self, request: Request) -> None:
        """Free all that the request holds; it may hold nothing."""
        self.free(request.request_id)
        self.states.free(request)
        self.snapshots.drop(request)

    def can_swap_out(self, request: Request) -> bool:
        has_blocks = 0 < self.blocks_for(request.num_computed_tokens) <= self.host_pool.num_free
        return has_blocks and self.states.can_swap_out(request)

    def num_dropped_tokens(self, request: Request) -> int:
        """Computed tokens that would have to be computed again if the request were freed now.

        An estimate: its leading blocks stay if others hold them, and of the blocks behind these the
        prefix cache keeps as many as are free now, since those are handed out first.
        """
        table = self._tables[request.request_id]
        if not self.enable_prefix_caching:
            return request.num_computed_tokens
        known = table.device_block_ids[: table.num_remembered]
        num_shared = len(
            list(takewhile(lambda block_id: self.pool.reference_count(block_id) > 1, known))
        )
        num_kept = min(len(known), num_shared + max(0, self.num_available))
        if self.states.is_needed:
            num_kept = self.snapshots.longest(request.block_hashes, num_kept)
        return request.num_computed_tokens - num_kept * self.block_size

    def swap_out(self, request: Request) -> list[BlockCopy]:
        """Move computed blocks to the host; return the copies, which the runner must do first.

        A recurrent state moves with them, by the step's `StateMoves`.
        """
        table = self._tables[request.request_id]
        assert self.can_swap_out(request)
        assert not table.host_block_ids
        num_computed = self.blocks_for(request.num_computed_tokens)
        device_ids, table.device_block_ids = table.device_block_ids, []
        table.host_block_ids = self.host_pool.allocate(num_computed)
        self.num_promised -= table.num_promised
        table.num_promised = table.num_remembered = 0
        self.pool.free(device_ids)
        self.states.swap_out(request)
        self.snapshots.drop(request)
        return [BlockCopy(*pair) for pair in zip(device_ids, table.host_block_ids, strict=False)]

    def swap_in(self, request: Request) -> list[BlockCopy]:
        """Move the blocks back; return the copies, which the runner must do before the rows."""
        table = self._tables[request.request_id]
        assert table.host_block_ids
        needed = self._blocks_to_admit(request)
        assert needed <= self.num_available
        host_ids, table.host_block_ids = table.host_block_ids, []
        table.device_block_ids = self.pool.allocate(len(host_ids))
        table.num_promised = needed - len(host_ids)
        self.num_promised += table.num_promised
        # Not freed yet: a step swaps out before it swaps in, so a swap-out of the same step could
        # overwrite these blocks before they are read.
        self._host_blocks_in_flight += host_ids
        self.states.swap_in(request)
        return [BlockCopy(*pair) for pair in zip(host_ids, table.device_block_ids, strict=True)]

    def begin_step(self) -> StateMoves:
        """Begin to plan a step: returns its moves of states, to which later calls add."""
        # The host blocks that the last plan swaps in: later copies run after its own.
        self.host_pool.free(self._host_blocks_in_flight)
        self._host_blocks_in_flight = []
        return self.states.begin_step()

    def violations(self, alive_request_ids: set[str]) -> list[str]:
        """The violated invariants of the cache; empty if all hold.

        Linear in the sizes of pool and tables.
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
            holders = Counter(chain.from_iterable(tables))
            wrong = [b for b in range(pool.num_blocks) if pool.reference_count(b) != holders[b]]
            if wrong:
                found.append(f"block {wrong[0]} has other references than table entries")
            if any(len(set(block_ids)) != len(block_ids) for block_ids in tables):
                found.append("a table has one block twice")
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
        """Number of blocks that admission takes from `num_available`: new ones and cached ones."""
        total = self.blocks_for(request.num_tokens)
        if self.is_swapped(request.request_id):
            return total
        hits = self._match_prefix(request)
        return total - sum(self.pool.reference_count(block_id) > 0 for block_id in hits)

    def _match_prefix(self, request: Request) -> list[int]:
        """The longest cached prefix that the request can begin behind."""
        hits = self._cached_prefix(request)
        if self.states.is_needed:
            del hits[self.snapshots.longest(request.block_hashes, len(hits)) :]
        return hits

    def _cached_prefix(self, request: Request) -> list[int]:
        """The longest sequence of leading blocks whose content is on the device."""
        if not self.enable_prefix_caching:
            return []
        hits: list[int] = []
        num_blocks = request.max_cached_tokens // self.block_size
        for block_hash in islice(self._hashes.of_blocks(request, num_blocks), num_blocks):
            block_id = self.pool.lookup(block_hash)
            if block_id is None:
                break
            hits.append(block_id)
        return hits
