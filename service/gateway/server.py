"""Runs a gateway in one event loop: opens the socket, serves, drains, closes."""

import asyncio

import structlog

from quire.client.client_async import AsyncClient
from service.gateway.callers import ApiKeys
from service.gateway.http.connection import Connection
from service.gateway.http.lifecycle import Lifecycle
from service.gateway.routes import Gateway
from service.gateway.settings import GatewaySettings
from service.shared.http.server import serving
from service.shared.http.sockets import listening
from service.shared.process import on_signals

#: How long answers that are broken off may take to send their last event.
CLOSE_SECONDS = 5.0

#: How long a connection may be idle between two calls. Longer than the usual timeout of proxies, so
#: that the proxy closes first and sends no call over a connection that the gateway is closing.
KEEP_ALIVE_SECONDS = 75

_log = structlog.get_logger("service.gateway")


class GatewayServer:
    """One gateway and its socket.

    Raises:
        ConfigurationError: the address cannot be listened on, or the file of keys is wrong.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._keys = ApiKeys(settings.keys_file, allowed_origins=settings.allowed_origins)
        self._socket = listening(
            settings.http_host,
            settings.http_port,
            patience_seconds=settings.patience_seconds,
            kind="gateway",
        )
        self._lifecycle = Lifecycle(
            max_open=settings.max_open_answers,
            max_open_per_tenant=settings.max_open_answers_per_tenant,
        )
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()

    @property
    def http_port(self) -> int:
        """The port that the gateway listens on."""
        return int(self._socket.getsockname()[1])

    def stop(self) -> None:
        """Drain and end. A second call, of a second signal, breaks off the answers still open."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def run(self) -> None:
        """Serve until a signal comes, then drain: let the open answers end, or break them off."""
        settings = self._settings
        on_signals(self.stop, reload=self._keys.reload_and_tell)
        async with AsyncClient(
            settings.connection_url,
            queue=settings.queue,
            shards=settings.shards,
            durable=settings.durable,
            max_queue_seconds=settings.max_queue_seconds,
            retention_seconds=settings.retention_seconds,
        ) as client:
            await self.serve(client)

    async def serve(self, client: AsyncClient) -> None:
        """Serve with this client until `stop` is called."""
        gateway = Gateway(client, self._settings, keys=self._keys, lifecycle=self._lifecycle)
        async with serving(
            gateway.app,
            self._socket,
            close_seconds=CLOSE_SECONDS,
            http=Connection,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ) as server:
            self._log_ready()
            stopping = asyncio.create_task(self._stopping.wait())
            await asyncio.wait({server, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not server.done():
                await self._drain()
            stopping.cancel()
        await gateway.close()

    async def _drain(self) -> None:
        self._lifecycle.drain()
        _log.info("draining", open_answers=self._lifecycle.num_open)
        idle = asyncio.create_task(self._lifecycle.until_idle(self._settings.drain_seconds))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({idle, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, hurry):
            task.cancel()
        num_broken = self._lifecycle.num_open
        self._lifecycle.close()
        await self._lifecycle.until_idle(CLOSE_SECONDS)
        _log.info("drained", broken_off=num_broken)

    def _log_ready(self) -> None:
        settings = self._settings
        _log.info(
            "gateway ready",
            queue=settings.queue,
            http_host=settings.http_host,
            http_port=self.http_port,
        )
        if not self._keys.are_required:
            _log.warning("no keys_file: everyone who can reach this port may use the queue")
