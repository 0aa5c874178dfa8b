"""Puts together the keys and arguments of the transitions, in the order their scripts read them.

Those of COMMIT are in commits.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from quire.keys import Keys
from quire.queue.values import BackOff, Claim, DeadLetter, QueuePolicy
from quire.transport.script_runner import Argument, ScriptCall
from quire.wire.codec import pack
from quire.wire.message import Message
from quire.wire.sizes import estimated_tokens, is_open_ended, most_tokens_of_answer

#: The most items of one Lua call: two to three milliseconds of the server's one thread.
MAX_ITEMS_PER_CALL = 256

#: The longest reason stored with a dead letter, in characters.
MAX_REASON_LENGTH = 500

_Item = TypeVar("_Item")


def submit_call(keys: Keys, message: Message, *, holder: str | None = None) -> ScriptCall:
    """For submit.lua. `holder` is the id found under the idempotency key, to be looked at too."""
    request = message.request
    names = [*keys.of_producers, *keys.of_scripts(request.id)]
    if request.idempotency_key is not None:
        names.append(keys.idempotency(request.tenant, request.idempotency_key))
        names += [keys.request(holder)] if holder else []
    metadata = pack(request.metadata, field="metadata") if request.metadata else b""
    return ScriptCall(
        names,
        (
            request.id,
            int(request.priority),
            request.tenant,
            request.deadline_ms or 0,
            metadata,
            message.data,
            holder or "",
            request.not_before_ms or 0,
            estimated_tokens(request),
            message.digest,
            most_tokens_of_answer(request),
            request.session_id or "",
            request.target_latency_ms or 0,
            message.kept,
            (request.answer_limit or 0) if is_open_ended(request) else "",
        ),
    )


def cancel_call(keys: Keys, request_id: str) -> ScriptCall:
    """For cancel.lua."""
    return ScriptCall((*keys.of_producers, *keys.of_scripts(request_id)), (request_id,))


def discard_call(keys: Keys, request_id: str) -> ScriptCall:
    """For discard.lua."""
    return ScriptCall(keys.of_request(request_id), (request_id,))


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
    names = [*_names(keys, [request_id]), keys.served, keys.workers]
    return ScriptCall(names, (request_id, owner, fingerprint or "", worker, affinity_ms))


def balance_call(keys: Keys, *, most: int) -> ScriptCall:
    """For balance.lua."""
    return ScriptCall(keys.of_workers, (most,))


def announce_call(keys: Keys, policy: QueuePolicy, *, replaces: bool) -> ScriptCall:
    """For announce.lua."""
    arguments = (policy.name, policy.aging_ms, policy.size_scale, int(replaces))
    return ScriptCall((keys.control, keys.survey), arguments)


def heartbeat_call(keys: Keys, claims: Sequence[Claim]) -> ScriptCall:
    """For heartbeat.lua."""
    return _of_claims(keys, claims)


def release_call(keys: Keys, claims: Sequence[Claim]) -> ScriptCall:
    """For release.lua."""
    return _of_claims(keys, claims)


def reap_call(keys: Keys, request_ids: Sequence[str]) -> ScriptCall:
    """For reap.lua."""
    return ScriptCall(_names(keys, request_ids), request_ids)


def promote_call(keys: Keys, request_ids: Sequence[str]) -> ScriptCall:
    """For promote.lua."""
    return ScriptCall(_names(keys, request_ids), request_ids)


def restore_call(keys: Keys, request_ids: Sequence[str]) -> ScriptCall:
    """For restore.lua."""
    return ScriptCall(_names(keys, request_ids), request_ids)


def survey_call(
    keys: Keys, *, count: int, pause_ms: int, rest_ms: int, is_at_once: bool = False
) -> ScriptCall:
    """For survey.lua."""
    arguments = (count, pause_ms, rest_ms, int(is_at_once))
    return ScriptCall((keys.open, keys.counts, keys.survey), arguments)


def expire_call(keys: Keys, request_ids: Sequence[str]) -> ScriptCall:
    """For expire.lua."""
    names = [*keys.of_producers, keys.lease]
    for request_id in request_ids:
        names += keys.of_scripts(request_id)
    return ScriptCall(names, request_ids)


def condemn_call(keys: Keys, request_id: str, *, reason: str, done: bytes) -> ScriptCall:
    """For condemn.lua."""
    return ScriptCall(_names(keys, [request_id]), (request_id, reason, done))


def dead_letter_call(keys: Keys, claim: Claim, reason: str, *, done: bytes) -> ScriptCall:
    """For dead_letter.lua."""
    return ScriptCall(_names(keys, [claim.request_id]), (*_fence(claim), reason, done))


def fail_call(
    keys: Keys, claim: Claim, *, retry: BackOff | None, reason: str, done: bytes
) -> ScriptCall:
    """For fail.lua. Without a `retry` the request ends."""
    pauses = (retry.first_ms, retry.longest_ms, retry.draw()) if retry else (0, 0, 0)
    arguments = (*_fence(claim), int(retry is not None), reason, done, *pauses)
    return ScriptCall(_names(keys, [claim.request_id]), arguments)


def requeue_call(keys: Keys, letter: DeadLetter, *, keep_tokens: bool) -> ScriptCall:
    """For requeue.lua."""
    arguments = (letter.request_id, letter.entry_id, int(keep_tokens))
    return ScriptCall(_names(keys, [letter.request_id]), arguments)


def beat_call(
    keys: Keys, worker: str, *, state: str, load: bytes, memory_seconds: float
) -> ScriptCall:
    """For beat_worker.lua."""
    arguments = (worker, state, load, int(memory_seconds * 1000))
    return ScriptCall((keys.workers, keys.control), arguments)


def in_parts(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """The items in their order, in parts that one call may take."""
    for first in range(0, len(items), MAX_ITEMS_PER_CALL):
        yield items[first : first + MAX_ITEMS_PER_CALL]


def _of_claims(keys: Keys, claims: Sequence[Claim]) -> ScriptCall:
    arguments: list[Argument] = []
    for claim in claims:
        arguments += _fence(claim)
    return ScriptCall(_names(keys, (claim.request_id for claim in claims)), arguments)


def _names(keys: Keys, request_ids: Iterable[str]) -> list[str]:
    names = list(keys.of_workers)
    for request_id in request_ids:
        names += keys.of_scripts(request_id)
    return names


def _fence(claim: Claim) -> tuple[str, int, str]:
    return claim.request_id, claim.epoch, claim.owner
