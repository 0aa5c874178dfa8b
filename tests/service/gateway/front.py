"""Callers who speak HTTP by themselves, and what they are answered.

Nothing of ours is imported: a caller can be a process of its own, which starts at once.
"""

import contextlib
import http.client
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
#: The header of a call that may be repeated.
KEY = {"Idempotency_Key": "the key of a test"}
#: How long a caller waits for the next bytes.
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class Reply:
    """A whole response."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)

    @property
    def request_id(self) -> str:
        return self.headers["X-Request-ID"]

    @property
    def text_of_choice(self) -> str:
        choice = self.body["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    @property
    def error(self) -> Any:
        return self.body["error"]

    @property
    def events(self) -> list["Event"]:
        return list(events_of(iter(self.text.encode().splitlines(keepends=True))))


@dataclass(frozen=True)
class Event:
    """One server-sent event; comments are events without data."""

    id: str
    data: str

    @property
    def body(self) -> Any:
        return json.loads(self.data)

    @property
    def choice(self) -> Any:
        return self.body["choices"][0]

    @property
    def text(self) -> str:
        """What it adds to the text of its choice; nothing for all but pieces."""
        if self.data in ("", "[DONE]") or not self.body.get("choices"):
            return ""
        return (
            self.choice["text"]
            if "text" in self.choice
            else self.choice["delta"].get("content", "")
        )


def events_of(lines: Iterator[bytes]) -> Iterator[Event]:
    """The events in the lines of a stream, as they come."""
    event_id = data = ""
    for line in lines:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            data = value
        elif not line.strip():
            yield Event(event_id, data)
            data = ""


class Stream:
    """A response that is read event by event; leaving the context hangs up."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._response = connection.getresponse()
        self.status = self._response.status
        self.request_id = self._response.headers["X-Request-ID"]
        self._events = events_of(iter(self._response.readline, b""))

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        self._response.close()
        self._connection.close()

    def next(self) -> Event:
        return next(self._events)

    def __iter__(self) -> Iterator[Event]:
        """The events as they come, until the response ends or breaks off."""
        with contextlib.suppress(http.client.HTTPException, OSError):
            yield from self._events

    def rest(self) -> list[Event]:
        return list(self)

    def read_tokens(self, count: int) -> list[Event]:
        """Events until the caller has so many tokens of the first choice."""
        events = [self.next()]
        while not events[-1].id or int(events[-1].id.split("/")[0].split(",")[0]) < count:
            events.append(self.next())
        return events


class Front:
    """A caller's view of a gateway on this machine."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """A connection on which the request is sent; underscores in header names are dashes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)
        is_json = isinstance(body, dict | list)
        data = json.dumps(body).encode() if is_json else body
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body=data, headers=names)
        return connection

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        connection = self.send(method, path, body, **headers)
        with contextlib.closing(connection):
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read().decode())

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, **headers)

    def complete(self, prompt: Any = "x", headers: Mapping[str, str] = {}, **fields: Any) -> Reply:
        return self.ask("POST", COMPLETIONS, {"prompt": prompt, **fields}, **headers)

    def stream(self, prompt: Any = "x", headers: Mapping[str, str] = {}, **fields: Any) -> Stream:
        body = {"prompt": prompt, "stream": True, **fields}
        return Stream(self.send("POST", COMPLETIONS, body, **headers))

    def resume(self, request_id: str, last: str | None = None, **headers: str) -> Stream:
        if last is not None:
            headers["Last_Event_ID"] = last
        return Stream(self.send("GET", f"/v1/requests/{request_id}/events", **headers))

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample, as a scraper sees it."""
        wanted = ",".join(f'{label}="{value}"' for label, value in labels.items())
        line = f"{name}{{{wanted}}} " if wanted else f"{name} "
        (found,) = [
            row.removeprefix(line)
            for row in self.get("/metrics").text.splitlines()
            if row.startswith(line)
        ]
        return float(found)


def text_of_events(events: Iterable["Event"]) -> str:
    """What the events of a stream add up to."""
    return "".join(event.text for event in events)
