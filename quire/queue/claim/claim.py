"""CLAIM: a worker finds the requests that are due, and claims them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import redis

from quire.errors import ProtocolError, QuireError
from quire.keys import Keys
from quire.queue.claim.ingress import Candidate, IngressReader
from quire.queue.publish.output_log import OutputRead
from quire.queue.repair.dead_letters import DeadLettering
from quire.queue.request.arguments import MAX_ITEMS_PER_CALL, names_of
from quire.queue.request.claims import Claim, new_owner
from quire.transport.script_calls import ScriptCall, raise_if_error
from quire.wire.codec import reading
from quire.wire.output import ErrorInfo, TokenChunk
from quire.wire.protocol import Priority

#: How often a waiting read checks whether the queue is still paused.
PAUSE_POLL_SECONDS = 0.1

_log = logging.getLogger(__name__)


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


class Claiming(DeadLettering):
    """How a worker gets requests."""

    def __init__(self, connection: redis.Redis, keys: Keys, **options: Any) -> None:
        super().__init__(connection, keys, **options)
        self._ingress = IngressReader(self.connection, keys, retrying=self._retrying)

    def ensure_groups(self) -> None:
        """Creates the ingress streams and their consumer group if they are missing."""
        self._ingress.ensure_groups()

    def peek(
        self, *, count: int, block_seconds: float = 0.0, least: Priority = Priority.LOW
    ) -> list[Candidate]:
        """The first `count` queued requests of class `least` or better, by rank.

        Other workers may claim them at any moment. If there are none, waits up to `block_seconds`
        for the next one. The list is empty while the queue is paused. An outage raises
        BrokerUnavailable without a retry.
        """
        give_up = time.monotonic() + min(block_seconds, self._longest_block)
        candidates, is_paused = self._ingress.peek(count=count, least=least)
        while (left := give_up - time.monotonic()) > 0 and (is_paused or not candidates):
            if is_paused:
                time.sleep(min(left, PAUSE_POLL_SECONDS))
                candidates, is_paused = self._ingress.peek(count=count, least=least)
                continue
            look = self._ingress.look(count=count, least=least)
            candidates, is_paused = look.candidates, look.is_paused
            is_settled = look.is_balanced or not self.balance()
            if candidates or is_paused:
                continue
            if is_settled:
                self._ingress.wait(look.cursors, seconds=left)
            candidates, is_paused = self._ingress.peek(count=count, least=least)
        return [] if is_paused else candidates

    def balance(self) -> int:
        """Consumes surplus tickets, some of each class; returns how many.

        Ended requests leave tickets behind; without them the lag of an empty queue is 0. Any worker
        may call it at any time; `peek` does if nothing waits.
        """
        call = ScriptCall(self.keys.of_workers, (MAX_ITEMS_PER_CALL,))
        return int(self._scripts.run("balance", call))

    def claim(
        self,
        candidates: Sequence[Candidate],
        *,
        fingerprint: str | None = None,
        owners: Sequence[str] | None = None,
        worker: str = "",
        affinity_seconds: float = 0.0,
    ) -> list[Claimed | NotClaimed]:
        """Claims requests, one answer per candidate in the same order.

        Either the worker holds the request now, with a running lease, or the answer says why not.
        `fingerprint` names the engine and is recorded at the first claim. A request with damaged
        keys, or a claim that the server refuses, fails alone, see NotClaimedReason. A refusal is
        raised only if nothing was claimed.

        A call that raised BrokerUnavailable may have claimed requests. To be able to repeat it,
        pass `owners`, one per candidate, see `new_owner`. A second call with the same owners
        returns what the first one has claimed.

        `worker` is noted in the records of its requests, and as the one of each session of which it
        gets a turn. A turn whose last one another live worker had is KEPT for that one, for
        `affinity_seconds` from the first claim that is refused so.
        """
        owners = owners or [new_owner() for _ in candidates]
        calls = [
            claim_call(
                self.keys,
                candidate.request_id,
                owner=owner,
                fingerprint=fingerprint,
                worker=worker,
                affinity_ms=int(affinity_seconds * 1000),
            )
            for candidate, owner in zip(candidates, owners, strict=True)
        ]
        replies = self._scripts.run_many("claim", calls)
        answers = [
            self._claimed(candidate.request_id, owner, reply=reply)
            for candidate, owner, reply in zip(candidates, owners, replies, strict=True)
        ]
        # Return successful claims; otherwise no worker runs them until their leases expire.
        if not any(isinstance(answer, Claimed) for answer in answers):
            for reply in filter(_is_refusal, replies):
                raise reply
        return answers

    def _claimed(self, request_id: str, owner: str, *, reply: Any) -> Claimed | NotClaimed:
        if _is_refusal(reply):
            _log.warning("claim of %s: %s", request_id, reply)
            return NotClaimed(request_id, NotClaimedReason.REFUSED)
        try:
            return claim_answer(request_id, owner, raise_if_error(reply))
        except ProtocolError as error:
            _log.error("claim of %s: %s", request_id, error)
            ended = self._condemn("claim", request_id, error=error)
            if not ended and not isinstance(reply, ProtocolError):
                # This worker holds the claim, but cannot read the log.
                ended = self._give_up(Claim(request_id, int(reply[1]), owner), error=error)
        return NotClaimed(request_id, NotClaimedReason.DAMAGED, ended=ended)

    def _give_up(self, claim: Claim, *, error: ProtocolError) -> bool:
        info = ErrorInfo("broken_log", str(error))
        try:
            return self.dead_letter(claim, f"broken_log: {error}", error=info)
        except QuireError as worse:
            _log.error("dead letter of %s: %s", claim.request_id, worse)
            return False


def claim_call(
    keys: Keys,
    request_id: str,
    *,
    owner: str,
    fingerprint: str | None,
    worker: str = "",
    affinity_ms: int = 0,
) -> ScriptCall:
    """For claim.lua."""
    names = [*names_of(keys, [request_id]), keys.served, keys.workers]
    return ScriptCall(names, (request_id, owner, fingerprint or "", worker, affinity_ms))


def claim_answer(request_id: str, owner: str, reply: Sequence[Any]) -> Claimed | NotClaimed:
    """Reads the reply of claim.lua. ProtocolError when what was claimed is not ours."""
    if reply[0] != b"claimed":
        reason = NotClaimedReason(reply[0].decode())
        seconds = int(reply[2]) / 1000 if len(reply) > 2 else 0.0
        return NotClaimed(request_id, reason, ended=bool(reply[1]), retry_seconds=seconds)
    with reading(f"what was claimed of {request_id}"):
        return _claimed(request_id, owner, reply)


def _claimed(request_id: str, owner: str, reply: Sequence[Any]) -> Claimed:
    _, epoch, body, attempts, submitted_ms, fingerprint, cancel, entries, trial_tokens = reply[:9]
    arrival, moment, deadline_ms, due_ms, answer_limit = reply[9:]
    if body is None:
        raise ProtocolError("the message of the request is gone")
    log = [(entry_id, _pairs(fields)) for entry_id, fields in entries]
    return Claimed(
        claim=Claim(request_id, int(epoch), owner),
        request_bytes=body,
        published=OutputRead(request_id, log, seen=0).chunks,
        attempts=int(attempts),
        enqueued_ms=int(submitted_ms),
        fingerprint=fingerprint.decode() or None,
        cancel_requested=bool(cancel),
        trial_tokens=int(trial_tokens),
        arrival_us=int(arrival),
        ranked_us=int(moment),
        deadline_ms=int(deadline_ms) or None,
        due_ms=int(due_ms) or None,
        answer_limit=int(answer_limit) if answer_limit else None,
    )


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _is_refusal(reply: Any) -> bool:
    """Whether the server refused the call without any effect, and may accept it later."""
    return isinstance(reply, QuireError) and not isinstance(reply, ProtocolError)
