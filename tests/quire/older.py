"""Producers and workers of the version before the rank sets, by the scripts that they run.

`older_scripts` has these as they were. A queue may have users of both versions for as long as an
upgrade takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis

from quire.broker.broker import Broker
from quire.broker.producing import script_settings
from quire.keys import GROUP, Keys
from quire.transitions.calls import submit_call
from quire.transitions.commits import CommitCalls
from quire.transitions.values import Claim, new_owner
from quire.transport.script_runner import Argument
from quire.wire.message import Message
from quire.wire.protocol import GenerationRequest, Priority
from tests.quire.builders import make_item

_FOLDER = Path(__file__).parent / "older_scripts"
_PARTS = {"submit": ("common", "request")}


class OlderVersion:
    """What an older client or worker does with the queue of a broker."""

    def __init__(self, connection: redis.Redis, broker: Broker) -> None:
        self._connection = connection
        self._broker = broker
        self._keys = broker.keys

    def submit(self, request: GenerationRequest) -> None:
        call = submit_call(self._keys, Message.of(request))
        own = self._keys.of_scripts(request.id)
        self._run("submit", [*_of_producers(self._keys), *own], call.arguments)

    def read(self, worker: str, *, count: int = 1) -> list[tuple[str, bytes, str]]:
        """The stream, the entry and the request of each delivery, what came back first."""
        found = []
        for level in sorted(Priority, reverse=True):
            for stream in (self._keys.resumed(level), self._keys.ingress(level)):
                reply: Any = self._connection.xreadgroup(GROUP, worker, {stream: ">"}, count=count)
                pairs = reply.items() if isinstance(reply, dict) else reply or []
                for _, entries in pairs:
                    rows = entries[0] if isinstance(reply, dict) else entries
                    found += [(stream, name, fields[b"id"].decode()) for name, fields in rows]
        return found[:count]

    def claim(self, delivery: tuple[str, bytes, str], *, owner: str | None = None) -> list[Any]:
        stream, entry_id, request_id = delivery
        names = [*_of_workers(self._keys), *self._keys.of_scripts(request_id), stream]
        return self._run("claim", names, (request_id, entry_id, owner or new_owner(), ""))

    def release(self, request_id: str, *, epoch: int, owner: str) -> Any:
        names = [*_of_workers(self._keys), *self._keys.of_scripts(request_id)]
        return self._run("release", names, (request_id, epoch, owner))

    def finish(self, claim: Claim, *, start: int, tokens: int) -> Any:
        """Commits the rest of a request with its end."""
        item = make_item(claim, start, start + tokens, final=True)
        call = CommitCalls(self._keys).commit([item])
        names = [*_of_workers(self._keys), *self._keys.of_scripts(claim.request_id)]
        return self._run("commit", names, call.arguments)

    def restore(self, request_id: str) -> Any:
        names = [*_of_workers(self._keys), *self._keys.of_scripts(request_id)]
        return self._run("restore", names, (request_id,))

    def _run(self, name: str, names: list[str], arguments: tuple[Argument, ...] | Any) -> Any:
        parts = (*_PARTS.get(name, ("common", "request", "running")), name)
        source = "\n".join((_FOLDER / f"{part}.lua").read_text() for part in parts)
        settings = script_settings(
            lease_seconds=self._broker.lease_seconds,
            max_queue_seconds=86_400.0,
            retention_seconds=3600.0,
            max_attempts=5,
            max_backlog=None,
        )
        return self._connection.eval(source, len(names), *names, *settings, *arguments)


def _of_producers(keys: Keys) -> list[str]:
    books = [keys.open, keys.counts, keys.delay, keys.control, keys.wait]
    return [*books, *map(keys.ingress, range(4)), keys.log_positions]


def _of_workers(keys: Keys) -> list[str]:
    return [*_of_producers(keys), *map(keys.resumed, range(4)), keys.lease, keys.dead]
