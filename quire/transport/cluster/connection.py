"""Connections to a Redis Cluster for threads.

    redis+cluster://[user:password@]host:port[,host:port ...]/

and `rediss+cluster` if the nodes use TLS. The hosts are some nodes; they name the others. All keys
of a shard are in one slot. So each shard gets a client of its own whose commands all go to the node
that owns the slot, as if that node were the only server: transactions, WAITAOF and the clock are
those of this node. The shards share one pool of connections for each node.

redis-py's NodesManager knows the nodes and slots. Its client of a whole cluster is not used: it
sends a command again by itself, and commands without a key to any node.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import redis
from redis.client import Pipeline
from redis.cluster import PRIMARY, ClusterNode, NodesManager
from redis.connection import Connection, ConnectionPool, SSLConnection
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError

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
from quire.transport.urls import (
    CLUSTER_SCHEMES,
    addresses_of,
    credentials_of,
    parts_of,
    tls_settings,
)

#: The port of a node without a port in the url.
DEFAULT_PORT = 6379

_Item = TypeVar("_Item")


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


def connect_to_cluster(url: str, settings: Mapping[str, Any]) -> ClusterConnection:
    """A client of the cluster, whose `shard` and `for_shard` are clients of one slot each.

    `settings` are those of every connection. ValueError for an invalid url.
    """
    addresses, own = nodes_and_settings(url, settings)
    return ClusterConnection(Nodes(addresses, own))


class Nodes:
    """The nodes of a cluster: which one owns a slot, and one pool of connections for each.

    Safe to share between threads. Asks the cluster at the first use, and again when a node does not
    answer; a MOVED corrects one slot. While one thread asks, the others use what is known.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], settings: Mapping[str, Any]) -> None:
        self._addresses = list(addresses)
        # Each node gets a `retry` of its own, which never retries.
        self.settings = {name: value for name, value in settings.items() if name != "retry"}
        self._manager: NodesManager | None = None
        self._doubt = Doubt()
        self._asking = threading.Lock()

    def pool_of(self, slot: int | None) -> ConnectionPool:
        """The pool of the node that owns the slot; None for any master. RedisError."""
        manager = self._current()
        with as_redis_errors():
            # redis-py does not say in its types that there is one after the first look.
            default: Any = manager.default_node
            node = default if slot is None else manager.get_node_from_slot(slot)
        return self._pool(manager, node)

    def pool_at(self, host: str, port: int) -> ConnectionPool:
        """The pool of the node at this address, known or not."""
        manager = self._current()
        return self._pool(manager, manager.get_node(host, port) or ClusterNode(host, port, PRIMARY))  # type: ignore[no-untyped-call]

    def name_of(self, slot: int) -> str:
        """`host:port` of the node that owns the slot. RedisError."""
        manager = self._current()
        with as_redis_errors():
            return str(manager.get_node_from_slot(slot).name)

    def known_name_of(self, slot: int) -> str:
        """The same as far as known, without a question to any node."""
        found = self._manager.slots_cache.get(slot) if self._manager else None
        return str(found[0].name) if found else "unknown"

    def masters(self) -> dict[str, redis.Redis]:
        """A client of each master that owns a slot, by `host:port`, sorted. RedisError."""
        manager = self._current()
        owners = {nodes[0].name: nodes[0] for nodes in manager.slots_cache.values()}
        pools = {name: self._pool(manager, owners[name]) for name in sorted(owners)}
        return {name: redis.Redis(connection_pool=pool) for name, pool in pools.items()}

    def move(self, error: MovedError) -> None:
        """Notes what a MOVED says about one slot."""
        self._current().move_slot(error)

    def doubt(self) -> None:
        """The next call asks the nodes again who owns which slots."""
        self._doubt.raise_()

    def close(self) -> None:
        """Closes all connections. May be repeated."""
        if self._manager is not None:
            self._manager.close()

    def _pool(self, manager: NodesManager, node: ClusterNode) -> ConnectionPool:
        if node.redis_connection is None:
            manager.create_redis_connections([node])  # type: ignore[no-untyped-call]
        pool: ConnectionPool = node.redis_connection.connection_pool
        return pool

    def _named_nodes(self) -> list[ClusterNode]:
        return [ClusterNode(host, port) for host, port in self._addresses]  # type: ignore[no-untyped-call]

    def _with_named_nodes(self, manager: NodesManager) -> NodesManager:
        """Keeps those that the url names among the nodes to ask: redis-py forgets unknown ones."""
        named = {node.name: node for node in self._named_nodes()}
        manager.startup_nodes = {**named, **manager.startup_nodes}
        return manager

    def _current(self) -> NodesManager:
        if self._manager is None:
            with self._asking, as_redis_errors():
                if self._manager is None:
                    manager = NodesManager(self._named_nodes(), **self.settings)
                    self._manager = self._with_named_nodes(manager)
        elif self._doubt.is_due and self._asking.acquire(blocking=False):
            try:
                with self._doubt.settling():
                    self._manager.initialize(disconnect_startup_nodes_pools=False)
                    self._with_named_nodes(self._manager)
            finally:
                self._asking.release()
        return self._manager


