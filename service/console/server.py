"""Runs a console in one event loop: opens the socket, serves, ends at a signal."""

import asyncio

import redis
import structlog

from quire.transport.connection import connect
from service.console.access import Users
from service.console.app import Console
from service.console.reading.queue import QueueReading
from service.console.settings import ConsoleSettings
from service.shared.http.heads import TimedConnection
from service.shared.http.server import serving
from service.shared.http.sockets import listening
from service.shared.process import on_signals

#: How long responses may take once the console ends.
CLOSE_SECONDS = 5

#: How long a browser that reads nothing keeps its connection.
PATIENCE_SECONDS = 60.0

#: The most connections at once; more are refused with 503.
MAX_CONNECTIONS = 1000

_log = structlog.get_logger("service.console")


class ConsoleServer:
    """One console and its socket.

    Raises:
        ConfigurationError: the address cannot be listened on, or the file of users is wrong.
    """

    def __init__(self, settings: ConsoleSettings) -> None:
        self._settings = settings
        self._users = Users(settings.users_file, may_write=settings.role == "operator")
        self._socket = listening(
            settings.http_host,
            settings.http_port,
            patience_seconds=PATIENCE_SECONDS,
            kind="console",
        )
        self._stopping = asyncio.Event()

    @property
    def http_port(self) -> int:
        """The port that the console listens on."""
        return int(self._socket.getsockname()[1])

    def stop(self) -> None:
        """End: open pages show their last state."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until a signal comes."""
        on_signals(self.stop, reload=self._users.reload_and_tell)
        connection = connect(self._settings.connection_url, block_seconds=0.0)
        try:
            await self.serve(connection)
        finally:
            connection.close()

    async def serve(self, connection: redis.Redis) -> None:
        """Serve over this connection until `stop` is called."""
        settings = self._settings
        queues = [
            QueueReading(
                connection,
                name,
                shards=settings.shards,
                max_queue_seconds=settings.max_queue_seconds,
                retention_seconds=settings.retention_seconds,
            )
            for name in settings.queues
        ]
        console = Console(queues, settings, self._users)
        async with serving(
            console.app,
            self._socket,
            close_seconds=CLOSE_SECONDS,
            http=TimedConnection,
            forwarded_allow_ips=list(settings.trusted_proxies),
            limit_concurrency=MAX_CONNECTIONS,
        ) as server:
            watching = asyncio.create_task(console.watch())
            stopping = asyncio.create_task(self._stopping.wait())
            self._log_ready()
            await asyncio.wait({server, stopping}, return_when=asyncio.FIRST_COMPLETED)
            console.close()
            for task in (watching, stopping):
                task.cancel()
        _log.info("console stopped")

    def _log_ready(self) -> None:
        settings = self._settings
        _log.info(
            "console ready",
            queues=list(settings.queues),
            role=settings.role,
            http_host=settings.http_host,
            http_port=self.http_port,
        )
        if not self._users.are_required:
            able = "change the queues and read" if settings.role == "operator" else "read"
            _log.warning(f"no users_file: who reaches this port may {able} all prompts and outputs")
