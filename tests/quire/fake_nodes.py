"""A Redis Cluster of many nodes without servers: each has a port, and a fake Redis behind it.

One thread serves all of them. The nodes run the real scripts, and count what they are sent. No
slot moves.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import fakeredis
from redis.exceptions import NoScriptError, ResponseError

from quire.keys import Keys
from tests.quire.clusters import NUM_SLOTS, slot_of

_LISTENING = None


@dataclass(eq=False)
class FakeNode:
    """One node, with its slots from `begin` until before `end`."""

    begin: int
    end: int
    listener: socket.socket
    #: How often each command was sent, by the name of the command.
    commands: Counter[str] = field(default_factory=Counter)
    num_connections: int = 0
    #: The nodes whose slots it tells; None for all nodes.
    knows: list[FakeNode] | None = None

    def __post_init__(self) -> None:
        server = fakeredis.FakeServer(version=(7, 0))
        self._redis = fakeredis.FakeRedis(server=server)
        # Replies go on as they are.
        self._redis.response_callbacks.clear()

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def reply_to(self, words: list[bytes]) -> bytes:
        try:
            return _encoded(self._redis.execute_command(*words))
        except NoScriptError as error:
            return f"-NOSCRIPT {error}\r\n".encode()
        except ResponseError as error:
            return f"-ERR {error}\r\n".encode()


class FakeNodes:
    """Nodes that share all slots evenly. A context manager."""

    def __init__(self, number: int) -> None:
        self.nodes = [
            FakeNode(*_slots(index, number), socket.create_server(("127.0.0.1", 0)))
            for index in range(number)
        ]
        self._selector = selectors.DefaultSelector()
        self._stopping, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="fake nodes")

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port}/"

    @property
    def url_of_all(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{hosts}/"

    def __enter__(self) -> FakeNodes:
        for node in self.nodes:
            self._selector.register(node.listener, selectors.EVENT_READ, (node, _LISTENING))
        self._selector.register(self._stopped, selectors.EVENT_READ, None)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.close()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def owner(self, keys: Keys) -> FakeNode:
        """The node that owns the slot of a shard."""
        slot = slot_of(keys)
        return next(node for node in self.nodes if node.begin <= slot < node.end)

    def shards_of_each(self, queue: str, number: int) -> dict[FakeNode, list[int]]:
        """The first shards of a queue that are on each node, so many for each."""
        found: dict[FakeNode, list[int]] = {node: [] for node in self.nodes}
        shard = 0
        while any(len(shards) < number for shards in found.values()):
            shards = found[self.owner(Keys(queue, shard))]
            shards += [shard] * (len(shards) < number)
            shard += 1
        return found

    def load(self, *sources: str) -> None:
        """Loads scripts on every node, as by earlier calls. Only before the first client."""
        for node in self.nodes:
            for source in sources:
                node.reply_to([b"SCRIPT", b"LOAD", source.encode()])

    def forget(self) -> None:
        """Counts commands anew. Only while no client waits for a reply."""
        for node in self.nodes:
            node.commands.clear()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                node, buffer = key.data
                if buffer is _LISTENING:
                    made, _ = node.listener.accept()
                    node.num_connections += 1
                    self._selector.register(made, selectors.EVENT_READ, (node, bytearray()))
                elif not self._answer(key.fileobj, node, buffer):  # type: ignore[arg-type]
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]

    def _answer(self, connection: socket.socket, node: FakeNode, buffer: bytearray) -> bool:
        """Runs the commands that have come; False if the connection was closed."""
        received = connection.recv(1 << 16)
        buffer += received
        for words in _taken(buffer):
            name = words[0].upper().decode()
            node.commands[name] += 1
            if name == "CLUSTER":
                reply = _encoded([self._row_of(one) for one in self._known_to(node)])
            elif name == "CLIENT":
                reply = b"+OK\r\n"
            else:
                reply = node.reply_to(words)
            connection.sendall(reply)
        return bool(received)

    def _known_to(self, node: FakeNode) -> list[FakeNode]:
        return self.nodes if node.knows is None else node.knows

    def _row_of(self, node: FakeNode) -> list[Any]:
        # As CLUSTER SLOTS has it.
        return [node.begin, node.end - 1, [b"127.0.0.1", node.port, b"%040d" % node.port]]


def _slots(index: int, number: int) -> tuple[int, int]:
    return NUM_SLOTS * index // number, NUM_SLOTS * (index + 1) // number


def _taken(buffer: bytearray) -> Iterator[list[bytes]]:
    """Removes the commands from the buffer that are whole."""
    while (found := _first_of(buffer)) is not None:
        words, size = found
        del buffer[:size]
        yield words


def _first_of(buffer: bytearray) -> tuple[list[bytes], int] | None:
    at = buffer.find(b"\r\n")
    if at < 0:
        return None
    number, words = int(buffer[1:at]), list[bytes]()
    at += 2
    for _ in range(number):
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return None
        begin, size = end + 2, int(buffer[at + 1 : end])
        if len(buffer) < begin + size + 2:
            return None
        words.append(bytes(buffer[begin : begin + size]))
        at = begin + size + 2
    return words, at


def _encoded(reply: Any) -> bytes:
    """The reply in the third version of the protocol of Redis."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, float):
        return b",%r\r\n" % reply
    if isinstance(reply, dict):
        pairs = (_encoded(word) for pair in reply.items() for word in pair)
        return b"%%%d\r\n%s" % (len(reply), b"".join(pairs))
    if isinstance(reply, str):
        reply = reply.encode()
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    assert isinstance(reply, list), f"no encoding for {reply!r}"
    return b"*%d\r\n%s" % (len(reply), b"".join(map(_encoded, reply)))
