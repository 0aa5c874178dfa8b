"""Several answers to one prompt: each choice is a request of its own, made from the one asked for.

So each has its log, its end and its worker, and comes through a crash as every request does. What
they share is the prompt, and the keys and values that a worker finds for it in its cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from quire.errors import InvalidRequest
from quire.wire.message import Message
from quire.wire.protocol import GenerationRequest
from quire.wire.sampling import validated

#: The most choices of one request; OpenAI's limit, too.
MAX_CHOICES = 128

#: Stands between the id, or the idempotency key, of the request and the number of the choice.
CHOICE_SEPARATOR = ":"


def choices_of(request: GenerationRequest, n: int) -> Iterator[Message]:
    """The messages for `n` choices, always the same ones; each is checked when it is asked for.

    InvalidRequest. A choice is longer than its request, and so may be too long when that is not.
    """
    check_number(n, field="n")
    for index in range(n):
        try:
            yield Message.of(choice_of(request, index, n=n))
        except InvalidRequest as error:
            # The caller knows it by this name.
            field = "request_id" if error.field == "id" else error.field
            raise InvalidRequest(field, f"{error.message}, with the number of a choice") from error


def check_number(n: object, *, field: str) -> None:
    """InvalidRequest unless a request may have `n` choices."""
    if type(n) is not int or not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(field, f"must be a number from 1 to {MAX_CHOICES}")


def choice_of(
    request: GenerationRequest, index: int, *, n: int, seeded_as: int | None = None
) -> GenerationRequest:
    """The request for one of `n` choices; an only choice is the request itself.

    The request has a seed; that of the choice is its own by index, or that of the choice
    `seeded_as`. InvalidRequest when its id or its key has no room for the index.
    """
    if n == 1:
        return request
    seed_index = index if seeded_as is None else seeded_as
    fields = dict(request) | {
        "id": id_of(request.id, index, n=n),
        "body": request.body | {"seed": seed_of(request.body["seed"], seed_index)},
    }
    if request.idempotency_key is not None:
        fields["idempotency_key"] = id_of(request.idempotency_key, index, n=n)
    return validated(GenerationRequest, fields)


def id_of(request_id: str, index: int, *, n: int) -> str:
    """The id of one of `n` choices of a request."""
    return request_id if n == 1 else f"{request_id}{CHOICE_SEPARATOR}{index}"


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
