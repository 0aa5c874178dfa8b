"""Which shard a request belongs to, and which group: both are told by its id alone.

So whoever knows the id finds the request, in any process and any language:
shard = CRC-32 of the id's UTF-8 bytes, modulo the number of shards. A submit of many is parted
among their shards by it, and the answers are put together again; knows no connection.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar
from zlib import crc32

from quire.errors import InvalidRequest, QueueFull, QuireError
from quire.keys import GROUP_SEPARATOR
from quire.queue.submit.submit import Submitted
from quire.wire.protocol import MAX_REQUEST_ID_LENGTH, GenerationRequest

#: How many ids are tried for one in the shard of a session; each try meets one of all shards.
MAX_IDS_TRIED = 10_000

_GROUP_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class _Named(Protocol):
    """A request, or its message."""

    @property
    def id(self) -> str: ...


_Request = TypeVar("_Request", bound=_Named)


class Parting(Generic[_Request]):
    """One submit of many requests. Tell it the outcome of every part, then ask for the answers."""

    def __init__(self, requests: Sequence[_Request], num_shards: int) -> None:
        self._requests = requests
        self._shards = [shard_of(request.id, num_shards) for request in requests]
        self._answers: dict[int, Sequence[Submitted]] = {}
        self._failures: list[QuireError] = []

    def parts(self) -> Iterator[tuple[int, list[_Request]]]:
        """Each shard that gets something, with what it gets in the order given."""
        for shard in sorted(set(self._shards)):
            pairs = zip(self._requests, self._shards, strict=True)
            yield shard, [request for request, where in pairs if where == shard]

    def answered(self, shard: int, submitted: Sequence[Submitted]) -> None:
        """The part of this shard is in its queue."""
        self._answers[shard] = submitted

    def failed(self, error: QuireError) -> None:
        """A part was refused or its shard cannot be reached; the others are tried all the same."""
        self._failures.append(error)

    def answers(self) -> list[Submitted]:
        """One answer per request, in the order given.

        Otherwise raises what has failed; a refusal tells what is in the queue all the same.
        """
        refusals = [error for error in self._failures if isinstance(error, QueueFull)]
        if len(refusals) < len(self._failures):
            raise next(error for error in self._failures if error not in refusals)
        if refusals:
            accepted = [one for refusal in refusals for one in refusal.submitted]
            accepted += [one for part in self._answers.values() for one in part]
            first = refusals[0]
            raise first.with_submitted(accepted) from first.__cause__
        turns = {shard: iter(part) for shard, part in self._answers.items()}
        return [next(turns[shard]) for shard in self._shards]


def shard_of(request_id: str, num_shards: int) -> int:
    """The shard of a request, below `num_shards`. InvalidRequest for what no id can be."""
    try:
        return crc32(request_id.encode()) % num_shards
    # From a shell's argument, bytes that are no UTF-8 come as surrogates.
    except (AttributeError, UnicodeEncodeError):
        raise InvalidRequest("request_id", "must be a text") from None


def placed(
    request: GenerationRequest, *, num_shards: int, group: str | None = None
) -> GenerationRequest:
    """The request under the id by which it is found: in its group, and beside its idempotency key.

    An idempotency key is looked up in the shard of the request, so with several shards the id of a
    request that has a key is made from the key, and a request that brings both is refused. The
    turns of a session are in one shard, so there the id of a turn is chosen by its session.
    InvalidRequest.
    """
    request_id = request.id
    if is_found_by_key(request, num_shards=num_shards):
        assert request.idempotency_key is not None
        derived = _id_of_key(request.tenant, request.idempotency_key)
        if "id" in request.model_fields_set and request_id != derived:
            raise InvalidRequest("idempotency_key", "give no id with it on a queue of many shards")
        request_id = derived
    if group is not None and not request_id.startswith(group + GROUP_SEPARATOR):
        if GROUP_SEPARATOR in request_id:
            raise InvalidRequest("id", f"belongs to another group than {group}")
        request_id = f"{group}{GROUP_SEPARATOR}{request_id}"
        if len(request_id) > MAX_REQUEST_ID_LENGTH:
            raise InvalidRequest("id", "is too long with the name of its group")
    if request.session_id is not None:
        request_id = _id_in_session(request, request_id, num_shards=num_shards)
    if request_id == request.id:
        return request
    return request.model_copy(update={"id": request_id})


def is_found_by_key(request: GenerationRequest, *, num_shards: int) -> bool:
    """Whether the id of a request is made from its idempotency key: see `placed`."""
    return num_shards > 1 and request.idempotency_key is not None


def check_group_name(group: str) -> str:
    """The name, if it may be one. InvalidRequest."""
    if not _GROUP_NAME.fullmatch(group):
        raise InvalidRequest("group", f"must match {_GROUP_NAME.pattern}")
    return group


def _id_of_key(tenant: str, key: str) -> str:
    return hashlib.sha256(f"{tenant}:{key}".encode()).hexdigest()[:32]


def _id_in_session(request: GenerationRequest, request_id: str, *, num_shards: int) -> str:
    """An id in the shard of the session: the given one, or one that is made from it."""
    wanted = shard_of(f"{request.tenant}:{request.session_id}", num_shards)
    group, separator, member = request_id.rpartition(GROUP_SEPARATOR)
    for number in range(MAX_IDS_TRIED):
        made = hashlib.sha256(f"{member}:{number}".encode()).hexdigest()[:32] if number else member
        found = f"{group}{separator}{made}"
        if shard_of(found, num_shards) == wanted:
            return found
        if "id" in request.model_fields_set:
            raise InvalidRequest("session_id", "give no id with it on a queue of many shards")
    raise InvalidRequest("session_id", f"no id in {num_shards} shards leads to its shard")
