"""Tells a request that is submitted again from another one under the same id. Knows no connection.

SUBMIT answers for an id that it knows with the request that is there. For one call said twice that
is right: its reply may have been lost, or its process. For two calls it would give the second one
the answer of the first. So what is there is looked at once SUBMIT has said so, and only then. It is
there until the request ends; of one that has ended nobody knows what it asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.arguments import RequestArguments
from quire.errors import InvalidRequest, ProtocolError, RequestConflict
from quire.protocol import GenerationRequest
from quire.routing import shard_of
from quire.sampling import ParsedBody, SamplingParams
from quire.transitions import Submitted

#: The most requests that are looked at in one round trip: each may take a megabyte.
MAX_LOOKS = 64


@dataclass(frozen=True, slots=True)
class Look:
    """Requests of one shard to be looked up in one round trip, by their places in the submit."""

    shard: int
    places: list[int]
    ids: list[str]


class Meetings:
    """Those of one submit whose ids were there before. Take the looks, and tell what was seen.

    `given` is what each of the requests was made of. An idempotency key means the request that had
    it first, whatever that asks: such requests meet nobody here.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        given: Sequence[GenerationRequest | RequestArguments],
        answers: Sequence[Submitted],
    ) -> None:
        self._requests = requests
        self._given = given
        self._places = [
            place
            for place, (request, answer) in enumerate(zip(requests, answers, strict=True))
            if not (answer.created or answer.state.is_terminal or request.idempotency_key)
        ]

    def looks(self, num_shards: int) -> Iterator[Look]:
        """What is to be looked up; nothing where every id was new."""
        places_of: dict[int, list[int]] = {}
        for place in self._places:
            shard = shard_of(self._requests[place].id, num_shards)
            places_of.setdefault(shard, []).append(place)
        for shard, places in places_of.items():
            for start in range(0, len(places), MAX_LOOKS):
                part = places[start : start + MAX_LOOKS]
                yield Look(shard, part, [self._requests[place].id for place in part])

    def seen(self, look: Look, bodies: Sequence[bytes | None]) -> None:
        """RequestConflict for the first that asks for something else than what is there.

        A body is None where the request has ended since.
        """
        for place, earlier in zip(look.places, bodies, strict=True):
            request = self._requests[place]
            if earlier and is_another(request, earlier, given=self._given[place]):
                index = place if len(self._requests) > 1 else None
                raise RequestConflict(request.id, index=index)


def is_another(
    request: GenerationRequest, earlier: bytes, *, given: GenerationRequest | RequestArguments
) -> bool:
    """Whether the request that is there, as its producer encoded it, asks for something else.

    Compared is what decides about the output, and whose it is. How it is written does not matter,
    nor do priority, moments, headers and metadata.
    """
    try:
        there = GenerationRequest.decode(earlier)
        # As a reader of the wire gets it, who knows no tuples.
        here = GenerationRequest.decode(request.encode())
        one, other = there.parse_body(), here.parse_body()
    except (ProtocolError, InvalidRequest):
        # Of another version, or damaged: nothing is known against it.
        return False
    if _names_seed(given) and one.sampling.seed != other.sampling.seed:
        return True
    return there.tenant != here.tenant or _asked(one) != _asked(other)


def _asked(body: ParsedBody) -> ParsedBody:
    """What it asks for, however that is written; without the seed."""
    sampling = body.sampling.model_copy(update={"seed": None})
    # The parameters hold the constraint, too.
    return replace(body, sampling=sampling, constraint=None)


def _names_seed(given: GenerationRequest | RequestArguments) -> bool:
    """Whether the caller said a seed; the one that is drawn otherwise is another each time."""
    if isinstance(given, GenerationRequest):
        return given.body.get("seed") is not None
    sampling: SamplingParams | Mapping[str, Any] | None = given.get("sampling")
    if isinstance(sampling, SamplingParams):
        return sampling.seed is not None
    return sampling is not None and sampling.get("seed") is not None
