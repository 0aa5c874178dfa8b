"""How a setting is defined, and the settings that several processes have.

A common setting is one object here, so that it has one default, one range and one sentence.
"""

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.config import JsonDict

#: The name of a queue. It has no braces, because a Redis key has it inside a hash tag.
QUEUE_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]


def setting(section: str, description: str, *, default: Any, **constraints: Any) -> Any:
    """One field of a process' settings, with its section in docs/reference/configuration.md."""
    extra: JsonDict = {"section": section}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def port(paths: str, *, default: int) -> Any:
    """The setting `http_port` of a process that answers at these paths."""
    text = f"Port of {paths}; 0 takes a free one and logs it."
    return setting("Observability", text, default=default, ge=0, le=65_535)


def split_list(value: Any) -> Any:
    """Splits a text at commas, for lists in flags and variables; returns other values unchanged."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return value


def split_or_none(value: Any) -> Any:
    """The same for a list that may be empty: an empty text names nothing."""
    return () if value == "" else split_list(value)


def _differ(queues: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(queues)) < len(queues):
        raise ValueError("a queue is named twice")
    return queues


def _are_networks(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        ipaddress.ip_network(text)
    return texts


#: The types of lists that a text with commas can give.
Texts = Annotated[tuple[str, ...], BeforeValidator(split_list)]
Networks = Annotated[tuple[str, ...], BeforeValidator(split_or_none), AfterValidator(_are_networks)]
QueueName = Annotated[str, Field(pattern=QUEUE_PATTERN)]
QueueNames = Annotated[
    tuple[QueueName, ...],
    Field(min_length=1, max_length=64),
    BeforeValidator(split_list),
    AfterValidator(_differ),
]

SHARDS = setting("Queue", "Shards of the queue, as its workers know it.", default=1, ge=1, le=1024)
MAX_QUEUE_SECONDS = setting(
    "Queue",
    "Longest time a request may wait in the queue, as its workers know it.",
    default=86_400.0,
    gt=0.0,
)
RETENTION_SECONDS = setting(
    "Queue",
    "How long the output of a finished request can be read, as its workers know it.",
    default=3600.0,
    gt=0.0,
)
HTTP_HOST = setting("Observability", "Address of the HTTP server.", default="127.0.0.1")
LOG_LEVEL = setting("Observability", "Least severe event that is logged.", default="info")
LOG_FORMAT = setting(
    "Observability", "`auto` is console on a terminal and JSON elsewhere.", default="auto"
)
