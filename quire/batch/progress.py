"""How far a batch is, and how it runs: records without behaviour of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.errors import InvalidRequest
from quire.wire.arguments import must_be_ahead
from quire.wire.protocol import TENANT_PATTERN, Priority, is_tenant_name

#: How many requests of a batch are queued or running at once.
DEFAULT_MAX_INFLIGHT = 1024


class Position(NamedTuple):
    """A point between two lines of the input: its byte, and the number of lines before it."""

    offset: int
    number: int


#: The most different errors that a run counts.
MAX_REASONS = 100

#: The begin of an input.
FIRST = Position(0, 0)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens of completed lines. `reasoning_tokens` are some of the `completion_tokens`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    @classmethod
    def of(cls, usage: Mapping[str, Any]) -> TokenCounts:
        """The counts of the `usage` of a response. That of embeddings has prompt tokens alone."""
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return cls(usage["prompt_tokens"], cached, usage.get("completion_tokens", 0), reasoning)

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """The progress of a batch.

    `total` counts lines, `done_before` the results of earlier runs, and `tokens` the generated
    tokens that this run has read. `usage` is that of all completed lines. Every line before
    `position` has a result. `ending` is None while it runs, and afterwards completed, expired or
    cancelled. `reasons` has the errors of this run's failed lines, and how often each occurred: the
    first MAX_REASONS different ones.
    """

    total: int
    completed: int = 0
    failed: int = 0
    inflight: int = 0
    tokens: int = 0
    done_before: int = 0
    seconds: float = 0.0
    ending: str | None = None
    usage: TokenCounts = TokenCounts()
    position: Position = FIRST
    reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def done(self) -> int:
        return self.completed + self.failed


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How to run a batch; see `run_batch`. InvalidRequest for a wrong value.

    `model` is sent in place of that of each line; None leaves the lines as they are.
    """

    name: str
    max_inflight: int = DEFAULT_MAX_INFLIGHT
    priority: Priority = Priority.LOW
    tenant: str = "default"
    deadline_seconds: float | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if self.max_inflight < 1:
            raise InvalidRequest("max_inflight", "must be positive")
        if self.deadline_seconds is not None:
            must_be_ahead("deadline_seconds", self.deadline_seconds)
        if not is_tenant_name(self.tenant):
            raise InvalidRequest("tenant", f"must match {TENANT_PATTERN}")
