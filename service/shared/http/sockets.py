"""Opens the socket that an HTTP server of Quire listens on."""

import errno
import socket

from service.shared.settings.sources import ConfigurationError

#: Most connections that wait to be accepted.
BACKLOG = 1024

#: The largest TCP_USER_TIMEOUT that the kernel accepts, in milliseconds.
MAX_USER_TIMEOUT = (1 << 31) - 1


def listening(host: str, port: int, *, patience_seconds: float, kind: str) -> socket.socket:
    """A socket that listens; port 0 takes a free one. `kind` is the kind of this process.

    A caller that receives nothing for `patience_seconds` is disconnected by the kernel.

    Raises:
        ConfigurationError: it cannot listen on the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # A closed connection stays until the caller has received everything that was sent. A
            # caller that receives nothing would keep it and its buffers for ever. With this option
            # the kernel closes it after a while. Accepted sockets inherit it from the listener.
            milliseconds = min(int(1000 * patience_seconds), MAX_USER_TIMEOUT)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        message = f"http_host, http_port: cannot listen on {host}:{port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            message += f"; another {kind} may have it, and port 0 takes a free one"
        raise ConfigurationError(message) from error
    return listener
