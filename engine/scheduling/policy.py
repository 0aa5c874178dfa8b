"""Who comes first. Knows no blocks, no budget and no clock beyond a request's own arrival time.

A policy gives each request a standing when it is added: a bounded number of seconds, the lower, the
better. Two orders follow from it, and neither ever has to be computed again.

- Requests that wait are ordered by rank: arrival time plus standing. Later arrivals have later
  times, so a constant rank already ages: a request is overtaken only by those that arrive within a
  bounded time after it, and nothing starves.
- Requests that run are ordered by standing first, and by rank only among equals. Age helps a
  request to begin; it gives no right to go on while a better one waits.
"""

from collections.abc import Callable

from engine.config import EngineConfig, PolicyName
from engine.request import Request

Policy = Callable[[Request, EngineConfig], float]


def first_come_first_served(request: Request, config: EngineConfig) -> float:  # noqa: ARG001
    """Order of arrival: nobody stands better than another."""
    return 0.0


def shortest_job_first(request: Request, config: EngineConfig) -> float:
    """Small jobs overtake large ones that arrived at most `aging_seconds` before them."""
    size = request.num_prompt_tokens + request.sampling.max_tokens
    return config.aging_seconds * min(1.0, size / config.max_model_len)


def priority_with_aging(request: Request, config: EngineConfig) -> float:
    """Each class is worth `aging_seconds` of waiting."""
    return -config.aging_seconds * request.priority


def adaptive(request: Request, config: EngineConfig) -> float:
    """Shortest job or nearest time that presses, and then the priority class.

    That time is the deadline, or when the target latency is over: then elapsed time over target is
    1. Among equal jobs the one that reaches this first stands best.
    """
    standing = shortest_job_first(request, config)
    pressing = [time for time in (request.deadline, request.due) if time is not None]
    if pressing:
        standing = min(standing, min(pressing) - request.arrival_time - config.aging_seconds)
    return standing - config.aging_seconds * request.priority


POLICIES: dict[PolicyName, Policy] = {
    "fcfs": first_come_first_served,
    "sjf": shortest_job_first,
    "priority": priority_with_aging,
    "adaptive": adaptive,
}


def comes_before(waiting: Request, running: Request) -> bool:
    """Whether a waiting request is planned before a running one that catches up.

    By its age, as it would otherwise wait for ever; or by its standing, however old the other is.
    """
    return waiting.rank < running.rank or waiting.standing < running.standing