class _SlotPool(ConnectionPool):
    """Lends connections of the node that owns a slot at that moment; has none of its own."""

    def __init__(self, nodes: Nodes, slot: int | None) -> None:
        settings = {name: value for name, value in nodes.settings.items() if name != "ssl"}
        kind = SSLConnection if nodes.settings["ssl"] else Connection
        super().__init__(kind, **settings)
        self.nodes, self.slot = nodes, slot

    def get_connection(self, *_positional: Any, **_named: Any) -> Any:
        return lent(self.nodes, self.nodes.pool_of(self.slot))

    def release(self, connection: Any) -> None:
        connection.lender.release(connection)

    def disconnect(self, inuse_connections: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002
        """Like a lost node: the next call asks who owns the slot."""
        self.nodes.doubt()

    def close(self) -> None:
        """Closes nothing: the connections belong to all shards."""


def lent(nodes: Nodes, pool: ConnectionPool) -> Any:
    """A connection of this pool; it remembers where to return to. RedisError."""
    try:
        connection: Any = pool.get_connection()
    except OF_THE_NODE:
        nodes.doubt()
        raise
    connection.lender = pool
    return connection


class SlotConnection(redis.Redis):
    """The client of one slot: follows the slot to the node that owns it.

    A command that was redirected was not executed, so sending it again repeats nothing. With None
    for the slot, commands without a key go to any master, and the others where they are sent to.
    """

    connection_pool: _SlotPool

    def __init__(self, nodes: Nodes, slot: int | None) -> None:
        super().__init__(connection_pool=_SlotPool(nodes, slot))
        self.nodes, self.slot = nodes, slot

    def at_slot_of(self, key: str) -> SlotConnection:
        """The client of the slot of this key, over the same connections."""
        return SlotConnection(self.nodes, slot_of(key))

    @property
    def owner(self) -> str:
        """See `owner_of`."""
        return "" if self.slot is None else self.nodes.known_name_of(self.slot)

    def execute_command(self, *arguments: Any, **options: Any) -> Any:
        execute: Any = super().execute_command
        try:
            return execute(*arguments, **options)
        except AskError as error:
            return self.followed(error, arguments, options)
        except ClusterDownError:
            self.nodes.doubt()
            raise
        except OF_THE_NODE:
            self.nodes.doubt()
            raise

    def followed(self, error: AskError, arguments: Sequence[Any], options: Any) -> Any:
        """The reply to a command that was redirected. RedisError."""
        for _ in range(MAX_REDIRECTS):
            is_moved = isinstance(error, MovedError)
            if is_moved:
                self.nodes.move(error)  # type: ignore[arg-type]
            try:
                return self._sent_to(error, arguments, options, is_asking=not is_moved)
            except AskError as again:
                error = again
        raise elsewhere(error)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Any:  # noqa: FBT001, FBT002
        return _SlotPipeline(self, transaction, shard_hint)

    def _sent_to(
        self, target: AskError, arguments: Sequence[Any], options: Any, *, is_asking: bool
    ) -> Any:
        pool = self.nodes.pool_at(target.host, target.port)
        connection = lent(self.nodes, pool)
        is_whole = False
        try:
            if is_asking:
                connection.send_command("ASKING")
                connection.read_response()
            connection.send_command(*arguments)
            parse: Any = self.parse_response
            reply = parse(connection, arguments[0], **options)
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
                connection.disconnect()
            pool.release(connection)


class _SlotPipeline(Pipeline):
    """A pipeline to the node that owns a slot."""

    def __init__(self, client: SlotConnection, transaction: Any, shard_hint: Any) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, shard_hint)
        self._client = client

    def execute(self, raise_on_error: bool = True) -> list[Any]:  # noqa: FBT001, FBT002
        try:
            return super().execute(raise_on_error)
        except AskError as error:
            # Of a transaction: none of its commands was executed.
            raise self._noted(error) from error
        except OF_THE_NODE:
            self._client.nodes.doubt()
            raise

    def _execute_pipeline(self, connection: Any, commands: Any, raise_on_error: Any) -> list[Any]:
        replies: list[Any] = self._sent(connection, commands)
        if self._client.slot is not None and all_moved(replies):
            # Nothing was executed, so this repeats nothing.
            self._client.nodes.move(replies[0])
            replies = self._sent_to_the_owner(commands)
        is_parted = may_be_parted(commands)
        for index, (reply, command) in enumerate(zip(replies, commands, strict=True)):
            if isinstance(reply, AskError):
                replies[index] = self._elsewhere(reply, command, is_parted=is_parted)
            elif isinstance(reply, ClusterDownError):
                self._client.nodes.doubt()
        if raise_on_error:
            self.raise_first_error(commands, replies)  # type: ignore[no-untyped-call]
        return replies

    def _sent(self, connection: Any, commands: Any) -> list[Any]:
        execute: Any = super()._execute_pipeline
        replies: list[Any] = execute(connection, commands, raise_on_error=False)
        return replies

    def _sent_to_the_owner(self, commands: Any) -> list[Any]:
        connection = self.connection_pool.get_connection()
        is_whole = False
        try:
            replies = self._sent(connection, commands)
            is_whole = True
        finally:
            if not is_whole:
                connection.disconnect()  # type: ignore[no-untyped-call]
            self.connection_pool.release(connection)
        return replies

    def _elsewhere(self, error: AskError, command: Any, *, is_parted: bool) -> Any:
        # If the slot moved between two commands, the caller sends all of them again, to one node.
        if not is_parted or (isinstance(error, MovedError) and self._client.slot is not None):
            return self._noted(error)
        arguments, options = command
        try:
            return self._client.followed(error, arguments, options)
        except ResponseError as other:
            return other

    def _noted(self, error: AskError) -> ResponseError:
        if isinstance(error, MovedError):
            self._client.nodes.move(error)
        return elsewhere(error)


class ClusterConnection(SlotConnection):
    """The client of a cluster. Commands without a key go to any master."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__(nodes, None)

    def close(self) -> None:
        """Closes the connections of all its clients. May be repeated."""
        self.nodes.close()


def by_node(
    connection: redis.Redis, items: Iterable[_Item], keys: Sequence[str]
) -> list[tuple[redis.Redis, list[tuple[int, _Item]]]]:
    """Parts items by the node that owns the key of each; with each item its index. RedisError.

    Of one server, all items are one part. So a pipeline for each part reaches every item.
    """
    indexed = list(enumerate(items))
    if not isinstance(connection, SlotConnection):
        return [(connection, indexed)]
    parts: dict[str, tuple[redis.Redis, list[tuple[int, _Item]]]] = {}
    for (index, item), key in zip(indexed, keys, strict=True):
        client = connection.at_slot_of(key)
        _, part = parts.setdefault(connection.nodes.name_of(slot_of(key)), (client, []))
        part.append((index, item))
    return list(parts.values())
