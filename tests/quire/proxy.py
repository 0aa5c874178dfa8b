"""A wire between a client and its Redis: it loses the replies it is told to lose.

A connection is cut in place of the reply to one command, after the server has got the command: what
a failing network does at the worst moment. While the server is away, connections are turned down.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit


class Wire:
    """Forwards everything to the server at `target`; `url` is its own address."""

    def __init__(self, target: str) -> None:
        self.lead_to(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        # Guards the two below.
        self._lock = threading.Lock()
        self._awaited: list[bytes] = []
        #: Replies that were swallowed so far.
        self.num_lost = 0
        threading.Thread(target=self._accept, name="wire", daemon=True).start()

    def lead_to(self, target: str) -> None:
        """Connections made from now on go to this server, as where a name gets a new address."""
        parts = urlsplit(target)
        assert parts.hostname and parts.port, f"{target} has no host or no port"
        self._target = parts.hostname, parts.port

    def lose_reply(self, to: str = "") -> None:
        """Loses the reply to the next command, or the next with `to` in it. Calls add up."""
        with self._lock:
            self._awaited.append(to.encode())

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # Set when the next reply on this connection is the one to lose.
                doomed = threading.Event()
                for forward in (self._forward_commands, self._forward_replies):
                    arguments = (client, server, doomed)
                    threading.Thread(target=forward, args=arguments, daemon=True).start()

    def _forward_commands(
        self, client: socket.socket, server: socket.socket, doomed: threading.Event
    ) -> None:
        with contextlib.suppress(OSError), _closing(client, server):
            while data := client.recv(1 << 16):
                if self._is_awaited(data):
                    doomed.set()
                server.sendall(data)

    def _forward_replies(
        self, client: socket.socket, server: socket.socket, doomed: threading.Event
    ) -> None:
        with contextlib.suppress(OSError), _closing(client, server):
            while data := server.recv(1 << 16):
                if doomed.is_set():
                    with self._lock:
                        self.num_lost += 1
                    return
                client.sendall(data)

    def _is_awaited(self, data: bytes) -> bool:
        with self._lock:
            found = next((text for text in self._awaited if text in data), None)
            if found is not None:
                self._awaited.remove(found)
            return found is not None


@contextlib.contextmanager
def wire_to(target: str) -> Iterator[Wire]:
    wire = Wire(target)
    try:
        yield wire
    finally:
        wire.close()


@contextlib.contextmanager
def _closing(*ends: socket.socket) -> Iterator[None]:
    """Shuts both ends down afterwards, which wakes whoever waits for the other."""
    try:
        yield
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
