"""Tells a request that is submitted again from another one under the same id. Knows no connection.

SUBMIT answers for an id that it knows with the request that is there. For one call said twice that
is right: its reply may have been lost, or its process. For two calls it would give the second one
the answer of the first. So it also answers what the request asks that is there, see message.py, for
as long as there is a record of it: after its end, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestConflict
from quire.transitions.routing import is_found_by_key
from quire.transitions.values import Submitted
from quire.wire.arguments import RequestArguments
from quire.wire.message import DIGEST_RULE, SEED_BYTES, Message
from quire.wire.protocol import GenerationRequest
from quire.wire.sampling import SamplingParams


def refuse_others(
    messages: Sequence[Message],
    given: Sequence[GenerationRequest | RequestArguments],
    answers: Sequence[Submitted],
    *,
    num_shards: int,
) -> None:
    """RequestConflict for the first of one submit that asks for something else than what is there.

    `given` is what each of the messages was made of. An idempotency key means the request that had
    it first, whatever that asks: what was found by its key is no other one.
    """
    for index, (message, one, answer) in enumerate(zip(messages, given, answers, strict=True)):
        if answer.created or is_found_by_key(message.request, num_shards=num_shards):
            continue
        if is_another(message.digest, answer.asked, names_seed=_names_seed(one)):
            raise RequestConflict(message.id, index=index if len(messages) > 1 else None)


def is_another(asked: bytes, earlier: bytes, *, names_seed: bool) -> bool:
    """Whether the request that is there, and asked `earlier`, asks for something else.

    Nothing is held against one that does not say what it asks, or says so by another rule.
    """
    if not (asked.startswith(DIGEST_RULE) and earlier.startswith(DIGEST_RULE)):
        return False
    end = None if names_seed else -SEED_BYTES
    return asked[:end] != earlier[:end]


def _names_seed(given: GenerationRequest | RequestArguments) -> bool:
    """Whether the caller said a seed; the one that is drawn otherwise is another each time."""
    if isinstance(given, GenerationRequest):
        return given.body.get("seed") is not None
    sampling: SamplingParams | Mapping[str, Any] | None = given.get("sampling")
    if isinstance(sampling, SamplingParams):
        return sampling.seed is not None
    return sampling is not None and sampling.get("seed") is not None
