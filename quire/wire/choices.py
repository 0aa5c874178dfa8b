"""Several answers to one prompt: each choice is a request of its own, derived from one request.

So each has its own log, end and worker, and survives a crash like every request. The choices share
the prompt, and its keys and values in the prefix cache of a worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from quire.errors import InvalidRequest
from quire.wire.message import Message
from quire.wire.protocol import GenerationRequest
from quire.wire.refusals import validated

#: The most choices of one request; the same limit as OpenAI's.
MAX_CHOICES = 128

#: Separates the id, or the idempotency key, of the request from the index of the choice.
CHOICE_SEPARATOR = ":"


def choices_of(
    request: GenerationRequest, n: int, *, pictures: Mapping[str, bytes] | None = None
) -> Iterator[Message]:
    """Yields the messages of `n` choices: a pure function of the request, and its `pictures`.

    InvalidRequest when a message cannot be sent; each is checked only when it is yielded. The
    message of a choice is longer than its request, so it can be too long when the request is not.
    """
    check_number(n, field="n")
    for index in range(n):
        try:
            made = Message.of(choice_of(request, index, n=n))
            yield replace(made, pictures=pictures) if pictures else made
        except InvalidRequest as error:
            # The caller knows the name of the argument.
            field = "request_id" if error.field == "id" else error.field
            message = f"{error.message}, with the index of a choice added"
            raise InvalidRequest(field, message) from error


def check_number(n: object, *, field: str) -> None:
    """InvalidRequest(field) unless `n` is an integer from 1 to MAX_CHOICES."""
    if type(n) is not int or not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(field, f"must be a number from 1 to {MAX_CHOICES}")


def choice_of(
    request: GenerationRequest, index: int, *, n: int, seeded_as: int | None = None
) -> GenerationRequest:
    """The request of choice `index` out of `n`. With `n` = 1 it is the request itself.

    The request must have a seed. The seed of the choice follows from it and from `index`, or from
    `seeded_as` in place of `index`. InvalidRequest when its id or its key becomes too long.
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
    """The id of choice `index` out of `n`: `<request id>:<index>`, or the request's for n = 1."""
    return request_id if n == 1 else f"{request_id}{CHOICE_SEPARATOR}{index}"


def seed_of(seed: int, index: int) -> int:
    """The seed of a choice. Choice 0 keeps the seed of the request.

    For the others it is an 8-byte BLAKE2b digest, read as a signed little-endian number. Its input
    is the seed and the index, each as 8 bytes, signed and little-endian.
    """
    if index == 0:
        return seed
    parts = (number.to_bytes(8, "little", signed=True) for number in (seed, index))
    digest = hashlib.blake2b(b"".join(parts), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
