"""The handle of a group for coroutines; its procedures are in group_handle.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from quire.client.group_handle import GroupReading, cancelling, counts_of
from quire.client.steps import in_loop
from quire.queue.async_broker import AsyncBroker
from quire.transport.procedure import run_async
from quire.wire.output import Completion, State


class AsyncGroupHandle:
    """One group, see `GroupHandle`. It has no state but the name, so it may be discarded."""

    def __init__(self, brokers: Sequence[AsyncBroker], group: str) -> None:
        self.group = group
        self._brokers = brokers

    def __repr__(self) -> str:
        return f"AsyncGroupHandle({self.group!r})"

    async def counts(self) -> dict[State, int]:
        """See `GroupHandle.counts`."""
        return await run_async(counts_of(self._brokers, self.group), in_loop)

    async def results(self, *, timeout: float | None = None) -> AsyncIterator[Completion]:
        """See `GroupHandle.results`."""
        results = GroupReading(self._brokers, self.group, timeout=timeout).results()
        while (completion := await run_async(results, in_loop)) is not None:
            yield completion

    async def wait(self, *, timeout: float | None = None) -> dict[State, int]:
        """See `GroupHandle.wait`."""
        reading = GroupReading(self._brokers, self.group, timeout=timeout)
        return await run_async(reading.wait(), in_loop)

    async def cancel(self) -> int:
        """See `GroupHandle.cancel`."""
        return await run_async(cancelling(self._brokers, self.group), in_loop)
