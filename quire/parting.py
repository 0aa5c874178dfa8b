"""Parts a submit among the shards of a queue and puts the answers together; knows no connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.errors import QueueFull, QuireError
from quire.protocol import GenerationRequest
from quire.routing import shard_of
from quire.transitions import Submitted


class Parting:
    """One submit of many requests. Tell it the outcome of every part, then ask for the answers."""

    def __init__(self, requests: Sequence[GenerationRequest], num_shards: int) -> None:
        self._requests = requests
        self._shards = [shard_of(request.id, num_shards) for request in requests]
        self._answers: dict[int, Sequence[Submitted]] = {}
        self._failures: list[QuireError] = []

    def parts(self) -> Iterator[tuple[int, list[GenerationRequest]]]:
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
            ids = [request_id for refusal in refusals for request_id in refusal.accepted]
            ids += [one.request_id for part in self._answers.values() for one in part]
            first = refusals[0]
            raise QueueFull(str(first), limit=first.limit, accepted=tuple(ids)) from first.__cause__
        turns = {shard: iter(part) for shard, part in self._answers.items()}
        return [next(turns[shard]) for shard in self._shards]
