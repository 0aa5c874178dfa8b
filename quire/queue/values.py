"""The arguments and results of the broker's transitions.

They are frozen: a result is a fact about one moment of the request. Nothing here talks to Redis.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from quire.wire.logprobs import TokenLogprob, ToldPrompt
from quire.wire.output import Activity, Completion, State, TokenChunk
from quire.wire.protocol import Priority


@dataclass(frozen=True, slots=True)
class Submitted:
    """The answer to a submit.

    `request_id` is that of an earlier request when the idempotency key was known; `created` says
    whether this very call enqueued it: False for a repeated call, even if its first try did.
    `asked` is what the request already stored under the id asks, empty if that is not known.
    """

    request_id: str
    state: State
    created: bool
    asked: bytes = b""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A queued request that a worker may try to claim; not a right to run it.

    The lower the rank, the sooner it is due; in microseconds, see ranking.lua.
    """

    request_id: str
    priority: Priority
    rank: int


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How waiting requests are ranked; see `engine.scheduling.policy`.

    `aging_ms`: what a class, or the largest size, is worth of waiting. `size_scale`: the tokens,
    prompt and answer together, that count as the largest size.
    """

    name: str
    aging_ms: int
    size_scale: int

    def __str__(self) -> str:
        return f"{self.name}, aging {self.aging_ms} ms, size scale {self.size_scale} tokens"


@dataclass(frozen=True, slots=True)
class Claim:
    """The fence: the exclusive right to publish for a request, as long as its lease is renewed.

    The epoch alone would not do: when Redis loses its tail, two claims can get the same one.
    `owner` is the hex of 128 random bits, fresh for every claim.
    """

    request_id: str
    epoch: int
    owner: str


def new_owner() -> str:
    """The owner of a claim that is still to be made; for that one claim alone."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request that is now this worker's to run.

    `published` are the chunks already in the log, in order and without gaps; the generation goes on
    after them. `fingerprint` is the one recorded at the first claim, None when this is the first.
    `trial_tokens`: how many more it should publish before others begin beside it, as it may be what
    its last workers died of; 0 for one that is no suspect. `arrival_us`: when it was queued, in
    microseconds of Redis' clock; no two have the same. `ranked_us`: the moment by which it is
    ranked while tenants share its class. Of the record, None for none: `deadline_ms`, `due_ms` (end
    of the target latency), `answer_limit` (without `max_tokens`; 0: the rest of the context).
    """

    claim: Claim
    request_bytes: bytes
    published: tuple[TokenChunk, ...]
    attempts: int
    enqueued_ms: int
    fingerprint: str | None
    cancel_requested: bool
    trial_tokens: int = 0
    arrival_us: int = 0
    ranked_us: int = 0
    deadline_ms: int | None = None
    due_ms: int | None = None
    answer_limit: int | None = None

    @property
    def num_published(self) -> int:
        return self.published[-1].end if self.published else 0


class NotClaimedReason(StrEnum):
    """Why a request could not be claimed.

    PAUSED: the queue was paused since it was found; it still waits. DAMAGED: the keys of the
    request hold what no transition wrote. Usually it has been ended as failed, with a dead letter;
    if that was not possible either, it still waits. REFUSED: the server refused the claim, for
    instance for want of memory; nothing has changed, and it still waits. EARLIER_TURN: it waits for
    the end of an earlier turn of its session. KEPT: it is kept for the worker of the last turn of
    its session, for `retry_seconds` at most. For any other reason it does not wait any more.
    """

    FINISHED = "finished"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ATTEMPTS_SPENT = "attempts_spent"
    MISSING = "missing"
    RUNNING = "running"
    SCHEDULED = "scheduled"
    PAUSED = "paused"
    DAMAGED = "damaged"
    REFUSED = "refused"
    EARLIER_TURN = "earlier_turn"
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class NotClaimed:
    """A request that could not be claimed. `ended`: this call wrote the terminal record."""

    request_id: str
    reason: NotClaimedReason
    ended: bool = False
    retry_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CommitItem:
    """One request's part of a commit: the tokens from `start` on, and the end if this is it.

    `text` is what these tokens added to the text; for `text_ends`, `logprobs` and `told_prompt`
    see TokenChunk. Only with a `completion` or an `activity` may the token ids be empty. With the
    first token of a request a `fingerprint` replaces that of its first claim, whose worker may have
    generated nothing and did not know the adapter before it had read the request.
    `activity` is what the request does now, if that has changed; not with a `completion`.
    """

    claim: Claim
    start: int
    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None = None
    text_ends: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    fingerprint: str = ""
    activity: Activity | None = None
    told_prompt: ToldPrompt = ()

    def __post_init__(self) -> None:
        assert self.start >= 0, "a commit cannot start before the first token"
        assert self.token_ids or self.completion or self.activity, "a commit of nothing"
        assert not (self.completion and self.activity), "an ended request does nothing"
        assert "\n" not in self.fingerprint, "it stands in a line"
        assert len(self.text_ends) in (0, len(self.token_ids)), "one text end per token, or none"
        assert not self.told_prompt or (self.token_ids and not self.start), "a prompt comes first"
        if self.logprobs:
            assert [one.token_id for one in self.logprobs] == [*self.token_ids], "of other tokens"


class CommitStatus(StrEnum):
    """What became of a commit item.

    OK: it is in the log. REPLAYED: it was there already. REWIND: Redis lost the end of the log;
    send again from `published`. FENCED: the claim is lost; drop the request and publish nothing.
    """

    OK = "ok"
    FENCED = "fenced"
    REWIND = "rewind"
    REPLAYED = "replayed"


@dataclass(frozen=True, slots=True)
class CommitReply:
    """`published` is the number of tokens in the log now (0 when fenced).

    If `published` is less than the item's end after REPLAYED, the rest was not written: send it
    again from there.
    """

    status: CommitStatus
    published: int
    cancel_requested: bool


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """`alive`: the lease was renewed. Otherwise the claim is lost for good."""

    alive: bool
    cancel_requested: bool


@dataclass(frozen=True, slots=True)
class Reaped:
    """A request whose lease had expired: queued again, or ended (`state` is terminal)."""

    request_id: str
    state: State


@dataclass(frozen=True, slots=True)
class Promoted:
    """A scheduled request that was due: queued, or ended (`state` is terminal)."""

    request_id: str
    state: State


@dataclass(frozen=True, slots=True)
class Expired:
    """A request that was ended because it had waited too long; `state` is terminal."""

    request_id: str
    state: State


class Lost(StrEnum):
    """What Redis had lost of the queue around an open request.

    ENTRY: its entry in a rank set. DELAY, LEASE, WAIT: its time in the set of that name.
    RECORD: the request itself, so that only its place in the counts was left.
    """

    ENTRY = "entry"
    DELAY = "delay"
    LEASE = "lease"
    WAIT = "wait"
    RECORD = "record"


@dataclass(frozen=True, slots=True)
class Restored:
    """An open request that was given back what Redis had lost of it; see Lost."""

    request_id: str
    lost: Lost


@dataclass(frozen=True, slots=True)
class BackOff:
    """How long to wait before the next attempt: the first pause, doubling up to the longest.

    Half of each pause is drawn at random, so that requests that failed together do not come back
    together.
    """

    first_seconds: float = 1.0
    longest_seconds: float = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.first_seconds <= self.longest_seconds < float("inf"):
            raise ValueError("pauses must be positive and the first not longer than the longest")

    @property
    def first_ms(self) -> int:
        return max(1, int(self.first_seconds * 1000))

    @property
    def longest_ms(self) -> int:
        return max(1, int(self.longest_seconds * 1000))

    def draw(self) -> int:
        """The random part of one pause, in thousandths of its half."""
        return secrets.randbelow(1001)


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """A snapshot of the request record, taken `at_ms` on the broker's clock.

    `published` is the number of tokens in the log, `prefix_hash` their hash; see TokenChunk. Of a
    request that has ended the `metadata` is with its completion, and empty here. `activity` is what
    a request that is RUNNING does in its worker, as the worker last told; None in other states.
    `waits_for` is the first open turn of its session, for which a QUEUED turn waits; None if it
    waits for a worker alone.
    """

    request_id: str
    state: State
    priority: Priority
    published: int
    attempts: int
    resumes: int
    cancel_requested: bool
    deadline_ms: int | None
    submitted_ms: int
    fingerprint: str | None
    prefix_hash: str = ""
    tenant: str = "default"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    at_ms: int = 0
    activity: Activity | None = None
    session_id: str | None = None
    waits_for: str | None = None

    @property
    def seconds_left(self) -> float | None:
        """How long until its time is over; 0 once a caller has cancelled it, None without an end.

        An open one that has no time left is waiting for somebody to end it.
        """
        if self.cancel_requested or self.deadline_ms is None:
            return 0.0 if self.cancel_requested else None
        return max(0, self.deadline_ms - self.at_ms) / 1000


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that was given up: why, after how many attempts, and its original bytes."""

    entry_id: str
    request_id: str
    reason: str
    attempts: int
    original: bytes


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What one shard of a queue takes in before it refuses; None is no limit.

    `requests` and `tokens` limit those that wait, scheduled or queued. A request counts the tokens
    of its prompt plus the most it may generate; while no tokens wait, it is let in however many
    these are. `per_tenant` is how many requests of one tenant may be open, waiting or running;
    `tenants` has those with a limit of their own, 0 for none. `rate` is how many tokens a tenant
    may submit per minute, prompt and most tokens of the answer; unused ones are given back at the
    end. `rates` has the tenants with a rate of their own, 0 for none.
    """

    requests: int | None = None
    tokens: int | None = None
    per_tenant: int | None = None
    tenants: Mapping[str, int] = field(default_factory=dict)
    rate: int | None = None
    rates: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = (self.requests, self.tokens, self.per_tenant, self.rate)
        if any(limit is not None and limit < 1 for limit in limits):
            raise ValueError("a limit is at least 1; None is no limit")
        if any(limit < 0 for limit in (*self.tenants.values(), *self.rates.values())):
            raise ValueError("the limit of a tenant is not negative; 0 is no limit")

    def of(self, tenant: str) -> int | None:
        """How many requests of this tenant may be open; None for no limit."""
        return self.tenants.get(tenant, self.per_tenant) or None

    def rate_of(self, tenant: str) -> int | None:
        """How many tokens this tenant may submit per minute; None for no limit."""
        return self.rates.get(tenant, self.rate) or None


@dataclass(frozen=True, slots=True)
class Backlog:
    """The backlog of one shard: the tokens that wait, and the open requests of each tenant."""

    tokens: int
    tenants: Mapping[str, int] = field(default_factory=dict)
