"""HEARTBEAT, RELEASE and FAIL: a worker keeps its claims, or gives them back."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from quire.keys import Keys
from quire.queue.repair.damage import MAX_REASON_LENGTH
from quire.queue.request.arguments import in_parts, names_of
from quire.queue.request.claims import Claim, call_of_claims, fence_of
from quire.queue.shard import Shard
from quire.transport.script_calls import ScriptCall
from quire.wire.output import Completion, ErrorInfo, FinishReason, State


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """`alive`: the lease was renewed. Otherwise the claim is lost for good."""

    alive: bool
    cancel_requested: bool


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


class Leasing(Shard):
    """What a worker does with its claims."""

    def heartbeat(self, claims: Sequence[Claim]) -> list[HeartbeatReply]:
        """Renews the leases that are still held, one answer per claim in the same order."""
        replies: list[HeartbeatReply] = []
        for part in in_parts(claims):
            rows = self._scripts.run("heartbeat", call_of_claims(self.keys, part))
            replies += [HeartbeatReply(bool(alive), bool(cancel)) for alive, cancel in rows]
        return replies

    def release(self, claims: Sequence[Claim]) -> list[bool]:
        """Gives claims back: the requests are requeued with their tokens; no attempt is counted.

        They keep their arrival, and so come before later ones. False for a claim that is not held
        any more. A cancelled request ends.
        """
        replies: list[bool] = []
        for part in in_parts(claims):
            rows = self._scripts.run("release", call_of_claims(self.keys, part))
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


def fail_call(
    keys: Keys, claim: Claim, *, retry: BackOff | None, reason: str, done: bytes
) -> ScriptCall:
    """For fail.lua. Without a `retry` the request ends."""
    pauses = (retry.first_ms, retry.longest_ms, retry.draw()) if retry else (0, 0, 0)
    arguments = (*fence_of(claim), int(retry is not None), reason, done, *pauses)
    return ScriptCall(names_of(keys, [claim.request_id]), arguments)
