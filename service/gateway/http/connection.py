"""One connection of a caller: it ends so that the caller can read the last answer.

A server that closes a socket with unread bytes makes the kernel reset the connection, and the reset
throws away the answer if the caller has not read it yet. This happens to a caller that sends its
whole body before it reads, when the answer does not wait for the body: 413, 401, 503 and others.
So after such an answer the gateway ends its own half of the connection, and for a bounded time and
size it reads and drops what still comes, until the caller closes. nginx does the same under the
name `lingering_close`. RFC 9112, section 9.6, asks for it.
"""

import asyncio
import json
import sys
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from service.gateway.refusals import Refusal

#: The longest time that a connection stays open after its last answer, whatever comes.
LINGER_SECONDS = 30.0

#: The same for a caller that sends nothing.
LINGER_IDLE_SECONDS = 5.0

#: The same once the gateway ends.
LINGER_LAST_SECONDS = 1.0

#: The most bytes that are read and dropped: a twentieth of a second of the event loop.
LINGER_BYTES = 256 << 20


class Connection(H11Protocol):
    """uvicorn's HTTP connection that drops the rest of a body instead of resetting.

    An answer that begins before the whole body has come closes the connection, and says so.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # uvicorn's types of messages are narrower than those of Starlette.
        self.app: Any = self._telling_the_end(config.loaded_app)
        self._lingering: _Lingering | None = None
        self._is_last = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Closing(transport, self))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lingering is not None:
            self._lingering.end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering is None:
            super().data_received(data)
        else:
            self._lingering.drop(len(data))

    def shutdown(self) -> None:
        """The gateway ends: nothing more is served here."""
        self._is_last = True
        if self._lingering is None:
            super().shutdown()
        else:
            self._lingering.shorten(LINGER_LAST_SECONDS)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answer what is no HTTP, if no other answer has begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            # uvicorn calls this while it handles the error.
            hint = getattr(sys.exception(), "error_status_hint", 400)
            self.transport.write(self._refusal(hint))
        self.transport.close()

    def linger(self, transport: asyncio.Transport) -> bool:
        """Begin to linger, if the caller may still be sending; returns whether it lingers."""
        is_sending = self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        if not is_sending and not self.conn.trailing_data[0]:
            return False
        if self.cycle is not None and not self.cycle.response_complete:
            # The handler must end now, and not when the connection is lost.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._unset_keepalive_if_required()
        seconds = LINGER_LAST_SECONDS if self._is_last else LINGER_SECONDS
        self._lingering = _Lingering(transport, self.loop, seconds=seconds)
        return True

    def _refusal(self, status: int) -> bytes:
        message = "the request is not HTTP as this gateway reads it"
        if status == 431:
            message = "the headers of the request are too large"
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

    def _telling_the_end(self, app: Any) -> ASGIApp:
        """The application, whose answers say `Connection: close` if a body is still coming."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def telling(message: Message) -> None:
                if (
                    message["type"] == "http.response.start"
                    and self.conn.their_state is h11.SEND_BODY
                ):
                    message = with_close(message)
                await send(message)

            await app(scope, receive, telling)

        return answer


def with_close(start: Message) -> Message:
    """The start of a response, after which the connection is closed."""
    kept = [pair for pair in start["headers"] if pair[0].lower() != b"connection"]
    return {**start, "headers": [*kept, (b"connection", b"close")]}


class _Lingering:
    """Reads and drops what comes on a connection, then closes it. Bounded in time and bytes."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, *, seconds: float
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._num_bytes = 0
        self._heard = loop.time()
        self._give_up = loop.time() + seconds
        # The caller sees the end of the answer; what it still sends can be read.
        transport.write_eof()
        transport.resume_reading()
        self._timer = loop.call_later(min(seconds, LINGER_IDLE_SECONDS), self._look)

    def drop(self, num_bytes: int) -> None:
        """So many bytes have come."""
        self._heard = self._loop.time()
        self._num_bytes += num_bytes
        if self._num_bytes > LINGER_BYTES:
            self.end()

    def shorten(self, seconds: float) -> None:
        """Linger no longer than this from now on."""
        self._give_up = min(self._give_up, self._loop.time() + seconds)
        self._timer.cancel()
        self._look()

    def end(self) -> None:
        """Close the connection; harmless when repeated."""
        self._timer.cancel()
        self._transport.close()

    def _look(self) -> None:
        # One timer for all pieces that come: it looks again when the last one was long ago.
        due = min(self._give_up, self._heard + LINGER_IDLE_SECONDS)
        if self._loop.time() >= due:
            self.end()
        else:
            self._timer = self._loop.call_at(due, self._look)


class _Closing(asyncio.Transport):
    """A transport whose `close` lingers where the connection needs it."""

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
