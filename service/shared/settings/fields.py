"""Types of settings: what a value must be, and what it means if several processes have it."""

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from quire.wire.arguments import MIN_KEPT_SECONDS

#: The name of a queue. It has no braces, because a Redis key has it inside a hash tag.
QUEUE_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]


def at_least(least: float, reason: str) -> AfterValidator:
    """The shortest duration, in seconds, with which a process works, and the reason."""

    def check(seconds: float) -> float:
        if not seconds >= least:
            raise ValueError(f"must be at least {least:g} seconds: {reason}")
        return seconds

    return AfterValidator(check)


def at_most(most: float, reason: str) -> AfterValidator:
    """The longest useful duration, in seconds, and the reason."""

    def check(seconds: float) -> float:
        if not seconds <= most:
            raise ValueError(f"must be at most {most:g} seconds: {reason}")
        return seconds

    return AfterValidator(check)


def _split(value: Any) -> Any:
    """Splits a text at commas, for lists in flags and variables; returns other values unchanged."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return value


def _differ(queues: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(queues)) < len(queues):
        raise ValueError("a queue is named twice")
    return queues


def _are_networks(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        ipaddress.ip_network(text)
    return texts


Count = Annotated[int, Field(ge=1)]
#: For a list: a text with commas gives its members, an empty text one empty member.
SPLIT = BeforeValidator(_split)
#: For a list that may be empty: an empty text names nothing.
SPLIT_OR_NONE = BeforeValidator(lambda value: () if value == "" else _split(value))

Networks = Annotated[tuple[str, ...], SPLIT_OR_NONE, AfterValidator(_are_networks)]
QueueName = Annotated[str, Field(pattern=QUEUE_PATTERN)]
QueueNames = Annotated[
    tuple[QueueName, ...], Field(min_length=1, max_length=64), SPLIT, AfterValidator(_differ)
]
Port = Annotated[int, Field(ge=0, le=65_535)]
#: How long keys of Redis are kept.
KeptSeconds = Annotated[
    float, at_least(MIN_KEPT_SECONDS, "Redis counts whole milliseconds, so less would be 0")
]

# What the workers of a queue have set, as other processes have to know it.
NumShards = Annotated[
    int, Field(ge=1, le=1024, description="Shards of the queue, as its workers know it.")
]
QueueSeconds = Annotated[
    KeptSeconds,
    Field(description="Longest time a request may wait in the queue, as its workers know it."),
]
RetentionSeconds = Annotated[
    KeptSeconds,
    Field(
        description="How long the output of a finished request can be read, as its workers know it."
    ),
]
