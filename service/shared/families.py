"""The type of a metric's definition, and the closed sets of buckets and label values.

Defines no metric; those are in `service.worker.observe.register`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quire.queue.repair.restore import Lost
from quire.wire.protocol import Priority

#: Seconds of a phase of a request.
LONG = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0),
)
#: Seconds between two tokens, of one step, of one commit. Small models need the low buckets.
SHORT = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
#: Seconds to the first token.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
#: Tokens of a request.
SIZES = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
#: Tokens of a step, requests of a commit.
FILL = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0)

PRIORITIES = tuple(priority.name.lower() for priority in Priority)
#: How a claim ends: the finish reasons of a terminal record, then the two ends without a record.
OUTCOMES = (
    *("eos", "stop", "length", "cancelled", "deadline", "error", "rejected"),
    *("released", "lost"),
)
PHASES = ("prefill", "decode", "mixed")
OPERATIONS = (
    *("read", "recover", "claim", "bury", "commit", "release", "fail"),
    *("heartbeat", "reap", "promote", "restore", "beat"),
)
ERROR_KINDS = (
    *("connection", "timeout", "access", "read_only"),
    *("memory", "disk", "protocol", "other"),
)
#: What Redis may have lost of an open request.
LOST = tuple(map(str, Lost))
DEAD_REASONS = ("undecodable", "unsupported_version", "broken_log")

NONE: Mapping[str, Sequence[str]] = {}
MODEL: Mapping[str, Sequence[str]] = {"model": ()}
QUEUE: Mapping[str, Sequence[str]] = {"queue": ()}
BY_PHASE = {**MODEL, "phase": PHASES}
BY_PRIORITY = {"priority": PRIORITIES}


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """The definition of one metric, for the documentation, the export and the dashboards.

    `labels` gives each label its closed set of values. An empty set means a single value that is
    fixed at start, such as the model's name.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    labels: Mapping[str, Sequence[str]]
    meaning: str
    buckets: tuple[float, ...] = ()
