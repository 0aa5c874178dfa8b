"""Puts together the keys and arguments of the transitions, in the order their scripts read them."""

from __future__ import annotations

from collections.abc import Sequence

from quire.keys import Keys
from quire.protocol import GenerationRequest
from quire.script_runner import Argument, Call
from quire.transitions import Claim, CommitItem, IngressEntry
from quire.wire import pack, pack_ids


def submit_call(keys: Keys, request: GenerationRequest, *, holder: str | None = None) -> Call:
    """For submit.lua. `holder` is the id found under the idempotency key, to be looked at too."""
    record, body, _ = keys.of_request(request.id)
    names = [record, body, *keys.all_ingress]
    if request.idempotency_key is not None:
        names.append(keys.idempotency(request.tenant, request.idempotency_key))
        names += [keys.request(holder)] if holder else []
    metadata = pack(request.metadata, field="metadata") if request.metadata else b""
    return Call(
        names,
        (
            request.id,
            int(request.priority),
            request.tenant,
            request.deadline_ms or 0,
            metadata,
            request.encode(),
            holder or "",
        ),
    )


def claim_call(keys: Keys, entry: IngressEntry, *, owner: str, fingerprint: str | None) -> Call:
    """For claim.lua."""
    return Call(
        (*keys.of_request(entry.request_id), keys.lease, keys.dead, entry.stream),
        (entry.request_id, entry.entry_id, owner, fingerprint or ""),
    )


def commit_call(keys: Keys, items: Sequence[CommitItem]) -> Call:
    """For commit.lua."""
    names, arguments = [keys.lease], list[Argument]()
    for item in items:
        done = item.completion
        names += keys.of_request(item.claim.request_id)
        arguments += (
            *_fence(item.claim),
            item.start,
            len(item.token_ids),
            pack_ids(item.token_ids),
            item.text.encode(),
            pack_ids(item.text_ends) if item.text_ends else b"",
            done.encode() if done else b"",
            str(done.state) if done else "",
        )
    return Call(names, arguments)


def heartbeat_call(keys: Keys, claims: Sequence[Claim]) -> Call:
    """For heartbeat.lua."""
    return _of_claims(keys, claims, names=[keys.lease])


def release_call(keys: Keys, claims: Sequence[Claim]) -> Call:
    """For release.lua."""
    return _of_claims(keys, claims, names=_queue_keys(keys))


def reap_call(keys: Keys, request_ids: Sequence[str]) -> Call:
    """For reap.lua."""
    names = _queue_keys(keys)
    for request_id in request_ids:
        names += keys.of_request(request_id)
    return Call(names, request_ids)


def dead_letter_call(keys: Keys, claim: Claim, reason: str, *, done: bytes) -> Call:
    """For dead_letter.lua."""
    names = (*keys.of_request(claim.request_id), keys.lease, keys.dead)
    return Call(names, (*_fence(claim), reason, done))


def _of_claims(keys: Keys, claims: Sequence[Claim], *, names: list[str]) -> Call:
    arguments: list[Argument] = []
    for claim in claims:
        names += keys.of_request(claim.request_id)
        arguments += _fence(claim)
    return Call(names, arguments)


def _fence(claim: Claim) -> tuple[str, int, str]:
    return claim.request_id, claim.epoch, claim.owner


def _queue_keys(keys: Keys) -> list[str]:
    return [keys.lease, keys.dead, *keys.all_ingress]
