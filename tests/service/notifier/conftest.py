"""A receiver of webhooks on this machine, which verifies each with the library of the standard."""

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from standardwebhooks import Webhook

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()


class Receiver:
    """Answers by `answer`, path -> status; keeps what it got, in order, as (id, verified body)."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict]] = []
        #: The same as they came: body and headers.
        self.raw: list[tuple[bytes, dict[str, str]]] = []
        self.paths: list[str] = []
        self.answer: Callable[[str], int] = lambda path: 204
        self.headers: dict[str, str] = {}
        self.body = b""
        #: While it is not set, answers wait.
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.news = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def ids(self) -> list[str]:
        return [webhook_id for webhook_id, _ in self.got]

    def wait(self, is_enough: Callable[[], bool]) -> None:
        """Waits until it has got enough."""
        with self.news:
            assert self.news.wait_for(is_enough, timeout=60), self.got

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                found = Webhook(SECRET).verify(data, dict(self.headers.items()))
                assert found == json.loads(data)
                with receiver.news:
                    receiver.got.append((self.headers["webhook-id"], found))
                    receiver.raw.append((data, dict(self.headers.items())))
                    receiver.paths.append(self.path)
                    receiver.news.notify_all()
                status = receiver.answer(self.path)
                receiver.may_answer.wait(60)
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    for name, value in receiver.headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(receiver.body)))
                    self.end_headers()
                    self.wfile.write(receiver.body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()
