"""Several answers to one prompt: each choice is a request of its own, made from the one asked for.

So each has its log, its end and its worker, and comes through a crash as every request does. What
they share is the prompt, and the keys and values that a worker finds for it in its cache.
"""

from __future__ import annotations

import hashlib

from quire.errors import InvalidRequest
from quire.protocol import GenerationRequest
from quire.sampling import validated

#: The most choices of one request; OpenAI's limit, too.
MAX_CHOICES = 128

#: Stands between the id, or the idempotency key, of the request and the number of the choice.
CHOICE_SEPARATOR = ":"


def choices_of(request: GenerationRequest, n: int) -> list[GenerationRequest]:
    """The requests for `n` choices, always the same ones; a single choice is the request itself.

    The request has a seed. InvalidRequest.
    """
    if type(n) is not int or not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest("n", f"must be a number from 1 to {MAX_CHOICES}")
    return [request] if n == 1 else [_choice(request, index) for index in range(n)]


def seed_of(seed: int, index: int) -> int:
    """The seed of a choice; the first keeps that of the request.

    For the others the first eight bytes of a BLAKE2b of seed and index, both as eight bytes, signed
    and little-endian.
    """
    if index == 0:
        return seed
    parts = (number.to_bytes(8, "little", signed=True) for number in (seed, index))
    digest = hashlib.blake2b(b"".join(parts), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _choice(request: GenerationRequest, index: int) -> GenerationRequest:
    suffix = f"{CHOICE_SEPARATOR}{index}"
    fields = dict(request) | {
        "id": request.id + suffix,
        "body": request.body | {"seed": seed_of(request.body["seed"], index)},
    }
    if request.idempotency_key is not None:
        fields["idempotency_key"] = request.idempotency_key + suffix
    # Both may be too long now.
    return validated(GenerationRequest, fields)
