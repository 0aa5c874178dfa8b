"""The worker's side of the broker: deliveries, claims, commits, leases, and how claims end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import redis

from quire.broker.damage import condemn
from quire.broker.ingress import IngressReader
from quire.broker.shard import Shard
from quire.errors import BrokerUnavailable, ProtocolError, QuireError
from quire.keys import Keys
from quire.transitions.calls import (
    MAX_REASON_LENGTH,
    beat_call,
    claim_call,
    dead_letter_call,
    fail_call,
    heartbeat_call,
    in_parts,
    release_call,
)
from quire.transitions.commits import CommitCalls, Extension
from quire.transitions.replies import claim_answer
from quire.transitions.values import (
    BackOff,
    Claim,
    Claimed,
    CommitItem,
    CommitReply,
    HeartbeatReply,
    IngressEntry,
    NotClaimed,
    NotClaimedReason,
    new_owner,
)
from quire.transport.connection import is_refused
from quire.transport.procedure import command
from quire.transport.script_runner import Call, raise_if_error
from quire.wire.codec import pack
from quire.wire.output import Completion, ErrorInfo, FinishReason, State
from quire.wire.protocol import Priority

#: A worker that was silent for this long is removed from the registry, with its consumers.
WORKER_MEMORY_SECONDS = 86_400.0

#: How often a read that waits looks whether the queue is still paused.
PAUSE_POLL_SECONDS = 0.1

_NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})
_log = logging.getLogger(__name__)


class Working(Shard):
    """The worker's side of a Broker."""

    def __init__(self, connection: redis.Redis, keys: Keys, **options: Any) -> None:
        super().__init__(connection, keys, **options)
        self._commit_calls = CommitCalls(keys)
        self._ingress = IngressReader(connection, keys, retrying=self._retrying)

    def ensure_groups(self) -> None:
        """Creates the ingress streams and their consumer group where they are missing."""
        self._ingress.ensure_groups()

    def read_ingress(
        self, worker: str, *, count: int, block_seconds: float, least: Priority = Priority.LOW
    ) -> list[IngressEntry]:
        """Up to `count` fresh deliveries for `worker`, most urgent first; see IngressReader.read.

        None of a class below `least`: those stay for workers that have room for them.
        An empty list while the queue is paused. BrokerUnavailable is raised without a retry; what a
        lost reply has delivered is found by `recover_entries`.
        """
        give_up = time.monotonic() + min(block_seconds, self._longest_block)
        while self._is_paused():
            left = give_up - time.monotonic()
            if left <= 0:
                return []
            time.sleep(min(left, PAUSE_POLL_SECONDS))
        block = max(0.0, give_up - time.monotonic()) if block_seconds > 0 else 0.0
        return self._ingress.read(worker, count=count, block_seconds=block, least=least)

    def recover_entries(
        self,
        worker: str,
        *,
        min_idle_seconds: float,
        count: int,
        least: Priority = Priority.LOW,
    ) -> list[IngressEntry]:
        """Deliveries nobody claimed: all of `worker`'s own, and any left for `min_idle_seconds`.

        At most `count` of each stream, of class `least` or better.

        Call it at the start and from time to time. Harmless for entries that someone is just
        claiming: the claim decides.
        """
        return self._ingress.recover(
            worker, min_idle_seconds=min_idle_seconds, count=count, least=least
        )

    def claim(
        self,
        entries: Sequence[IngressEntry],
        *,
        fingerprint: str | None = None,
        owners: Sequence[str] | None = None,
    ) -> list[Claimed | NotClaimed]:
        """Turns deliveries into claims, one answer per entry in the same order.

        Either the request is this worker's now, with its lease running, or the answer says why not.
        The entry is removed from the stream in both cases. `fingerprint` names the engine and is
        recorded at the first claim. A request with damaged keys, or one that the server refuses,
        fails alone, see NotClaimedReason; a refusal is raised only when nothing was claimed.

        A call that raised BrokerUnavailable may have claimed all the same. Whoever may make it
        again passes `owners` of its own, see `new_owner`, one per entry: the same ones again are
        answered with what the first call has claimed.
        """
        owners = owners or [new_owner() for _ in entries]
        calls = [
            claim_call(self.keys, entry, owner=owner, fingerprint=fingerprint)
            for entry, owner in zip(entries, owners, strict=True)
        ]
        replies = self._scripts.run_many("claim", calls)
        answers = [
            self._claimed(entry, owner, reply=reply)
            for entry, owner, reply in zip(entries, owners, replies, strict=True)
        ]
        # Successful claims must be returned, or nobody runs them until their leases expire.
        if not any(isinstance(answer, Claimed) for answer in answers):
            for reply in filter(_is_refusal, replies):
                raise reply
        return answers

    def _claimed(self, entry: IngressEntry, owner: str, *, reply: Any) -> Claimed | NotClaimed:
        request_id = entry.request_id
        if _is_refusal(reply):
            _log.warning("claim of %s: %s", request_id, reply)
            return NotClaimed(request_id, NotClaimedReason.REFUSED)
        try:
            return claim_answer(request_id, owner, raise_if_error(reply))
        except ProtocolError as error:
            _log.error("claim of %s: %s", request_id, error)
            ended = condemn(
                self._scripts,
                self.keys,
                transition="claim",
                request_id=request_id,
                error=error,
                entry=entry,
            )
            if not ended and not isinstance(reply, ProtocolError):
                # We hold the claim, but cannot read its log.
                ended = self._give_up(Claim(request_id, int(reply[1]), owner), error=error)
        return NotClaimed(request_id, NotClaimedReason.DAMAGED, ended=ended)

    def _give_up(self, claim: Claim, *, error: ProtocolError) -> bool:
        info = ErrorInfo("broken_log", str(error))
        try:
            return self.dead_letter(claim, f"broken_log: {error}", error=info)
        except QuireError as worse:
            _log.error("dead letter of %s: %s", claim.request_id, worse)
            return False

    def commit(self, items: Sequence[CommitItem]) -> list[CommitReply]:
        """Publishes tokens and ends, one answer per item in the same order.

        Each is judged alone; at most one item per request. It renews no lease; see `heartbeat`.
        EXTEND adds tokens where the log is as their worker believes, COMMIT then judges all other
        items. ProtocolError when the keys of one of those hold what no transition wrote; repeating
        the call does not help. Which of the others are committed is unknown then: commit each item
        in a call of its own to find out which one it is.
        """
        replies: list[CommitReply] = []
        for part in in_parts(items):
            answers = self._extend(part)
            left = [number for number in range(len(part)) if number not in answers]
            if left:
                judged = self._judge([part[number] for number in left])
                answers.update(zip(left, judged, strict=True))
            replies += [answers[number] for number in range(len(part))]
        return replies

    def _extend(self, items: Sequence[CommitItem]) -> dict[int, CommitReply]:
        """The answers to the items that EXTEND has added, by their index in `items`."""
        extensions: list[Extension] = []

        def calls() -> Iterator[Call]:
            for extension in self._commit_calls.extensions(items):
                extensions.append(extension)
                yield extension.call

        replies = self._scripts.run_as_made("extend", calls())
        answers: dict[int, CommitReply] = {}
        for extension, reply in zip(extensions, replies, strict=True):
            answers |= self._commit_calls.extended(extension, raise_if_error(reply))
        return answers

    def _judge(self, items: Sequence[CommitItem]) -> list[CommitReply]:
        """COMMIT for what EXTEND has not added, or may not."""
        durability = self._durability if any(item.completion for item in items) else None
        call = self._commit_calls.commit(items)
        if durability:
            (reply,) = self._scripts.run_many("commit", [call], durability=durability)
        else:
            reply = self._scripts.run("commit", call)
        return self._commit_calls.committed(items, raise_if_error(reply))

    def heartbeat(self, claims: Sequence[Claim]) -> list[HeartbeatReply]:
        """Renews the leases still held, one answer per claim in the same order."""
        replies: list[HeartbeatReply] = []
        for part in in_parts(claims):
            rows = self._scripts.run("heartbeat", heartbeat_call(self.keys, part))
            replies += [HeartbeatReply(bool(alive), bool(cancel)) for alive, cancel in rows]
        return replies

    def release(self, claims: Sequence[Claim]) -> list[bool]:
        """Gives claims back: the requests are queued again, their tokens kept, no attempt counted.

        They go before the others of their class. False for a claim that was not held any more. A
        request that a caller has cancelled ends.
        """
        replies: list[bool] = []
        for part in in_parts(claims):
            rows = self._scripts.run("release", release_call(self.keys, part))
            replies += [bool(row) for row in rows]
        return replies

    def fail(self, claim: Claim, error: ErrorInfo, *, retry: BackOff | None = None) -> State | None:
        """Reports a failed attempt. Returns the state after it, None when fenced.

        With a `retry` the request is `scheduled` for another attempt after a pause that doubles
        with each, its tokens kept; when its attempts are spent it ends as `failed` with `error`,
        and leaves a dead letter. Without a `retry` it ends at once and leaves none: for an error
        that another attempt would only meet again. A request that a caller has cancelled, or that
        is past its deadline, ends as that.
        """
        completion = Completion(claim.request_id, State.FAILED, FinishReason.ERROR, error=error)
        reason = f"{error.code}: {error.message}"[:MAX_REASON_LENGTH]
        call = fail_call(self.keys, claim, retry=retry, reason=reason, done=completion.encode())
        state = self._scripts.run("fail", call)
        return State(state.decode()) if state else None

    def dead_letter(self, claim: Claim, reason: str, *, error: ErrorInfo | None = None) -> bool:
        """Ends a claimed request that can never run and keeps its original bytes for a person.

        For bytes that cannot be read, or an unknown major version. The caller of the request gets a
        `failed` record with `error` (code `undecodable` by default). False when fenced.
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
    ) -> bool:
        """Notes that a worker lives; forgets those silent for a day, with their idle consumers.

        `model` and `adapters` are those it serves, see WorkerInfo.

        Returns whether an operator wants it to drain: True until its state is `draining`, `stopped`
        or `failed`.
        """
        served = {"model": model, "adapters": dict(adapters)}
        told = {name: value for name, value in served.items() if value}
        data = pack({**load, **told}, field="load")
        call = beat_call(
            self.keys, worker, state=state, load=data, memory_seconds=WORKER_MEMORY_SECONDS
        )
        return bool(self._scripts.run("beat_worker", call))

    def seen_ms(self, worker: str) -> int:
        """When the worker last signed the registry, on the broker's clock; 0 if Redis knows none.

        ProtocolError where the registry is none.
        """
        try:
            word = self._read(command("hget", self.keys.workers, worker))
        except BrokerUnavailable as error:
            if is_refused(error):
                raise ProtocolError(f"the registry cannot be read: {error}") from error
            raise
        seen = (word or b"").partition(b" ")[0]
        return int(seen) if seen.isdigit() else 0

    def _is_paused(self) -> bool:
        control = self.keys.control
        look = partial(self._connection.hexists, control, "paused")
        return bool(self._retrying(look, repeatable=False))


def _is_refusal(reply: Any) -> bool:
    """The server refused the call without doing anything, and may accept it later."""
    return isinstance(reply, QuireError) and not isinstance(reply, ProtocolError)
