"""Who comes first. Knows no blocks, no budget and no clock beyond a request's own arrival time.

A policy gives each request one rank, in seconds, when it is added: the lower, the sooner. A rank is
the arrival time plus or minus a bounded number of seconds, and later arrivals have later times. So
a constant rank already ages: a request is overtaken only by those that arrive within a bounded time
after it, nothing starves, and the queue never has to be sorted again.
"""

from collections.abc import Callable

from engine.config import EngineConfig, PolicyName
from engine.request import Request

Policy = Callable[[Request, EngineConfig], float]


def first_come_first_served(request: Request, config: EngineConfig) -> float:  # noqa: ARG001
    """Order of arrival."""
    return request.arrival_time


def shortest_job_first(request: Request, config: EngineConfig) -> float:
    """Small jobs overtake large ones that arrived at most `aging_seconds` before them."""
    size = request.num_prompt_tokens + request.sampling.max_tokens
    return request.arrival_time + config.aging_seconds * min(1.0, size / config.max_model_len)


def priority_with_aging(request: Request, config: EngineConfig) -> float:
    """Each class is worth `aging_seconds` of waiting."""
    return request.arrival_time - config.aging_seconds * request.priority


def adaptive(request: Request, config: EngineConfig) -> float:
    """Shortest job or nearest deadline, whichever ranks better, and then the priority class."""
    rank = shortest_job_first(request, config)
    if request.deadline is not None:
        rank = min(rank, request.deadline - config.aging_seconds)
    return rank - config.aging_seconds * request.priority


POLICIES: dict[PolicyName, Policy] = {
    "fcfs": first_come_first_served,
    "sjf": shortest_job_first,
    "priority": priority_with_aging,
    "adaptive": adaptive,
}
