"""What a queue sets for requests that do not say it themselves. Knows no Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.wire.arguments import MAX_AHEAD_SECONDS
from quire.wire.sizes import MAX_TOKENS_PER_REQUEST

#: The field of `control` for each time; in milliseconds.
_TIMES = {
    "request_timeout_seconds": "request_timeout_ms",
    "target_latency_seconds": "target_latency_ms",
}

#: The field of `control` for `max_tokens`. The names of limits begin with `max_`.
_ANSWER = "answer_tokens"

#: The fields of `control` that hold defaults.
FIELDS = (*_TIMES.values(), _ANSWER)


@dataclass(frozen=True, slots=True)
class QueueDefaults:
    """What one shard sets for requests that do not say it themselves; None is no default.

    `request_timeout_seconds`: the deadline of a request. `target_latency_seconds`: how long it
    should take. Both count from the time at which it may be claimed. `max_tokens`: the most tokens
    of an output; without it, what is left of the context. ValueError for a value that is not
    positive, or more than a request may name.
    """

    request_timeout_seconds: float | None = None
    target_latency_seconds: float | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in _TIMES:
            seconds = getattr(self, name)
            if seconds is not None and not 0.001 <= seconds <= MAX_AHEAD_SECONDS:
                raise ValueError(f"{name} must be from 0.001 to {MAX_AHEAD_SECONDS}")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_TOKENS_PER_REQUEST:
            raise ValueError(f"max_tokens must be from 1 to {MAX_TOKENS_PER_REQUEST}")


def default_fields(defaults: QueueDefaults) -> dict[str, int]:
    """The fields of `control`, without those that are not set."""
    times = {field: getattr(defaults, name) for name, field in _TIMES.items()}
    fields = {
        field: round(1000 * seconds) for field, seconds in times.items() if seconds is not None
    }
    if defaults.max_tokens is not None:
        fields[_ANSWER] = defaults.max_tokens
    return fields


def defaults_of(fields: Mapping[bytes, bytes]) -> QueueDefaults:
    """Reads the fields of `control`. A value that no program of ours wrote counts as none."""

    def number(field: str, *, most: int) -> int | None:
        text = fields.get(field.encode(), b"")
        return int(text) if text.isdigit() and 0 < int(text) <= most else None

    times = {name: number(field, most=1000 * MAX_AHEAD_SECONDS) for name, field in _TIMES.items()}
    return QueueDefaults(
        **{name: ms and ms / 1000 for name, ms in times.items()},
        max_tokens=number(_ANSWER, most=MAX_TOKENS_PER_REQUEST),
    )
