"""Connections to a Redis Cluster for an event loop; see connection.py."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.asyncio.cluster import ClusterNode, NodesManager
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError

from quire.transport.cluster.connection import nodes_and_settings
from quire.transport.cluster.redirects import (
    MAX_REDIRECTS,
    OF_THE_NODE,
    Doubt,
    all_moved,
    as_redis_errors,
    elsewhere,
    may_be_parted,
    slot_of,
)


def connect_to_cluster_async(url: str, settings: Mapping[str, Any]) -> AsyncClusterConnection:
    """See `connect_to_cluster`."""
    addresses, own = nodes_and_settings(url, settings)
    return AsyncClusterConnection(AsyncNodes(addresses, own))


class AsyncNodes:
    """See `Nodes`. One connection more to a node asks who owns the slots."""

    def __init__(self, addresses: Sequence[tuple[str, int]], settings: Mapping[str, Any]) -> None:
        self._addresses = list(addresses)
        self.kind = SSLConnection if settings["ssl"] else Connection
        self.settings = {name: value for name, value in settings.items() if name != "ssl"}
        self._manager: NodesManager | None = None
        self._pools: dict[tuple[str, int], ConnectionPool] = {}
        self._doubt = Doubt()
        self._asking = asyncio.Lock()

    async def pool_of(self, slot: int | None) -> ConnectionPool:
        """See `Nodes.pool_of`."""
        manager = await self._current()
        with as_redis_errors():
            node = manager.default_node
            if slot is not None:
                # A slot without a node is a KeyError in some versions.
                found = manager.slots_cache.get(slot)
                node = found[0] if found else manager.get_node_from_slot(slot)
        return self.pool_at(node.host, int(node.port))

    def pool_at(self, host: str, port: int) -> ConnectionPool:
        """See `Nodes.pool_at`."""
        if (host, port) not in self._pools:
            pool = ConnectionPool(connection_class=self.kind, host=host, port=port, **self.settings)
            self._pools[host, port] = pool
        return self._pools[host, port]

    async def move(self, error: MovedError) -> None:
        """See `Nodes.move`."""
        await (await self._current()).move_slot(error)

    def doubt(self) -> None:
        """See `Nodes.doubt`."""
        self._doubt.raise_()

    async def close(self) -> None:
        """See `Nodes.close`."""
        for pool in self._pools.values():
            await pool.disconnect()
        if self._manager is not None:
            await self._manager.aclose()

    async def _current(self) -> NodesManager:
        if self._manager is None:
            async with self._asking:
                if self._manager is None:
                    nodes, settings = self._named_nodes(), self._node_settings()
                    manager = NodesManager(
                        nodes, require_full_coverage=False, connection_kwargs=settings
                    )
                    with as_redis_errors():
                        await manager.initialize()
                    self._manager = self._with_named_nodes(manager)
        elif self._doubt.is_due and not self._asking.locked():
            async with self._asking:
                with self._doubt.settling():
                    await self._manager.initialize()
                    self._with_named_nodes(self._manager)
        return self._manager

    def _node_settings(self) -> dict[str, Any]:
        settings = {name: value for name, value in self.settings.items() if name != "retry"}
        return {**settings, "connection_class": self.kind}

    def _named_nodes(self) -> list[ClusterNode]:
        return [ClusterNode(*address, **self._node_settings()) for address in self._addresses]

    def _with_named_nodes(self, manager: NodesManager) -> NodesManager:
        """See `Nodes`."""
        named = {node.name: node for node in self._named_nodes()}
        manager.startup_nodes = {**named, **manager.startup_nodes}
        return manager


class _SlotPool(ConnectionPool):
    """See connection.py."""

    def __init__(self, nodes: AsyncNodes, slot: int | None) -> None:
        super().__init__(nodes.kind, **nodes.settings)
        self.nodes, self.slot = nodes, slot

    async def get_connection(self, *_positional: Any, **_named: Any) -> Any:
        return await lent(self.nodes, await self.nodes.pool_of(self.slot))

    async def release(self, connection: Any) -> None:
        await connection.lender.release(connection)

    async def disconnect(self, inuse_connections: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002
        """See connection.py."""
        self.nodes.doubt()

    async def aclose(self) -> None:
        """Closes nothing: the connections belong to all shards."""


async def lent(nodes: AsyncNodes, pool: ConnectionPool) -> Any:
    """See connection.py."""
    try:
        connection: Any = await pool.get_connection()  # type: ignore[no-untyped-call]
    except OF_THE_NODE:
        nodes.doubt()
        raise
    connection.lender = pool
    return connection


class AsyncSlotConnection(redis.asyncio.Redis):
    """See `SlotConnection`."""

    connection_pool: _SlotPool

    def __init__(self, nodes: AsyncNodes, slot: int | None) -> None:
        super().__init__(connection_pool=_SlotPool(nodes, slot))
        self.nodes, self.slot = nodes, slot

    def at_slot_of(self, key: str) -> AsyncSlotConnection:
        """See `SlotConnection.at_slot_of`."""
        return AsyncSlotConnection(self.nodes, slot_of(key))

    async def execute_command(self, *arguments: Any, **options: Any) -> Any:
        execute: Any = super().execute_command
        try:
            return await execute(*arguments, **options)
        except AskError as error:
            return await self.followed(error, arguments, options)
        except ClusterDownError:
            self.nodes.doubt()
            raise
        except OF_THE_NODE:
            self.nodes.doubt()
            raise

    async def followed(self, error: AskError, arguments: Sequence[Any], options: Any) -> Any:
        """See `SlotConnection.followed`."""
        for _ in range(MAX_REDIRECTS):
            is_moved = isinstance(error, MovedError)
            if is_moved:
                await self.nodes.move(error)  # type: ignore[arg-type]
            try:
                return await self._sent_to(error, arguments, options, is_asking=not is_moved)
            except AskError as again:
                error = again
        raise elsewhere(error)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:  # noqa: FBT001, FBT002
        return _SlotPipeline(self, transaction, shard_hint)

    async def _sent_to(
        self, target: AskError, arguments: Sequence[Any], options: Any, *, is_asking: bool
    ) -> Any:
        pool = self.nodes.pool_at(target.host, target.port)
        connection = await lent(self.nodes, pool)
        is_whole = False
        try:
            if is_asking:
                await connection.send_command("ASKING")
                await connection.read_response()
            await connection.send_command(*arguments)
            reply = await self.parse_response(connection, arguments[0], **options)
            is_whole = True
        except ResponseError:
            is_whole = True
            raise
        except OF_THE_NODE:
            self.nodes.doubt()
            raise
        else:
            return reply
        finally:
            if not is_whole:
                await connection.disconnect(nowait=True)
            await pool.release(connection)


class _SlotPipeline(Pipeline):
    """See connection.py."""

    def __init__(self, client: AsyncSlotConnection, transaction: Any, shard_hint: Any) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, shard_hint)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:  # noqa: FBT001, FBT002
        try:
            return await super().execute(raise_on_error)
        except AskError as error:
            raise await self._noted(error) from error
        except OF_THE_NODE:
            self._client.nodes.doubt()
            raise

    async def _execute_pipeline(self, connection: Any, commands: Any, raise_on_error: Any) -> Any:
        replies = await super()._execute_pipeline(connection, commands, False)  # noqa: FBT003
        if self._client.slot is not None and all_moved(replies):
            # Nothing was executed, so this repeats nothing.
            await self._client.nodes.move(replies[0])
            replies = await self._sent_to_the_owner(commands)
        is_parted = may_be_parted(commands)
        for index, (reply, command) in enumerate(zip(replies, commands, strict=True)):
            if isinstance(reply, AskError):
                replies[index] = await self._elsewhere(reply, command, is_parted=is_parted)
            elif isinstance(reply, ClusterDownError):
                self._client.nodes.doubt()
        if raise_on_error:
            self.raise_first_error(commands, replies)
        return replies

    async def _sent_to_the_owner(self, commands: Any) -> Any:
        connection = await self.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        is_whole = False
        try:
            replies = await super()._execute_pipeline(connection, commands, False)  # noqa: FBT003
            is_whole = True
        finally:
            if not is_whole:
                await connection.disconnect(nowait=True)
            await self.connection_pool.release(connection)
        return replies

    async def _elsewhere(self, error: AskError, command: Any, *, is_parted: bool) -> Any:
        if not is_parted or (isinstance(error, MovedError) and self._client.slot is not None):
            return await self._noted(error)
        arguments, options = command
        try:
            return await self._client.followed(error, arguments, options)
        except ResponseError as other:
            return other

    async def _noted(self, error: AskError) -> ResponseError:
        if isinstance(error, MovedError):
            await self._client.nodes.move(error)
        return elsewhere(error)


class AsyncClusterConnection(AsyncSlotConnection):
    """See `ClusterConnection`."""

    def __init__(self, nodes: AsyncNodes) -> None:
        super().__init__(nodes, None)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:  # noqa: ARG002, FBT001
        """See `ClusterConnection.close`."""
        await self.nodes.close()
