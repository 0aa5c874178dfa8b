"""What a queue sets for requests that do not say it themselves. Knows no Redis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.wire.arguments import MAX_AHEAD_SECONDS

#: The field of `control` for each default; in milliseconds.
FIELDS = {
    "request_timeout_seconds": "request_timeout_ms",
    "target_latency_seconds": "target_latency_ms",
}


@dataclass(frozen=True, slots=True)
class QueueDefaults:
    """What one shard sets for requests that do not say it themselves; None is no default.

    `request_timeout_seconds`: the deadline of a request. `target_latency_seconds`: how long it
    should take. Both count from the time at which it may be claimed. ValueError for a time that is
    not positive, or longer than a request may name.
    """

    request_timeout_seconds: float | None = None
    target_latency_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in FIELDS:
            seconds = getattr(self, name)
            if seconds is not None and not 0.001 <= seconds <= MAX_AHEAD_SECONDS:
                raise ValueError(f"{name} must be from 0.001 to {MAX_AHEAD_SECONDS}")


def default_fields(defaults: QueueDefaults) -> dict[str, int]:
    """The fields of `control`, without those that are not set."""
    values = {field: getattr(defaults, name) for name, field in FIELDS.items()}
    return {
        field: round(1000 * seconds) for field, seconds in values.items() if seconds is not None
    }


def defaults_of(fields: Mapping[bytes, bytes]) -> QueueDefaults:
    """Reads the fields of `control`. A value that no program of ours wrote counts as none."""
    found = {}
    for name, field in FIELDS.items():
        text = fields.get(field.encode(), b"")
        if text.isdigit() and 0 < int(text) <= 1000 * MAX_AHEAD_SECONDS:
            found[name] = int(text) / 1000
    return QueueDefaults(**found)
