"""The requests that run, and where each of them stands. Knows no blocks, budgets, queue or plan.

A running request either catches up, with several tokens to compute, or is among the decodes. Its
state and its counters are the Scheduler's to change; here it only moves between the sets.
"""

from collections import Counter
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.request import Request
from engine.scheduling.decode_set import DecodeSet


class RunningSet:
    """The running requests by id, in the order of their admission."""

    def __init__(self, config: EngineConfig) -> None:
        #: Never more than tokens per step, so that no decode has to skip a step and no running
        #: prompt starves behind decodes.
        self.max_requests = min(config.max_num_seqs, config.max_num_batched_tokens)
        self.requests: dict[str, Request] = {}
        self.catching_up: dict[str, Request] = {}
        self.decodes = DecodeSet(config, max_requests=self.max_requests)
        #: Out of `requests`, but the launched step will still bring their last token.
        self.ending: dict[str, Request] = {}
        #: Requests whose activity may have changed since the last `take_moved`; none has finished.
        self._moved: dict[str, Request] = {}
        self._num_of_class: Counter[int] = Counter()
        self._num_needing_tokens = 0

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def needs_tokens(self) -> bool:
        """Whether a request's next token cannot be chosen before its last one is known."""
        return self._num_needing_tokens > 0

    def has_class_below(self, priority: int) -> bool:
        """Whether a request of a lower class than this one runs."""
        return any(self._num_of_class[lower] for lower in range(priority))

    def num_of_class(self, priority: int) -> int:
        """How many requests of this class run."""
        return self._num_of_class[priority]

    def join(self, request: Request) -> None:
        """Add an admitted request; it catches up."""
        self.requests[request.request_id] = self.catching_up[request.request_id] = request
        self._moved[request.request_id] = request
        self._num_of_class[request.priority] += 1
        self._num_needing_tokens += request.needs_known_tokens

    def start_decoding(self, request: Request, block_ids: Sequence[int]) -> None:
        """Move one that has caught up to the decodes; `block_ids` is its live block table."""
        del self.catching_up[request.request_id]
        self._moved[request.request_id] = request
        self.decodes.join(request, block_ids)

    def stop_decoding(self, request: Request) -> None:
        """Move a decode that gets a draft back to those that catch up, until that is checked."""
        self.decodes.leave(request)
        self.catching_up[request.request_id] = request

    def expect_end(self, request: Request) -> None:
        """Free a request's slot, but not its blocks: a launched step brings its last token."""
        self.leave(request)
        self.ending[request.request_id] = request

    def preempt(self, request: Request) -> None:
        """Take out a request that will come back."""
        self.leave(request)
        self._moved[request.request_id] = request

    def take_moved(self) -> dict[str, Request]:
        """The requests, by id, that joined, began to decode or were preempted since the last call.

        Never more than there are alive: one that finishes is forgotten.
        """
        moved, self._moved = self._moved, {}
        return moved

    def forget(self, request: Request) -> None:
        """Note that a request, running or preempted, has finished."""
        self._moved.pop(request.request_id, None)

    def leave(self, request: Request) -> None:
        """Take out a request that has finished or was preempted, or one whose end was expected."""
        if self.ending.pop(request.request_id, None) is not None:
            return
        del self.requests[request.request_id]
        self._num_of_class[request.priority] -= 1
        self._num_needing_tokens -= request.needs_known_tokens
        if self.catching_up.pop(request.request_id, None) is None:
            self.decodes.leave(request)
