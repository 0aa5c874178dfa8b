"""The worker's side of the broker: candidates, claims, commits, leases, and the ends of claims."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import redis

from quire.errors import BrokerUnavailable, ProtocolError, QuireError
from quire.keys import Keys
from quire.queue.calls import (
    MAX_ITEMS_PER_CALL,
    MAX_REASON_LENGTH,
    announce_call,
    balance_call,
    beat_call,
    claim_call,
    dead_letter_call,
    fail_call,
    heartbeat_call,
    in_parts,
    release_call,
)
from quire.queue.claim.ingress import IngressReader
from quire.queue.publish.commits import CommitCalls, Extension
from quire.queue.repair.damage import condemn
from quire.queue.replies import claim_answer
from quire.queue.shard import Shard
from quire.queue.values import (
    BackOff,
    Candidate,
    Claim,
    Claimed,
    CommitItem,
    CommitReply,
    HeartbeatReply,
    NotClaimed,
    NotClaimedReason,
    QueuePolicy,
    new_owner,
)
from quire.transport.connection import is_refused
from quire.transport.procedure import command
from quire.transport.script_runner import Begun, ScriptCall, raise_if_error
from quire.transport.shared_connection import SharedConnection
from quire.wire.codec import pack
from quire.wire.output import Completion, ErrorInfo, FinishReason, State
from quire.wire.protocol import Priority

#: A worker that was silent for so long is removed from the registry.
WORKER_MEMORY_SECONDS = 86_400.0

#: How often a waiting read checks whether the queue is still paused.
PAUSE_POLL_SECONDS = 0.1

_NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BegunCommit:
    """What `Working.begin` has sent."""

    extensions: list[Extension]
    calls: Begun


class Working(Shard):
    """The worker's side of a Broker."""

    def __init__(self, connection: redis.Redis, keys: Keys, **options: Any) -> None:
        super().__init__(connection, keys, **options)
        self._commit_calls = CommitCalls(keys)
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
        call = balance_call(self.keys, most=MAX_ITEMS_PER_CALL)
        return int(self._scripts.run("balance", call))

    def announce(self, policy: QueuePolicy, *, replaces: bool = True) -> bool:
        """Ranks the requests that wait by this policy; returns whether that changed anything.

        Those that wait already are ranked anew by `restore`, some at a time. Without `replaces` it
        is announced only where there is none, as after the server has lost it.
        """
        call = announce_call(self.keys, policy, replaces=replaces)
        return bool(self._scripts.run("announce", call))

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

        `worker` is noted as the one of each session of which it gets a turn. A turn whose last one
        another live worker had is KEPT for that one, for `affinity_seconds` from the first claim
        that is refused so.
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
            ended = condemn(
                self._scripts, self.keys, transition="claim", request_id=request_id, error=error
            )
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

    def sharing(self) -> SharedConnection:
        """A connection to the node of this shard, for `begin` of all shards of the node."""
        return SharedConnection(self.connection)

    def begin(self, items: Sequence[CommitItem], shared: SharedConnection) -> BegunCommit:
        """Sends what EXTEND may add of these items; `commit` of the same items reads the replies.

        So the commits of several shards reach their node together. Begin and commit the shards in
        the same order.
        """
        extensions: list[Extension] = []
        first = next(iter(in_parts(items)), [])
        begun = self._scripts.begin("extend", self._calls_of(first, extensions), shared)
        return BegunCommit(extensions, begun)

    def commit(
        self, items: Sequence[CommitItem], *, begun: BegunCommit | None = None
    ) -> list[CommitReply]:
        """Publishes tokens and ends, one answer per item in the same order.

        Each item is decided alone; at most one item per request. Leases are not renewed, see
        `heartbeat`. EXTEND adds tokens if the log position is the expected one; COMMIT decides all
        other items. ProtocolError if the keys of one of these are damaged; repeating the call does
        not help. Then it is unknown which of the others are committed: commit each item in a call
        of its own to find the damaged one.
        """
        replies: list[CommitReply] = []
        for part in in_parts(items):
            answers = self._extend(part, begun)
            begun = None
            left = [number for number in range(len(part)) if number not in answers]
            if left:
                judged = self._judge([part[number] for number in left])
                answers.update(zip(left, judged, strict=True))
            replies += [answers[number] for number in range(len(part))]
        return replies

    def _calls_of(
        self, items: Sequence[CommitItem], extensions: list[Extension]
    ) -> Iterator[ScriptCall]:
        for extension in self._commit_calls.extensions(items):
            extensions.append(extension)
            yield extension.call

    def _extend(
        self, items: Sequence[CommitItem], begun: BegunCommit | None
    ) -> dict[int, CommitReply]:
        """The answers for the items that EXTEND has added, by index in `items`."""
        if begun is None:
            extensions = list[Extension]()
            replies = self._scripts.run_as_made("extend", self._calls_of(items, extensions))
        else:
            extensions, replies = begun.extensions, self._scripts.finish(begun.calls)
        answers: dict[int, CommitReply] = {}
        for extension, reply in zip(extensions, replies, strict=True):
            answers |= self._commit_calls.extended(extension, raise_if_error(reply))
        return answers

    def _judge(self, items: Sequence[CommitItem]) -> list[CommitReply]:
        """COMMIT, for the items that EXTEND has not added or may not add."""
        durability = self._durability if any(item.completion for item in items) else None
        call = self._commit_calls.commit(items)
        if durability:
            (reply,) = self._scripts.run_many("commit", [call], durability=durability)
        else:
            reply = self._scripts.run("commit", call)
        return self._commit_calls.committed(items, raise_if_error(reply))

    def heartbeat(self, claims: Sequence[Claim]) -> list[HeartbeatReply]:
        """Renews the leases that are still held, one answer per claim in the same order."""
        replies: list[HeartbeatReply] = []
        for part in in_parts(claims):
            rows = self._scripts.run("heartbeat", heartbeat_call(self.keys, part))
            replies += [HeartbeatReply(bool(alive), bool(cancel)) for alive, cancel in rows]
        return replies

    def release(self, claims: Sequence[Claim]) -> list[bool]:
        """Gives claims back: the requests are requeued with their tokens; no attempt is counted.

        They keep their arrival, and so come before later ones. False for a claim that is not held
        any more. A cancelled request ends.
        """
        replies: list[bool] = []
        for part in in_parts(claims):
            rows = self._scripts.run("release", release_call(self.keys, part))
            replies += [bool(row) for row in rows]
        return replies

    def fail(self, claim: Claim, error: ErrorInfo, *, retry: BackOff | None = None) -> State | None:
        """Reports a failed attempt. Returns the state after it; None if fenced.

        With a `retry` the request keeps its tokens and is `scheduled` for another attempt, after a
        pause that doubles each time. When no attempt is left it ends as `failed` with `error`, and
        leaves a dead letter. Without a `retry` it ends at once and leaves none; use this for an
        error that every attempt would meet. A request that was cancelled, or is past its deadline,
        ends as cancelled or expired.
        """
        completion = Completion(claim.request_id, State.FAILED, FinishReason.ERROR, error=error)
        reason = f"{error.code}: {error.message}"[:MAX_REASON_LENGTH]
        call = fail_call(self.keys, claim, retry=retry, reason=reason, done=completion.encode())
        state = self._scripts.run("fail", call)
        return State(state.decode()) if state else None

    def dead_letter(self, claim: Claim, reason: str, *, error: ErrorInfo | None = None) -> bool:
        """Ends a claimed request that can never run, and keeps its bytes for an operator.

        For a message that cannot be decoded, or has an unknown major version. The request gets a
        `failed` record with `error` (code `undecodable` by default). False if fenced.
        """
        reason = reason[:MAX_REASON_LENGTH]
        completion = Completion(
            request_id=claim.request_id,
            state=State.FAILED,
            finish_reason=FinishReason.REJECTED,
            error=error or ErrorInfo("undecodable", reason),
        )
        call = dead_letter_call(self.keys, claim, reason, done=completion.encode())
        return bool(self._scripts.run("dead_letter", call))

    def beat_worker(
        self,
        worker: str,
        state: str,
        load: Mapping[str, float],
        *,
        model: str = "",
        adapters: Mapping[str, str] = _NO_ADAPTERS,
        policy: str = "",
    ) -> bool:
        """Signs the registry for a worker; removes workers that were silent for a day.

        `model` and `adapters` are those it serves, `policy` is its order; see WorkerInfo.

        Returns whether an operator has asked the worker to drain: True until its state is
        `draining`, `stopped` or `failed`.
        """
        served = {"model": model, "adapters": dict(adapters), "policy": policy}
        named = {name: value for name, value in served.items() if value}
        data = pack({**load, **named}, field="load")
        call = beat_call(
            self.keys, worker, state=state, load=data, memory_seconds=WORKER_MEMORY_SECONDS
        )
        return bool(self._scripts.run("beat_worker", call))

    def seen_ms(self, worker: str) -> int:
        """When the worker last signed the registry, on the broker's clock; 0 if it never did.

        ProtocolError if the registry cannot be read.
        """
        try:
            word = self._read(command("hget", self.keys.workers, worker))
        except BrokerUnavailable as error:
            if is_refused(error):
                raise ProtocolError(f"the registry cannot be read: {error}") from error
            raise
        seen = (word or b"").partition(b" ")[0]
        return int(seen) if seen.isdigit() else 0


def _is_refusal(reply: Any) -> bool:
    """Whether the server refused the call without any effect, and may accept it later."""
    return isinstance(reply, QuireError) and not isinstance(reply, ProtocolError)
