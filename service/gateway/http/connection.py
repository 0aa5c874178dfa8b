"""One connection of a caller, closed in a way that lets the caller read the last answer.

If a server closes a socket that has unread bytes, the kernel resets the connection. The reset
discards the answer if the caller has not read it yet. This happens when the answer does not wait
for the body (413, 401, 503 and others) and the caller sends its complete body before it reads. So
after such an answer the gateway closes only its own half of the connection. It then reads and drops
the caller's bytes until the caller closes, for a bounded time and size. nginx calls this
`lingering_close`; RFC 9112, section 9.6, recommends it.
"""

import asyncio
import json
import sys
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES
from uvicorn.server import ServerState

from service.gateway.refusals import Refusal
from service.shared.http.heads import TimedConnection
from service.shared.http.strict import UnclearRequest

#: The most bytes that are parsed without a pause. asyncio reads 256 KiB at once: in chunks of one
#: byte each they take a third of a second.
READ_BYTES = 32 << 10

#: The longest time that a connection stays open after its last answer.
LINGER_SECONDS = 30.0

#: The longest time that it stays open while the caller sends nothing.
LINGER_IDLE_SECONDS = 5.0

#: The longest time that it stays open once the gateway shuts down.
LINGER_LAST_SECONDS = 1.0

#: The most bytes that are read and dropped. Reading them takes the event loop tenths of a second.
LINGER_BYTES = 256 << 20


class Connection(TimedConnection):
    """uvicorn's HTTP connection, which drops the rest of a body instead of resetting.

    An answer that begins before its complete body has come has `Connection: close`.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # Any, because uvicorn's message types are narrower than Starlette's.
        self.app: Any = self._announcing_close(config.loaded_app)
        self._lingering: _Lingering | None = None
        self._is_last = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES
        super().connection_made(_LingeringTransport(transport, self))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lingering is not None:
            self._lingering.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering is None:
            super().data_received(data)
        else:
            self._lingering.drop(len(data))

    def refuse_head(self) -> None:
        """Answer headers that do not come to their end."""
        message = "the headers of the request did not come to their end in time"
        self.transport.write(self._refusal(408, message))

    def shutdown(self) -> None:
        """Close the connection as soon as its answer has ended: the gateway shuts down."""
        self._is_last = True
        if self._lingering is None:
            super().shutdown()
        else:
            self._lingering.shorten(LINGER_LAST_SECONDS)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answer bytes that are not valid HTTP, unless an answer has begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            # uvicorn calls this in its `except` clause, so the error is the current exception.
            error = sys.exception()
            status = getattr(error, "error_status_hint", 400)
            message = "the request is not HTTP as this gateway reads it"
            if isinstance(error, UnclearRequest):
                message = str(error)
            elif status == 431:
                message = "the headers of the request are too large"
            self.transport.write(self._refusal(status, message))
        self.transport.close()

    def linger(self, transport: asyncio.Transport) -> bool:
        """Start lingering if the caller may still be sending; returns whether it does."""
        is_sending = self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if not is_sending and not self.conn.trailing_data[0]:
            return False
        if self.cycle is not None and not self.cycle.response_complete:
            # End the handler now. uvicorn would end it only when the connection is lost.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._unset_keepalive_if_required()
        seconds = LINGER_LAST_SECONDS if self._is_last else LINGER_SECONDS
        self._lingering = _Lingering(transport, self.loop, seconds=seconds)
        return True

    def _refusal(self, status: int, message: str) -> bytes:
        body = json.dumps(Refusal(status, "invalid_request", message).body).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        reason = STATUS_PHRASES[status]
        events = (
            h11.Response(status_code=status, headers=headers, reason=reason),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        return b"".join(self.conn.send(event) or b"" for event in events)

    def _announcing_close(self, app: Any) -> ASGIApp:
        """The application; answers that begin before their body ends get `Connection: close`."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_with_close(message: Message) -> None:
                if (
                    message["type"] == "http.response.start"
                    and self.conn.their_state is h11.SEND_BODY
                ):
                    message = with_close(message)
                await send(message)

            await app(scope, receive, send_with_close)

        return answer


def with_close(start: Message) -> Message:
    """The same start of a response, with `Connection: close`."""
    kept = [pair for pair in start["headers"] if pair[0].lower() != b"connection"]
    return {**start, "headers": [*kept, (b"connection", b"close")]}


class _Lingering:
    """Reads and drops the bytes of a connection, then closes it. Bounded in time and bytes."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, *, seconds: float
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._num_bytes = 0
        self._heard = loop.time()
        self._give_up = loop.time() + seconds
        # Closes our half: the caller sees the end of the answer, and its bytes can still be read.
        transport.write_eof()
        transport.resume_reading()
        self._timer = loop.call_later(min(seconds, LINGER_IDLE_SECONDS), self._look)

    def drop(self, num_bytes: int) -> None:
        """Count bytes that were received and dropped; close after too many."""
        self._heard = self._loop.time()
        self._num_bytes += num_bytes
        if self._num_bytes > LINGER_BYTES:
            self.end()

    def shorten(self, seconds: float) -> None:
        """Linger at most for this long from now on."""
        self._give_up = min(self._give_up, self._loop.time() + seconds)
        self._timer.cancel()
        self._look()

    def end(self) -> None:
        """Close the connection; harmless when repeated."""
        self._timer.cancel()
        self._transport.close()

    def _look(self) -> None:
        # One timer serves all received pieces. When it fires, it is set again to the idle timeout
        # of the last piece.
        due = min(self._give_up, self._heard + LINGER_IDLE_SECONDS)
        if self._loop.time() >= due:
            self.end()
        else:
            self._timer = self._loop.call_at(due, self._look)


class _LingeringTransport(asyncio.Transport):
    """A transport whose `close` lingers if the caller may still be sending."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__()
        self._transport = transport
        self._connection = connection
        self._is_closed = False

    def close(self) -> None:
        if self.is_closing():
            return
        self._is_closed = True
        if not self._connection.linger(self._transport):
            self._transport.close()

    def is_closing(self) -> bool:
        return self._is_closed or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closed:
            self._transport.write(data)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
