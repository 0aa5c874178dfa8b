"""Two tenants at one queue: a real Redis, and one engine that claims whenever it has a free slot.

Knows no model: the requests of the engine are made by the caller.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.request import Request
from quire import Broker, Fairness
from quire.queue.claim.claim import Claimed
from quire.queue.publish.commit import CommitItem
from quire.queue.rank.policy import QueuePolicy
from quire.queue.request.claims import Claim
from quire.wire.output import Completion, FinishReason, State, Usage
from quire.wire.protocol import GenerationRequest

#: The longest time that the watched requests may take.
MAX_SECONDS = 600.0


@dataclass(slots=True)
class Served:
    """What came of the watched requests: seconds from the submit to the end, and their tokens.

    `order`: all requests in the order in which they were claimed.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)


class SharedQueue:
    """One queue of a server, whose requests an engine serves until the watched ones have ended."""

    def __init__(self, broker: Broker, *, by_tokens: bool) -> None:
        self._broker = broker
        broker.ensure_groups()
        broker.announce(QueuePolicy("fcfs", 1, 1))
        broker.set_fairness(Fairness(by_tokens=by_tokens))

    def submit(self, tenant: str, jobs: Mapping[str, tuple[Sequence[int], int]]) -> None:
        """Submits requests by name: the token ids of the prompt, and how many to generate."""
        self._broker.submit_many(
            [
                GenerationRequest(
                    id=name,
                    kind="tokens",
                    tenant=tenant,
                    body={"prompt": list(prompt), "max_tokens": count},
                )
                for name, (prompt, count) in jobs.items()
            ]
        )

    def serve(
        self,
        engine: Engine,
        *,
        watched: Sequence[str],
        num_slots: int,
        request_of: Callable[[str], Request],
    ) -> Served:
        """Serves the queue in its order until the watched requests have ended; cancels the rest."""
        served, claims, left = Served(), dict[str, Claim](), set(watched)
        began = time.perf_counter()
        while left:
            if time.perf_counter() - began > MAX_SECONDS:
                raise SystemExit("tenants: the watched requests do not end")
            for claim in self._claim(num_slots - len(claims)):
                claims[claim.request_id] = claim
                served.order.append(claim.request_id)
                engine.add_request(request_of(claim.request_id))
            ended = _step(engine, served)
            self._commit([claims.pop(name) for name in ended], served)
            for name in left & set(ended):
                served.seconds[name] = time.perf_counter() - began
                left.discard(name)
        for name in engine.alive_request_ids():
            engine.abort(name)
        while engine.has_work():
            engine.step(time.perf_counter)
        return served

    def _claim(self, count: int) -> list[Claim]:
        if count == 0:
            return []
        answers = self._broker.claim(self._broker.peek(count=count))
        return [answer.claim for answer in answers if isinstance(answer, Claimed)]

    def _commit(self, claims: Sequence[Claim], served: Served) -> None:
        items = []
        for claim in claims:
            tokens = tuple(served.tokens[claim.request_id])
            usage = Usage(prompt_tokens=0, completion_tokens=len(tokens))
            end = Completion(claim.request_id, State.COMPLETED, FinishReason.LENGTH, usage=usage)
            items.append(CommitItem(claim, 0, tokens, "", completion=end))
        if items:
            self._broker.commit(items)


def _step(engine: Engine, served: Served) -> list[str]:
    """One step of the engine; the requests that ended in it."""
    ended = []
    for output in engine.step(time.perf_counter):
        served.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if output.finish_reason is not None:
            ended.append(output.request_id)
    return ended
