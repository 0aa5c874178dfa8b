"""Distinguishes a repeated submit from another request with the same id. Knows no connection.

If the id exists, SUBMIT returns the stored request. This is right for a call that is repeated,
because its reply was lost or its process died. For two different calls, the second one would get
the output of the first. So SUBMIT also returns the digest of the stored request (see message.py),
as long as the record exists, also after the end of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestConflict
from quire.queue.submit.messages import Item
from quire.queue.submit.routing import is_found_by_key
from quire.queue.submit.submit import Submitted
from quire.wire.message import DIGEST_RULE, SEED_BYTES, Message
from quire.wire.protocol import GenerationRequest
from quire.wire.sampling import SamplingParams


def refuse_others(
    messages: Sequence[Message],
    given: Sequence[Item],
    answers: Sequence[Submitted],
    *,
    num_shards: int,
) -> None:
    """RequestConflict for the first message that differs from the stored request with its id.

    `given` are the arguments from which the messages were made. An idempotency key stands for the
    first request with that key, whatever its content: a request found by its key never conflicts.
    """
    for index, (message, one, answer) in enumerate(zip(messages, given, answers, strict=True)):
        if answer.created or is_found_by_key(message.request, num_shards=num_shards):
            continue
        if is_another(message.digest, answer.asked, names_seed=_names_seed(one)):
            raise RequestConflict(message.id, index=index if len(messages) > 1 else None)


def is_another(asked: bytes, earlier: bytes, *, names_seed: bool) -> bool:
    """Whether the stored request, with the digest `earlier`, is a different one.

    False if a digest is missing, or was made by another rule.
    """
    if not (asked.startswith(DIGEST_RULE) and earlier.startswith(DIGEST_RULE)):
        return False
    end = None if names_seed else -SEED_BYTES
    return asked[:end] != earlier[:end]


def _names_seed(given: Item) -> bool:
    """Whether the caller set a seed. A drawn seed differs each time, so it is not compared."""
    if isinstance(given, Message):
        given = given.request
    if isinstance(given, GenerationRequest):
        return given.body.get("seed") is not None
    if isinstance(given, str):
        return False
    sampling: SamplingParams | Mapping[str, Any] | None = given.get("sampling")
    if isinstance(sampling, SamplingParams):
        return sampling.seed is not None
    return sampling is not None and sampling.get("seed") is not None
