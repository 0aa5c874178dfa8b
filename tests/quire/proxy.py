"""A TCP proxy before Redis that can lose replies, as a failing network does."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class LossyProxy:
    """Forwards to a server; `lose_next_reply` cuts the connection in place of one reply.

    The reply that is lost is the next one, or the next one to the command named by `to`.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lose = threading.Event()
        self._awaited: bytes | None = None
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        #: Replies that were swallowed so far.
        self.num_lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_next_reply(self, *, to: str | None = None) -> None:
        if to is None:
            self._lose.set()
        self._awaited = to.encode() if to else None

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for source, sink, replies in ((client, server, False), (server, client, True)):
                    threading.Thread(
                        target=self._forward, args=(source, sink), kwargs={"replies": replies},
                        daemon=True,
                    ).start()  # fmt: skip

    def _forward(self, source: socket.socket, sink: socket.socket, *, replies: bool) -> None:
        with contextlib.suppress(OSError), source, sink:
            while data := source.recv(1 << 16):
                if not replies and self._awaited and self._awaited in data:
                    self._awaited = None
                    self._lose.set()
                if replies and self._lose.is_set():
                    self._lose.clear()
                    self.num_lost += 1
                    break
                sink.sendall(data)
            for end in (source, sink):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def lossy_proxy(url: str) -> Iterator[LossyProxy]:
    host, _, port = url.removeprefix("redis://").partition("/")[0].rpartition(":")
    proxy = LossyProxy(host, int(port))
    try:
        yield proxy
    finally:
        proxy.close()
