"""The requests that wait for admission, best rank first. Knows nothing of blocks or budgets."""

import heapq

from engine.request import Priority, Request, RequestState

#: States of the requests that wait; heap entries of any other are dead.
WAITING_STATES = frozenset({RequestState.WAITING, RequestState.PREEMPTED})
#: Dead entries tolerated before the heaps are rebuilt, so that many aborts cannot make them grow.
MAX_DEAD_ENTRIES = 64

_Entry = tuple[tuple[float, int], Request]


class WaitingQueue:
    """A heap per class, with lazy deletion: an aborted request stays until it is on top, or longer.

    Each waiting or preempted request has exactly one entry, so a rank never has to be searched for.
    """

    def __init__(self) -> None:
        self._heaps: dict[int, list[_Entry]] = {level: [] for level in Priority}
        self._num_dead = 0
        self._preempted_ids: set[str] = set()

    def __len__(self) -> int:
        return self._num_entries - self._num_dead

    @property
    def num_preempted(self) -> int:
        """How many of them were running before."""
        return len(self._preempted_ids)

    def push(self, request: Request) -> None:
        assert request.state in WAITING_STATES
        heapq.heappush(self._heaps[request.priority], (request.rank, request))
        if request.state is RequestState.PREEMPTED:
            self._preempted_ids.add(request.request_id)

    def peek(self, above: int | None = None, *, only: int | None = None) -> Request | None:
        """The request that comes next, left in place.

        Only of classes better than `above`, or of the class `only`.
        """
        heaps = [
            heap
            for level, heap in self._heaps.items()
            if (above is None or level > above) and (only is None or level == only)
        ]
        tops = [heap[0] for heap in heaps if self._has_top(heap)]
        return min(tops)[1] if tops else None

    def pop(self, above: int | None = None, *, only: int | None = None) -> Request:
        """Remove and return what `peek` returns; its state is the caller's to change."""
        request = self.peek(above, only=only)
        assert request is not None
        heapq.heappop(self._heaps[request.priority])
        self._preempted_ids.discard(request.request_id)
        return request

    def mark_dead(self, request: Request) -> None:
        """Note that a queued request has just left the waiting states without being popped."""
        self._preempted_ids.discard(request.request_id)
        self._num_dead += 1
        if self._num_dead > max(MAX_DEAD_ENTRIES, self._num_entries // 2):
            for heap in self._heaps.values():
                heap[:] = [entry for entry in heap if entry[1].state in WAITING_STATES]
                heapq.heapify(heap)
            self._num_dead = 0

    @property
    def _num_entries(self) -> int:
        return sum(map(len, self._heaps.values()))

    def _has_top(self, heap: list[_Entry]) -> bool:
        """Drop the dead entries on top of a heap; whether an entry is left."""
        while heap and heap[0][1].state not in WAITING_STATES:
            heapq.heappop(heap)
            self._num_dead -= 1
        return bool(heap)
