"""The endpoint of a tenant: takes webhooks, refuses some, and remembers all that were signed."""

import contextlib
import json
import random
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from standardwebhooks import Webhook

SECRET = "whsec_" + "Y2hhb3M" * 6
#: The share of webhooks that are refused, or taken without an answer.
REFUSED, UNANSWERED = 0.08, 0.04


@dataclass(frozen=True, slots=True)
class Hook:
    """One webhook that came, whatever was answered."""

    webhook_id: str
    body: str

    @property
    def end(self) -> tuple[str, str]:
        """What it tells: the type, and the id of what has ended."""
        found: dict[str, Any] = json.loads(self.body)
        data = found["data"]
        kind = found["type"]
        if kind.startswith("response."):
            # A response is a request, and "incomplete" one that has completed at its length.
            kind = kind.replace("response.", "request.").replace("incomplete", "completed")
        return kind, data.get("id") or data.get("request_id") or data["group"]


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Says nothing of a notifier that has died; all else belongs into the audit."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(*_)  # type: ignore[arg-type]


class Receiver:
    """Listens until `close`."""

    def __init__(self, seed: str) -> None:
        self.hooks: list[Hook] = []
        self.violations: list[str] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/hooks"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, body: bytes, headers: dict[str, str]) -> int | None:
        """The status of the answer; None for none."""
        with self._lock:
            try:
                Webhook(SECRET).verify(body, headers)
            except Exception as error:  # noqa: BLE001 - whatever it is belongs into the audit.
                self.violations.append(f"a webhook cannot be verified: {error!r}")
            self.hooks.append(Hook(headers["webhook-id"], body.decode()))
            drawn = self._random.random()
        if drawn < REFUSED:
            return 503
        return None if drawn < REFUSED + UNANSWERED else 204

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = self.rfile.read(length)
                # A notifier that is killed while it sends has told nothing.
                is_whole = len(body) == length
                status = receiver._take(body, dict(self.headers.items())) if is_whole else None
                if status is None:
                    self.close_connection = True
                    return
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        return Handler
