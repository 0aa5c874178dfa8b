"""What the tests of the contract arrange: requests, claims, commits, and Redis losing its tail."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import redis

from quire.queue.broker import Broker
from quire.queue.claim.claim import Claimed, NotClaimed
from quire.queue.publish.commit import CommitItem
from quire.queue.request.claims import Claim
from quire.transport.local_redis import LocalRedis
from quire.wire.logprobs import TokenLogprob, TopLogprob
from quire.wire.output import Completion, FinishReason, State, TokenChunk, Usage
from quire.wire.protocol import GenerationRequest

#: Keys that belong to a queue and not to a request; every other key must have an expiry.
WITHOUT_EXPIRY = (
    *(f"in:{level}" for level in range(4)),
    *(f"rank:{level}" for level in range(4)),
    *("arrival", "lease", "position", "delay", "wait", "open", "counts", "control", "turn"),
    *("turns", "ends", "ends-read"),
)


def make_request(**changes: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"kind": "tokens", "body": {"prompt": [1, 2, 3]}}
    return GenerationRequest(**(fields | changes))


def token_at(index: int) -> int:
    """The token every honest worker generates at this index."""
    return (7919 * index + 13) % 1000


def text_of(index: int) -> str:
    return chr(ord("a") + index % 26)


def make_item(claim: Claim, start: int, end: int, *, final: bool = False) -> CommitItem:
    """The commit of the honest tokens `start .. end`."""
    texts = [text_of(index) for index in range(start, end)]
    return CommitItem(
        claim,
        start,
        tuple(token_at(index) for index in range(start, end)),
        "".join(texts),
        text_ends=tuple(range(1, end - start + 1)),
        completion=make_completion(claim.request_id) if final else None,
    )


def logprob_at(index: int) -> TokenLogprob:
    """What an honest worker says of the token at this index: it was the second best of two."""
    token_id, text = token_at(index), text_of(index)
    best = TopLogprob(token_id + 1, -0.25 * index, "?")
    own = TopLogprob(token_id, -0.25 * index - 1, text)
    return TokenLogprob(token_id, own.logprob, text, (best, own))


def with_logprobs(item: CommitItem) -> CommitItem:
    """The same commit, for a request that asked for the two best at each place."""
    indices = range(item.start, item.start + len(item.token_ids))
    return replace(item, logprobs=tuple(map(logprob_at, indices)))


def make_completion(request_id: str, **changes: Any) -> Completion:
    fields: dict[str, Any] = {
        "state": State.COMPLETED,
        "finish_reason": FinishReason.LENGTH,
        "usage": Usage(prompt_tokens=3),
    }
    return Completion(request_id, **(fields | changes))


def read_and_claim(broker: Broker, **options: Any) -> Claimed | NotClaimed:
    """Claims the request that is due next."""
    (answer,) = broker.claim(broker.peek(count=1), **options)
    return answer


def claim_next(broker: Broker, **options: Any) -> Claimed:
    answer = read_and_claim(broker, **options)
    assert isinstance(answer, Claimed), answer
    return answer


def submit_and_claim(broker: Broker, **changes: Any) -> Claimed:
    broker.submit(make_request(**changes))
    return claim_next(broker)


def read_all(broker: Broker, request_id: str) -> tuple[list[TokenChunk], Completion | None]:
    """The whole log of a request."""
    chunks: list[TokenChunk] = []
    while True:
        seen = chunks[-1].end if chunks else 0
        read = broker.read_output({request_id: seen}).get(request_id)
        if read is None:
            return chunks, None
        chunks += read.chunks
        if read.completion is not None:
            return chunks, read.completion


def token_ids_of(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


@dataclass
class Clockwork:
    """Moves the broker's clock for one queue by moving what is compared with it."""

    connection: redis.Redis
    broker: Broker

    def expire_lease(self, request_id: str) -> None:
        self.connection.zadd(self.broker.keys.lease, {request_id: 1})

    def expire_delay(self, request_id: str) -> None:
        self.connection.zadd(self.broker.keys.delay, {request_id: 1}, xx=True)

    def bring_deadline(self, request_id: str, *, seconds: float = 0.2) -> None:
        """A request that has a later deadline is past it in so many seconds.

        A deadline that is near from the beginning may be over before a busy machine's first claim.
        """
        at_ms = self.broker.now_ms() + int(1000 * seconds)
        self.connection.hset(self.broker.keys.request(request_id), "deadline_ms", at_ms)
        self.connection.zadd(self.broker.keys.wait, {request_id: at_ms}, xx=True)

    def expire_queue_time(self, request_id: str) -> None:
        self.connection.zadd(self.broker.keys.wait, {request_id: 1}, xx=True)


def queue_keys(connection: redis.Redis, broker: Broker) -> list[bytes]:
    return list(connection.scan_iter(match=f"{broker.keys.prefix}:*", count=1000))


def leaked_keys(connection: redis.Redis, broker: Broker) -> list[str]:
    """Keys of this queue that would stay for ever and are not on the list of those that may."""
    allowed = {f"{broker.keys.prefix}:{name}".encode() for name in WITHOUT_EXPIRY}
    keys = [key for key in queue_keys(connection, broker) if key not in allowed]
    with connection.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.pttl(key)
        lifetimes = pipeline.execute()
    return [key.decode() for key, left in zip(keys, lifetimes, strict=True) if left == -1]


def remove_queue(connection: redis.Redis, broker: Broker) -> None:
    """Removes what the queue has left, of one shard."""
    if keys := queue_keys(connection, broker):
        connection.delete(*keys)


def pass_moment(broker: Broker, moment_ms: int | None = None) -> None:
    """Returns when this moment of Redis' clock is over; by default that of now."""
    moment_ms = broker.now_ms() if moment_ms is None else moment_ms
    while broker.now_ms() <= moment_ms:
        pass


class Snapshot:
    """What Redis had on disk; `restore` makes it forget everything after that."""

    def __init__(self, connection: redis.Redis, broker: Broker) -> None:
        self._connection, self._broker = connection, broker
        self._dumps = [
            (key, connection.dump(key), max(0, connection.pttl(key)))
            for key in queue_keys(connection, broker)
        ]

    def restore(self) -> None:
        # At once: whoever looks meanwhile must not find a queue without its requests.
        with self._connection.pipeline(transaction=True) as pipeline:
            for key in queue_keys(self._connection, self._broker):
                pipeline.delete(key)
            for key, dump, expiry in self._dumps:
                pipeline.restore(key, expiry, dump)
            pipeline.execute()


def port_of(server: LocalRedis) -> str:
    return server.url.rpartition(":")[2].partition("/")[0]
