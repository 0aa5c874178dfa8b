"""The claim of a request: the right to run it, which every script of a worker checks."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from quire.keys import Keys
from quire.queue.request.arguments import names_of
from quire.transport.script_calls import Argument, ScriptCall


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


def fence_of(claim: Claim) -> tuple[str, int, str]:
    """The claim as scripts take it."""
    return claim.request_id, claim.epoch, claim.owner


def call_of_claims(keys: Keys, claims: Sequence[Claim]) -> ScriptCall:
    """For a script that takes some claims: heartbeat, release."""
    arguments: list[Argument] = []
    for claim in claims:
        arguments += fence_of(claim)
    return ScriptCall(names_of(keys, (claim.request_id for claim in claims)), arguments)
