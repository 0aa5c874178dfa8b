"""Reads the log of a response from its beginning to its end, whatever that is. Knows no HTTP."""

from collections.abc import AsyncGenerator

from quire.client.following import raise_unless_completed
from quire.errors import ResultExpired, UnknownRequest
from quire.wire.output import Completion
from service.gateway.answers import Answer, Update, merged


class ResponseLog(Answer):
    """The answer whose failure is a part of it, and no error.

    While `raises_failure`, a failure before the first token is raised all the same, so that it can
    become the status of the answer.
    """

    raises_failure = False

    async def updates(self, *, idle_seconds: float) -> AsyncGenerator[Update | None, None]:
        """See Answer."""
        async for item in merged([self._reads()], self._closing, idle_seconds=idle_seconds):
            yield item

    async def _reads(self) -> AsyncGenerator[Update, None]:
        handle = self._client.attach(self.record.id)
        try:
            # The stream itself says why it waits.
            async for updates in handle.follow_reads(explains=False):
                if self.raises_failure and isinstance(updates[0], Completion):
                    raise_unless_completed(updates[0])
                self.raises_failure = False
                yield 0, updates
        except UnknownRequest as unknown:
            raise ResultExpired(unknown.request_id) from unknown
