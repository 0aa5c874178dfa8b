"""What both clients share to ask for many vectors: one request for each text, or each choice."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequest, ProtocolError
from quire.wire.arguments import RequestArguments, RequestOptions
from quire.wire.choices import id_of
from quire.wire.codec import is_token_ids, without_numpy
from quire.wire.output import Completion
from quire.wire.pooling import MAX_INPUTS

#: A text, token ids, or several of either.
Inputs = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]

#: Texts, or arrays of token ids.
Choices = Sequence[str] | Sequence[Sequence[int]]

#: The arguments of a request that those of `likelihoods` are.
_GIVEN_WITH_CHOICES = ("input", "kind", "choice")


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely a model finds a choice after a prompt.

    `logprobs` are the natural log-probabilities of the choice's tokens, each with the tokens before
    it as context, in single precision.
    """

    choice: str | tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def sum(self) -> float:
        """The log-likelihood of the whole choice. Longer choices tend to have a lower one."""
        return math.fsum(self.logprobs)

    @property
    def mean(self) -> float:
        """The log-likelihood per token, to compare choices of different lengths."""
        return self.sum / len(self.logprobs)


def requests_for(inputs: Inputs, options: RequestOptions) -> list[RequestArguments]:
    """The arguments of one request for each input. InvalidRequest.

    A `request_id` or an `idempotency_key` gets the index of the input, as that of a choice does.
    """
    each = _parted(inputs)
    if not each:
        raise InvalidRequest("inputs", "must be texts or arrays of token ids, at least one")
    return _numbered([{"prompt": None, **options, "input": one} for one in each], options)


def choice_requests(
    prompt: str | Sequence[int], choices: Choices, options: RequestOptions
) -> list[RequestArguments]:
    """The arguments of one request for each choice; their ids are as in `requests_for`.

    InvalidRequest.
    """
    if isinstance(choices, str | bytes | bytearray) or not isinstance(choices, Sequence):
        raise InvalidRequest("choices", "must be a sequence of texts or of arrays of token ids")
    if not 0 < len(choices) <= MAX_INPUTS:
        raise InvalidRequest("choices", f"must be 1 to {MAX_INPUTS} texts or arrays of token ids")
    for name in _GIVEN_WITH_CHOICES:
        if options.get(name) is not None:
            raise InvalidRequest(name, "cannot be combined with choices")
    fields: RequestArguments = {**options, "prompt": None, "kind": "scores", "input": prompt}
    return _numbered([{**fields, "choice": one} for one in choices], options)


def likelihood_of(choice: str | Sequence[int], completion: Completion) -> Likelihood:
    """The likelihood that the request of a choice ended with.

    ProtocolError if the worker gave no log-probabilities.
    """
    logprobs = tuple(completion.embedding)
    if not logprobs:
        raise ProtocolError("the worker gave no log-probabilities of a choice")
    return Likelihood(choice if isinstance(choice, str) else tuple(choice), logprobs)


def _numbered(requests: list[RequestArguments], options: RequestOptions) -> list[RequestArguments]:
    for index, arguments in enumerate(requests):
        if (request_id := options.get("request_id")) is not None:
            arguments["request_id"] = id_of(request_id, index, n=len(requests))
        if (key := options.get("idempotency_key")) is not None:
            arguments["idempotency_key"] = id_of(key, index, n=len(requests))
    return requests


def _parted(inputs: Inputs) -> list[Any]:
    inputs = without_numpy(inputs)
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, bytes | bytearray | Mapping) or not isinstance(inputs, Sequence):
        raise InvalidRequest("inputs", "must be a text, token ids, or a sequence of either")
    given = list(inputs)
    return [given] if given and is_token_ids(given) else given


class Timer:
    """What is left of a timeout, in seconds, that many waits share."""

    def __init__(self, timeout: float | None) -> None:
        self._ends = None if timeout is None else time.monotonic() + timeout

    @property
    def left(self) -> float | None:
        """The seconds left; None for no limit. With 0 left, a wait still finds what is there."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())
