"""The audit: reads every output log as it is stored, and judges each answer.

Goes around the client on purpose. A reader that trims overlaps and refuses gaps could hide exactly
the mistakes that are looked for here, so the raw entries of Redis are counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgpack
import redis

from quire import Completion, State
from quire.keys import Keys


@dataclass(frozen=True, slots=True)
class Ended:
    """One request that reached its end, as the follower saw it."""

    request_id: str
    prompt: str
    text: str
    token_ids: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the audit found, over all requests."""

    completed: int
    correct: int
    lost_tokens: int
    repeated_tokens: int
    resumed_requests: int
    preemptions: int
    cached_tokens: int
    output_tokens: int
    wrong: tuple[Ended, ...]


def audit(
    ended: Sequence[Ended],
    connection: "redis.Redis",
    keys: Keys,
    *,
    is_right: Callable[[Ended], bool],
) -> Verdict:
    """Count tokens in the stored logs, and judge every answer by `is_right`."""
    lost = repeated = 0
    for request in ended:
        gaps, overlaps = count_faults(
            connection.xrange(keys.output(request.request_id)),
            num_tokens=request.completion.usage.completion_tokens,
        )
        lost += gaps
        repeated += overlaps
    done = [request for request in ended if request.completion.state is State.COMPLETED]
    right = [request for request in done if is_right(request)]
    return Verdict(
        completed=len(done),
        correct=len(right),
        lost_tokens=lost,
        repeated_tokens=repeated,
        resumed_requests=sum(request.completion.resumes > 0 for request in ended),
        preemptions=sum(request.completion.preemptions for request in ended),
        cached_tokens=sum(request.completion.usage.cached_tokens for request in ended),
        output_tokens=sum(request.completion.usage.completion_tokens for request in ended),
        wrong=tuple(request for request in ended if request not in right),
    )


def count_faults(
    entries: Sequence[tuple[bytes, dict[bytes, bytes]]], *, num_tokens: int
) -> tuple[int, int]:
    """(tokens missing, tokens written twice) in one log that should hold `num_tokens`."""
    written = [0] * num_tokens
    beyond = 0
    for _, fields in entries:
        if b"ids" not in fields:
            continue
        start, ids = int(fields[b"from"]), msgpack.unpackb(fields[b"ids"])
        for index in range(start, start + len(ids)):
            if index < num_tokens:
                written[index] += 1
            else:
                beyond += 1
    return written.count(0), beyond + sum(count - 1 for count in written if count > 1)
