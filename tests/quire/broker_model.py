"""What is true of the requests of a queue, without keys and scripts; see broker_machine.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.queue.claim.ingress import Candidate
from quire.queue.request.claims import Claim
from quire.wire.output import State


@dataclass
class Request:
    """What is true of one request."""

    state: State = State.QUEUED
    asked: bytes = b""
    published: int = 0
    holder: Claim | None = None
    #: Tokens in the log when its holder claimed it.
    claimed_at: int = 0
    least_attempts: int = 0
    most_attempts: int = 0
    cancel: bool = False
    #: Who wrote its end, and who gave it back last: their calls may come again.
    ended_by: Claim | None = None
    released_by: Claim | None = None

    def leave(self, state: State) -> None:
        self.state, self.holder = state, None


@dataclass
class Model:
    """All requests, and what workers have in their hands."""

    requests: dict[str, Request] = field(default_factory=dict)
    entries: list[Candidate] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    letters: set[str] = field(default_factory=set)
    is_paused: bool = False
