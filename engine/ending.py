"""What every engine does at the ends of a request: aborts, deadlines, replay, the last output.

Knows no scheduler, no cache and no device, so that engines with different ones share it.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from engine.config import EngineConfig
from engine.output.stopping import finish_reason_of
from engine.port import RequestOutput
from engine.request import FinishReason, Request, take_text

#: Deadlines of finished requests that may stay in the heap before it is rebuilt.
MAX_STALE_DEADLINES = 1024


class End(NamedTuple):
    """A request that must end now, and why."""

    request: Request
    reason: FinishReason
    error: str | None = None


class Endings:
    """The aborts and deadlines of one engine's requests.

    Everything but `abort` belongs to the engine's thread.
    """

    def __init__(self) -> None:
        self._aborts: deque[tuple[str, FinishReason, str | None]] = deque()
        self._deadlines: list[tuple[float, str]] = []

    @property
    def has_aborts(self) -> bool:
        """Whether an abort waits for the next `due`."""
        return bool(self._aborts)

    def abort(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        """Note an abort; callable from any thread, at any time."""
        self._aborts.append((request_id, reason, error))

    def watch(self, request: Request, *, alive: Mapping[str, Request]) -> None:
        """Watch the deadline of a request, if it has one; `alive` are the unfinished requests."""
        if request.deadline is None:
            return
        heapq.heappush(self._deadlines, (request.deadline, request.request_id))
        if len(self._deadlines) > 2 * len(alive) + MAX_STALE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in alive]
            heapq.heapify(self._deadlines)

    def due(self, now: float, *, alive: Mapping[str, Request]) -> Iterator[End]:
        """The requests that must end now.

        The caller takes each one out of `alive` before it asks for the next: a second abort of the
        same id is then ignored, like that of an unknown one.
        """
        while self._aborts:
            request_id, reason, error = self._aborts.popleft()
            request = alive.get(request_id)
            if request is not None:
                yield End(request, reason, error)
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            request = alive.get(request_id)
            # The entry may be that of an ended request whose id is in use again.
            if request is not None and request.deadline == deadline:
                yield End(request, FinishReason.DEADLINE)


def replay(request: Request, config: EngineConfig) -> FinishReason | None:
    """Feed the published tokens to the text; the reason if they end the generation.

    Where another tokenizer than ours decoded them, a stop string may be complete before the last
    one.
    """
    stop_string_found = False
    if request.text is not None:
        stop_string_found = any(map(request.text.append, request.output_token_ids))
        request.text.take_text(final=False)
    return finish_reason_of(request, config, stop_string_found=stop_string_found)


def last_output(
    request: Request, reason: FinishReason, *, error: str | None = None
) -> RequestOutput:
    """The output, without a token, of a request that ends outside of a step."""
    # A worker that resumes a released request replays its tokens, and so the held-back text.
    text = "" if reason is FinishReason.RELEASED else take_text(request, final=True)
    return RequestOutput(request, request.num_output_tokens, (), text, reason, error)
