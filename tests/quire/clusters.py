"""A Redis Cluster of real servers on this machine, for tests."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from quire.keys import Keys
from tests.quire.certificates import files_of
from tests.quire.servers import real_program

NUM_SLOTS = 16_384
#: How long the nodes may take on a busy machine until they agree.
AGREEMENT_SECONDS = 40.0
#: The bus of a node has a port of its own, so much above.
_BUS_OFFSET = 10_000
#: Where the ports of nodes are: they and their buses are below those that an operating system gives
#: to programs that ask for any, so nobody is given one before a node has started, or starts again.
_FIRST_PORT, _LAST_PORT = 10_000, 22_767
#: How many ports are tried: another process of the tests may have drawn the same one.
_PORT_ATTEMPTS = 5
_POLL_SECONDS = 0.02


class Node:
    """One server, with its own folder. It is started again with the same port and name."""

    def __init__(
        self,
        program: str,
        folder: Path,
        *,
        options: Sequence[str] = (),
        certificate: Path | None = None,
    ) -> None:
        self._program, self._options, self._certificate = program, options, certificate
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self._move_to(_free_port())

    def _move_to(self, port: int) -> None:
        self.port = port
        self._own_folder = self._folder / str(port)
        self._own_folder.mkdir(exist_ok=True)
        self._command = [
            *(self._program, "--bind", "127.0.0.1", *_listening(port, self._certificate)),
            *("--dir", str(self._own_folder), "--cluster-enabled", "yes", "--save", ""),
            *("--cluster-allow-replica-migration", "no", "--repl-diskless-sync-delay", "0"),
            *("--repl-ping-replica-period", "1", *self._options),
        ]
        path = self._certificate
        trusted = {"ssl": True, "ssl_ca_certs": str(path)} if path else {}
        self.client = redis.Redis(port=port, socket_timeout=5.0, **trusted)

    def __repr__(self) -> str:
        return f"node {self.port}"

    def start(self) -> None:
        """Starts it; at its first start on another port if somebody else has its own."""
        is_first = self.process is None
        for _ in range(_PORT_ATTEMPTS):
            with (self._own_folder / "log").open("ab") as log:
                self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
            until(lambda: self._answers() or self._has_ended(), f"{self} answers")
            if not self._has_ended():
                return
            assert is_first, f"{self} has ended; its log is {self._own_folder / 'log'}"
            self._move_to(_free_port())
        raise AssertionError("no node could be started")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    @property
    def id(self) -> str:
        return str(self.call("CLUSTER", "MYID"))

    @property
    def is_master(self) -> bool:
        return str(self.client.info("replication")["role"]) == "master"

    def call(self, *words: object) -> Any:
        """The reply to a command, as text where it is a text."""
        # With a space, redis-py would find no parser for the command.
        reply = self.client.execute_command(*words)
        return reply.decode() if isinstance(reply, bytes) else reply

    def keys_of(self, keys: Keys) -> set[str]:
        """The names of the keys of a shard that it has, whoever owns the slot."""
        names = self.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot_of(keys), 10_000)
        return {name.decode() for name in names}

    def num_commands(self) -> int:
        """How many commands of clients it has run, without those that ask for this number."""
        calls = self.client.info("commandstats")
        uncounted = {"cmdstat_info", "cmdstat_ping"}
        return sum(int(row["calls"]) for name, row in calls.items() if name not in uncounted)

    def has_blocked(self) -> bool:
        """Whether a read waits there."""
        return int(self.client.info("clients")["blocked_clients"]) > 0

    def _answers(self) -> bool:
        assert self.process is not None
        with contextlib.suppress(RedisError):
            # Another server may have taken the port first.
            return bool(self.client.info("server")["process_id"] == self.process.pid)
        return False

    def _has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None


class Cluster:
    """Masters that share all slots evenly, each with its replicas. A context manager.

    With `certificate`, a file with its key beside it, clients and nodes reach them by TLS alone.
    """

    def __init__(
        self,
        program: str,
        *,
        masters: int = 3,
        replicas: int = 0,
        options: Sequence[str] = (),
        certificate: Path | None = None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="quire-cluster-"))
        self.nodes = [
            Node(program, self._folder, options=options, certificate=certificate)
            for _ in range(masters * (1 + replicas))
        ]
        self._num_masters = masters
        self._certificate = certificate

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        if self._certificate:
            return f"rediss+cluster://{hosts}/?ssl_ca_certs={self._certificate}"
        return f"redis+cluster://{hosts}/"

    def __enter__(self) -> Cluster:
        try:
            for node in self.nodes:
                node.start()
            self._join()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for node in self.nodes:
            if node.process is not None:
                node.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def masters(self) -> list[Node]:
        """The masters that answer."""
        found = []
        for node in self.nodes:
            with contextlib.suppress(RedisError):
                if node.is_master:
                    found.append(node)
        return found

    def owner(self, keys: Keys) -> Node:
        """The node that owns the slot of a shard, as it says itself."""
        slot = slot_of(keys)
        for node in self.masters():
            if _owner_at(node, slot) == node.id:
                return node
        raise LookupError(f"no node owns slot {slot}")

    def begin_move(self, keys: Keys, target: Node) -> Node:
        """Opens the slot of a shard for its move; returns the node that it leaves."""
        slot, source = slot_of(keys), self.owner(keys)
        target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
        return source

    def move_keys(self, keys: Keys, source: Node, target: Node, *, most: int | None = None) -> int:
        """Moves up to `most` keys of an open slot; returns how many."""
        slot, moved = slot_of(keys), 0
        while names := source.call("CLUSTER", "GETKEYSINSLOT", slot, min(100, most or 100)):
            target_of = ("127.0.0.1", target.port, "", 0, 5000)
            source.call("MIGRATE", *target_of, "KEYS", *names)
            moved += len(names)
            if most is not None and moved >= most:
                break
        return moved

    def end_move(self, keys: Keys, target: Node) -> None:
        """Gives the slot to its new node, and waits until all masters agree.

        Without the wait, a second move may get the same epoch as this one, or a message of the old
        owner may take the slot back: then the nodes do not agree for a while.
        """
        slot, name = slot_of(keys), target.id
        masters = self.masters()
        for node in [target, *(one for one in masters if one is not target)]:
            node.call("CLUSTER", "SETSLOT", slot, "NODE", name)
        until(lambda: _agree(masters, slot, name), f"all masters give slot {slot} to {target}")

    def move(self, keys: Keys, target: Node) -> None:
        """Moves the slot of a shard with all its keys."""
        if self.owner(keys) is target:
            return
        source = self.begin_move(keys, target)
        self.move_keys(keys, source, target)
        self.end_move(keys, target)

    def _join(self) -> None:
        first, *others = self.nodes
        for node in others:
            node.call("CLUSTER", "MEET", "127.0.0.1", first.port)
        masters = self.nodes[: self._num_masters]
        for number, node in enumerate(masters):
            begin, end = (NUM_SLOTS * edge // len(masters) for edge in (number, number + 1))
            # ADDSLOTSRANGE came with Redis 7.0.
            node.call("CLUSTER", "ADDSLOTS", *range(begin, end))
        for number, node in enumerate(self.nodes[self._num_masters :]):
            master = masters[number % len(masters)]
            name = master.id
            until(lambda node=node, name=name: _knows(node, name), f"{node} knows its master")
            node.call("CLUSTER", "REPLICATE", name)
        until(self.is_whole, "the nodes agree on a whole cluster")

    def is_whole(self) -> bool:
        """Whether each node sees all slots served, and each replica has a link to its master."""
        try:
            for node in self.nodes:
                if not _knows_all(node, len(self.nodes)) or not _is_served(node):
                    return False
        except RedisError:
            return False
        return True


def _listening(port: int, certificate: Path | None) -> list[str]:
    if certificate is None:
        return ["--port", str(port)]
    return [
        *("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"),
        *("--tls-cluster", "yes", "--tls-replication", "yes"),
        *("--tls-ca-cert-file", str(certificate), *files_of(certificate.parent)),
    ]


def slot_of(keys: Keys) -> int:
    return int(key_slot(keys.prefix.encode()))


def until(holds: Callable[[], bool], what: str, *, seconds: float = AGREEMENT_SECONDS) -> None:
    """Waits until it holds; AssertionError after `seconds`."""
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up, f"not within {seconds} s: {what}"
        time.sleep(_POLL_SECONDS)


def _agree(masters: Sequence[Node], slot: int, owner: str) -> bool:
    epochs = {node.client.cluster("INFO")["cluster_current_epoch"] for node in masters}
    return len(epochs) == 1 and all(_owner_at(node, slot) == owner for node in masters)


def _owner_at(node: Node, slot: int) -> str:
    for row in node.client.execute_command("CLUSTER", "SLOTS"):
        if int(row[0]) <= slot <= int(row[1]):
            return str(row[2][2].decode())
    return ""


def _knows(node: Node, name: str) -> bool:
    # Before their handshake is over, nodes are known by other names.
    return name.encode() in node.client.execute_command("CLUSTER", "NODES")


def _knows_all(node: Node, number: int) -> bool:
    return _num_known(node) == number


def _num_known(node: Node) -> int:
    return int(node.client.cluster("INFO")["cluster_known_nodes"])


def _is_served(node: Node) -> bool:
    if node.client.cluster("INFO")["cluster_state"] != "ok":
        return False
    rows = node.client.execute_command("CLUSTER", "SLOTS")
    if len({name[2] for row in rows for name in row[2:]}) != _num_known(node):
        return False
    replication = node.client.info("replication")
    return replication["role"] == "master" or replication["master_link_status"] == "up"


def _free_port() -> int:
    while True:
        port = random.SystemRandom().randint(_FIRST_PORT, _LAST_PORT)
        with contextlib.suppress(OSError), socket.socket() as own, socket.socket() as bus:
            own.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + _BUS_OFFSET))
            return port


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three masters for all tests of a process. Each test moves only the slots of its own queue."""
    with Cluster(real_program()) as made:
        yield made


def spread(cluster: Cluster, queue: str, shards: int) -> dict[int, Node]:
    """Moves the shards of a queue to the masters in turn; returns shard -> node."""
    masters = cluster.masters()
    placed = {shard: masters[shard % len(masters)] for shard in range(shards)}
    for shard, node in placed.items():
        cluster.move(Keys(queue, shard), node)
    return placed


def another(cluster: Cluster, node: Node) -> Node:
    """A master beside this one."""
    return next(one for one in cluster.masters() if one is not node)
