"""The requests that wait for admission, best rank first. Knows nothing of blocks or budgets."""

import heapq

from engine.request import Request, RequestState

#: States of the requests that wait; heap entries of any other are dead.
WAITING_STATES = frozenset({RequestState.WAITING, RequestState.PREEMPTED})
#: Dead entries tolerated before the heap is rebuilt, so that many aborts cannot make it grow.
MAX_DEAD_ENTRIES = 64


class WaitingQueue:
    """A heap with lazy deletion: an aborted request stays until it is on top or at a rebuild.

    Each waiting or preempted request has exactly one entry, so a rank never has to be searched for.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Request]] = []
        self._num_dead = 0
        self._preempted_ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    @property
    def num_preempted(self) -> int:
        """How many of them were running before."""
        return len(self._preempted_ids)

    def push(self, request: Request) -> None:
        assert request.state in WAITING_STATES
        heapq.heappush(self._heap, (request.rank, request))
        if request.state is RequestState.PREEMPTED:
            self._preempted_ids.add(request.request_id)

    def peek(self) -> Request | None:
        """The request that comes next, left in place."""
        while self._heap and self._heap[0][1].state not in WAITING_STATES:
            heapq.heappop(self._heap)
            self._num_dead -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Remove and return the request that comes next; its state is the caller's to change."""
        request = self.peek()
        assert request is not None
        heapq.heappop(self._heap)
        self._preempted_ids.discard(request.request_id)
        return request

    def mark_dead(self, request: Request) -> None:
        """Note that a queued request has just left the waiting states without being popped."""
        self._preempted_ids.discard(request.request_id)
        self._num_dead += 1
        if self._num_dead > max(MAX_DEAD_ENTRIES, len(self._heap) // 2):
            self._heap = [entry for entry in self._heap if entry[1].state in WAITING_STATES]
            heapq.heapify(self._heap)
            self._num_dead = 0
