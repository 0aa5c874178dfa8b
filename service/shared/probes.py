"""A small HTTP server on a thread of its own, for the checks and the metrics of a process."""

import errno
import json
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from service.shared.settings.sources import ConfigurationError

#: Seconds a client may take to send its request line and headers.
REQUEST_TIMEOUT_SECONDS = 5.0
#: The interval at which the server checks whether it has to stop.
STOP_POLL_SECONDS = 0.05

_log = structlog.get_logger("service.shared.probes")

#: Returns whether a check passes, and the readings behind that.
Check = Callable[[], tuple[bool, dict[str, Any]]]


class ProbeServer:
    """A small HTTP server for the metrics and for `checks`, path -> check. `port` 0: a free port.

    `kind` is the kind of this process. The error message names it, because another process of this
    kind may use the port.

    Raises:
        ConfigurationError: it cannot listen on the address.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        checks: Mapping[str, Check],
        *,
        host: str,
        port: int,
        kind: str = "worker",
    ) -> None:
        self._registry = registry
        self._checks = checks
        try:
            self._server = _Server((host, port), self._handler())
        except OSError as error:
            message = f"http_host, http_port: cannot listen on {host}:{port}: {error.strerror}"
            if error.errno == errno.EADDRINUSE:
                message += f"; another {kind} may have it, and port 0 takes a free one"
            raise ConfigurationError(message) from error
        self._server.daemon_threads = True
        serve = partial(self._server.serve_forever, poll_interval=STOP_POLL_SECONDS)
        self._thread = threading.Thread(target=serve, name="health", daemon=True)

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port; interrupts requests that are being answered."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        registry, checks = self._registry, self._checks

        class Handler(BaseHTTPRequestHandler):
            """Answers the checks and the metrics; every other path gets 404."""

            timeout = REQUEST_TIMEOUT_SECONDS

            def do_GET(self) -> None:
                path = _path_of(self.path)
                if path in checks:
                    self._send_check(*checks[path]())
                elif path == "/metrics":
                    encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                    self._send(200, content_type, encode(registry))
                else:
                    self._send(404, "text/plain; charset=utf-8", b"not found\n")

            def _send_check(self, passed: bool, readings: dict[str, Any]) -> None:  # noqa: FBT001
                body = json.dumps({"ok": passed, **readings}).encode() + b"\n"
                self._send(200 if passed else 503, "application/json", body)

            def _send(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Log nothing: probes come every few seconds."""

        return Handler


def _path_of(target: str) -> str:
    """The path of a target, which may be an address; empty if it is none."""
    try:
        return urlsplit(target).path
    except ValueError:
        return ""


class _Server(ThreadingHTTPServer):
    """Listens on IPv4 and IPv6 addresses; the library's own server supports only IPv4."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the library's lookup of the host's name, which is not needed here.

        If the resolver does not answer, that lookup takes long and delays the handling of signals.
        """
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log an error; the library would print it outside of the log.

        Not an OSError: that is a client that disconnects before it has its answer.
        """
        if not isinstance(sys.exception(), OSError):
            _log.exception("probe cannot be answered", client=str(client_address))
