"""Serves `/livez`, `/readyz` and `/metrics` on a thread of its own.

`/livez` checks that the engine makes progress and the other threads show signs of life, and nothing
else: if it checked Redis, too, a short outage would restart the whole fleet. `/readyz` says whether
this worker takes work.
"""

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

from service.observe.vitals import Vitals
from service.settings.sources import ConfigurationError

#: Seconds a client may take to send its request line and headers.
REQUEST_TIMEOUT_SECONDS = 5.0
#: How soon the server notices that it has to stop.
STOP_POLL_SECONDS = 0.05

_log = structlog.get_logger("service.observe.health")

#: Whether a check passes, and the readings that say so.
Check = Callable[[], tuple[bool, dict[str, Any]]]


class ProbeServer:
    """A small HTTP server for checks by path, and the metrics. `port` 0 takes a free port.

    `kind` is what kind of process serves by it, and so what else may have taken the port.

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
        """Close the port; requests under way are cut off."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        registry, checks = self._registry, self._checks

        class Handler(BaseHTTPRequestHandler):
            """Knows the checks and the metrics; everything else is 404."""

            timeout = REQUEST_TIMEOUT_SECONDS

            def do_GET(self) -> None:
                path = urlsplit(self.path).path
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
                """Probes come every few seconds; they are not news."""

        return Handler


class _Server(ThreadingHTTPServer):
    """Listens on IPv4 and IPv6 addresses; the library's own server knows only IPv4."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the library's look-up of the host's name, which nothing here needs.

        Without a resolver that answers it takes so long that signals go unheard meanwhile.
        """
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log an error of our own; the library would print it outside of the log.

        A client that leaves before it has its answer, like a slow scrape, is not an error of ours.
        """
        if not isinstance(sys.exception(), OSError):
            _log.exception("probe cannot be answered", client=str(client_address))


class HealthServer(ProbeServer):
    """The worker's server: `/livez`, `/readyz` and `/metrics`."""

    def __init__(
        self,
        vitals: Vitals,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int,
        contact_limit_seconds: float,
    ) -> None:
        self._vitals = vitals
        self._contact_limit_seconds = contact_limit_seconds
        checks = {"/livez": self.live, "/readyz": self.ready}
        super().__init__(registry, checks, host=host, port=port)

    def live(self) -> tuple[bool, dict[str, Any]]:
        """Whether nothing hangs, and the readings that say so."""
        vitals = self._vitals
        return vitals.is_alive, {
            "state": vitals.state,
            "overdue": [silence.thread for silence in vitals.overdue],
            "busy": vitals.is_busy,
            "stalled": vitals.is_stalled,
            "seconds_since_turn": round(vitals.seconds_since_turn, 3),
            "seconds_since_progress": round(vitals.seconds_since_progress, 3),
            "stall_timeout_seconds": vitals.stall_timeout_seconds,
        }

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Whether this worker takes work, and the readings that say so."""
        contact = self._vitals.seconds_since_contact
        is_ready = self._vitals.is_ready(contact_limit_seconds=self._contact_limit_seconds)
        return is_ready, {
            "state": self._vitals.state,
            "alive": self._vitals.is_alive,
            "seconds_since_redis_answered": None if contact is None else round(contact, 3),
            "contact_limit_seconds": self._contact_limit_seconds,
        }
