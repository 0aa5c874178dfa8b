"""Closes connections on which no request comes.

uvicorn begins its time for an idle connection after an answer only, and one byte ends it. A
connection without a request is no open answer, so callers could keep any number of them.
"""

import asyncio
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from service.shared.http.strict import StrictConnection

#: The longest time from the first byte of a request to the end of its headers.
HEAD_SECONDS = 30.0


class TimedConnection(H11Protocol):
    """uvicorn's HTTP connection; it is closed if it stays idle, or if headers do not come.

    Requests are read strictly, see `strict.py`.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = StrictConnection()
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:
            # The next request has begun, and perhaps no more of it comes.
            self._limit_head()

    def refuse_head(self) -> None:
        """Answer headers that do not come to their end. The connection is closed after that."""

    def _limit_head(self) -> None:
        """Start the time for the headers that have begun, or stop it when they are complete."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_head_up)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_head_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.refuse_head()
            self.transport.close()
