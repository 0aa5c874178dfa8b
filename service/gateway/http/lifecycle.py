"""Counts a gateway's open answers, limits them, and drains the gateway. Knows no HTTP.

A draining gateway takes no more calls, lets the open answers go on for a while, and then breaks off
those that remain. Their requests go on, and any other gateway can send the rest.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from service.gateway.refusals import Refused, retry_later, too_many_open


class Lifecycle:
    """Admits at most `max_open` answers at a time, and breaks them off. For one event loop.

    One tenant may have at most `max_open_per_tenant` of them; None means no limit of its own.
    """

    def __init__(self, *, max_open: int, max_open_per_tenant: int | None = None) -> None:
        self.num_open = 0
        self.is_draining = False
        #: When set, all open answers break off.
        self.closing = asyncio.Event()
        self._max_open = max_open
        self._max_of_tenant = max_open if max_open_per_tenant is None else max_open_per_tenant
        #: Open answers by tenant. Tenants without one are removed, so that names do not pile up.
        self._open_of = Counter[str]()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def admitted(self, tenant: str) -> Iterator[None]:
        """A context in which an answer is open. Refused at a limit and while the gateway drains."""
        if self.is_draining:
            raise draining()
        if self.num_open >= self._max_open:
            message = f"this gateway has {self._max_open} answers open, which is its limit"
            raise retry_later("gateway_full", message)
        if self._open_of[tenant] >= self._max_of_tenant:
            raise Refused(too_many_open(tenant, self._max_of_tenant))
        self.num_open += 1
        self._open_of[tenant] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            self._open_of[tenant] -= 1
            if not self._open_of[tenant]:
                del self._open_of[tenant]
            if not self.num_open:
                self._idle.set()

    def drain(self) -> None:
        """Admit no more answers from now on."""
        self.is_draining = True

    def close(self) -> None:
        """Break off all open answers."""
        self.closing.set()

    async def until_idle(self, seconds: float) -> bool:
        """Wait up to `seconds` until no answer is open; returns whether none is."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def draining() -> Refused:
    """The refusal of a draining gateway."""
    return retry_later("gateway_draining", "this gateway is shutting down; use another one")
