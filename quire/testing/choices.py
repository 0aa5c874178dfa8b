"""What the fake worker finds of a choice: a likelihood for each of its characters."""

from __future__ import annotations

from collections.abc import Iterable

from quire.wire.protocol import GenerationRequest


def choice_of(request: GenerationRequest) -> tuple[int, ...]:
    """The tokens of the choice whose likelihood is asked for; empty for other requests."""
    pooling = request.parse_body().pooling
    choice = (pooling.choice if pooling is not None else None) or ()
    return tuple(map(ord, choice)) if isinstance(choice, str) else choice


def likelihoods(choice: tuple[int, ...], said: Iterable[str]) -> list[float]:
    """A log-probability for each token: 0 where the text has the same character, and else -1."""
    text = "".join(said).ljust(len(choice), "\0")
    return [0.0 if ord(other) == one else -1.0 for one, other in zip(choice, text, strict=False)]
