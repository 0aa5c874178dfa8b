"""Connections to a Redis Cluster.

    redis+cluster://[user:password@]host:port[,host:port ...]/

and `rediss+cluster` if the nodes use TLS. The hosts are some nodes; they name the others. All keys
of a shard are in one slot. So each shard gets a client of its own whose commands all go to the node
that owns the slot, as if that node were the only server: transactions, WAITAOF and the clock are
those of this node. The shards share one pool of connections for each node.

redis-py's client of a whole cluster is not used: it sends a command again by itself, and commands
without a key to any node.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError, ResponseError

from quire.transport.cluster.redirects import (
    MAX_REDIRECTS,
    OF_THE_NODE,
    Address,
    Doubt,
    Owners,
    all_moved,
    elsewhere,
    may_be_parted,
    slot_of,
    unusable,
)
from quire.transport.concurrency_async import if_free, lock
from quire.transport.urls import (
    CLUSTER_SCHEMES,
    addresses_of,
    credentials_of,
    parts_of,
    tls_settings,
)

#: The port of a node without a port in the url.
DEFAULT_PORT = 6379


def nodes_and_settings(
    url: str, settings: Mapping[str, Any]
) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """The nodes that the url names, and the settings of each connection. ValueError."""
    parts = parts_of(url)
    if parts.path not in ("", "/", "/0"):
        raise ValueError("a cluster has only the database 0")
    has_tls = CLUSTER_SCHEMES[parts.scheme]
    own = {**credentials_of(parts), **tls_settings(parts, has_tls=has_tls)}
    return addresses_of(parts, default_port=DEFAULT_PORT), {**settings, **own, "ssl": has_tls}


def connect_to_cluster_async(url: str, settings: Mapping[str, Any]) -> AsyncClusterConnection:
    """A client of the cluster; the client of one slot is that of `at_slot_of`.

    `settings` are those of every connection. ValueError for an invalid url.
    """
    addresses, own = nodes_and_settings(url, settings)
    return AsyncClusterConnection(AsyncNodes(addresses, own))


class AsyncNodes:
    """The nodes of a cluster: which one owns a slot, and one pool of connections for each.

    Asks the cluster at the first use, and again when a node does not answer; a MOVED corrects one
    slot. While one caller asks again, the others use what is known.
    """

    def __init__(self, addresses: Sequence[Address], settings: Mapping[str, Any]) -> None:
        self._named = list(addresses)
        self.kind = SSLConnection if settings["ssl"] else Connection
        self.settings = {name: value for name, value in settings.items() if name != "ssl"}
        self._pools: dict[Address, ConnectionPool] = {}
        self._owners: Owners | None = None
        self._doubt = Doubt()
        self._asking = lock()

    async def pool_of(self, slot: int | None) -> Any:
        """The pool of the node that owns the slot; None for any master. RedisError."""
        return self.pool_at(*await self._owner_of(slot))

    def pool_at(self, host: str, port: int) -> Any:
        """The pool of the node at this address, known or not."""
        if (host, port) not in self._pools:
            pool = ConnectionPool(connection_class=self.kind, host=host, port=port, **self.settings)
            # Of two threads that make it, both use the first one.
            self._pools.setdefault((host, port), pool)
        return self._pools[host, port]

    async def name_of(self, slot: int) -> str:
        """`host:port` of the node that owns the slot. RedisError."""
        host, port = await self._owner_of(slot)
        return f"{host}:{port}"

    def known_name_of(self, slot: int) -> str:
        """The same as far as known, without a question to any node."""
        found = self._owners.by_slot.get(slot) if self._owners else None
        return f"{found[0]}:{found[1]}" if found else "unknown"

    async def masters(self) -> dict[str, redis.asyncio.Redis]:
        """A client of each master that owns a slot, by `host:port`, sorted. RedisError."""
        owners = await self._current()
        return {
            f"{host}:{port}": redis.asyncio.Redis(connection_pool=self.pool_at(host, port))
            for host, port in owners.masters()
        }

    async def move(self, error: MovedError) -> None:
        """Notes what a MOVED says about one slot."""
        (await self._current()).move(error)

    def doubt(self) -> None:
        """The next call asks the nodes again who owns which slots."""
        self._doubt.raise_()

    async def close(self) -> None:
        """Closes all connections. May be repeated."""
        for pool in list(self._pools.values()):
            await pool.disconnect()

    async def _owner_of(self, slot: int | None) -> Address:
        owners = await self._current()
        try:
            return owners.of(slot)
        except OF_THE_NODE:
            self.doubt()
            raise

    async def _current(self) -> Owners:
        if self._owners is None:
            async with self._asking:
                if self._owners is None:
                    self._owners = await self._asked()
        elif self._doubt.is_due:
            async with if_free(self._asking) as is_ours:
                if is_ours and self._doubt.is_due:
                    with self._doubt.settling():
                        self._owners = await self._asked()
        return self._owners

    async def _asked(self) -> Owners:
        """What the first node tells that knows an owner of every slot, or else the most owners.

        Asks the known nodes and those that the url names. RedisError if none knows any owner.
        """
        known = self._owners.nodes if self._owners else ()
        nodes = list(dict.fromkeys([*known, *self._named]))
        # Otherwise a node that hangs, or that the others have replaced, could always be the first.
        random.shuffle(nodes)
        most = Owners((), asked="")
        errors: list[RedisError] = [ClusterDownError("no node owns a slot")]
        for host, port in nodes:
            node: Any = redis.asyncio.Redis(connection_pool=self.pool_at(host, port))
            try:
                told = Owners(await node.execute_command("CLUSTER SLOTS"), asked=host)
            except RedisError as error:
                errors.append(error)
                continue
            if told.is_whole:
                return told
            most = max(most, told, key=lambda owners: len(owners.by_slot))
        if not most.by_slot:
            raise unusable(errors)
        # Nodes that this answer does not name may know more the next time.
        most.nodes += nodes
        return most


class _SlotPool(ConnectionPool):
    """Lends connections of the node that owns a slot at that moment; has none of its own."""

    def __init__(self, nodes: AsyncNodes, slot: int | None) -> None:
        super().__init__(nodes.kind, **nodes.settings)
        self.nodes, self.slot = nodes, slot

    async def get_connection(self, *_positional: Any, **_named: Any) -> Any:
        return await lent(self.nodes, await self.nodes.pool_of(self.slot))

    async def release(self, connection: Any) -> None:
        await connection.lender.release(connection)

    async def disconnect(self, inuse_connections: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002
        """Like a lost node: the next call asks who owns the slot."""
        self.nodes.doubt()

    async def aclose(self) -> None:
        """Closes nothing: the connections belong to all shards."""


async def lent(nodes: AsyncNodes, pool: Any) -> Any:
    """A connection of this pool; it remembers where to return to. RedisError."""
    try:
        connection = await pool.get_connection()
    except OF_THE_NODE:
        nodes.doubt()
        raise
    connection.lender = pool
    return connection


class AsyncSlotConnection(redis.asyncio.Redis):
    """The client of one slot: follows the slot to the node that owns it.

    A command that was redirected was not executed, so sending it again repeats nothing. With None
    for the slot, commands without a key go to any master, and the others where they are sent to.
    """

    connection_pool: _SlotPool

    def __init__(self, nodes: AsyncNodes, slot: int | None) -> None:
        super().__init__(connection_pool=_SlotPool(nodes, slot))
        self.nodes, self.slot = nodes, slot

    def at_slot_of(self, key: str) -> AsyncSlotConnection:
        """The client of the slot of this key, over the same connections."""
        return AsyncSlotConnection(self.nodes, slot_of(key))

    @property
    def owner(self) -> str:
        """See `owner_of`."""
        return "" if self.slot is None else self.nodes.known_name_of(self.slot)

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
        """The reply to a command that was redirected. RedisError."""
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
            parse: Any = self.parse_response
            reply = await parse(connection, arguments[0], **options)
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
                # Another caller must not read the rest.
                await connection.disconnect(nowait=True)
            await pool.release(connection)


class _SlotPipeline(Pipeline):
    """A pipeline to the node that owns a slot."""

    def __init__(self, client: AsyncSlotConnection, transaction: Any, shard_hint: Any) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, shard_hint)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:  # noqa: FBT001, FBT002
        try:
            return await super().execute(raise_on_error)
        except AskError as error:
            # Of a transaction: none of its commands was executed.
            raise await self._noted(error) from error
        except OF_THE_NODE:
            self._client.nodes.doubt()
            raise

    async def _execute_pipeline(self, connection: Any, commands: Any, raise_on_error: Any) -> Any:
        replies = await self._sent(connection, commands)
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
            raise_first: Any = self.raise_first_error
            raise_first(commands, replies)
        return replies

    async def _sent(self, connection: Any, commands: Any) -> list[Any]:
        execute: Any = super()._execute_pipeline
        replies: list[Any] = await execute(connection, commands, raise_on_error=False)
        return replies

    async def _sent_to_the_owner(self, commands: Any) -> list[Any]:
        pool: Any = self.connection_pool
        connection = await pool.get_connection()
        is_whole = False
        try:
            replies = await self._sent(connection, commands)
            is_whole = True
        finally:
            if not is_whole:
                await connection.disconnect(nowait=True)
            await pool.release(connection)
        return replies

    async def _elsewhere(self, error: AskError, command: Any, *, is_parted: bool) -> Any:
        # If the slot moved between two commands, the caller sends all of them again, to one node.
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
    """The client of a cluster. Commands without a key go to any master."""

    def __init__(self, nodes: AsyncNodes) -> None:
        super().__init__(nodes, None)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:  # noqa: ARG002, FBT001
        """Closes the connections of all its clients. May be repeated."""
        await self.nodes.close()
