"""What both clients share to ask for the vectors of many texts: one request for each text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import InvalidRequest, WaitTimeout
from quire.wire.arguments import RequestArguments, RequestOptions
from quire.wire.choices import id_of
from quire.wire.codec import is_token_ids
from quire.wire.pooling import MAX_INPUTS

#: A text, token ids, or several of either.
Inputs = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


def requests_for(inputs: Inputs, options: RequestOptions) -> list[RequestArguments]:
    """The arguments of one request for each input. InvalidRequest.

    A `request_id` or an `idempotency_key` gets the index of the input, as that of a choice does.
    """
    each = _parted(inputs)
    if not 0 < len(each) <= MAX_INPUTS:
        raise InvalidRequest("inputs", f"must be 1 to {MAX_INPUTS} texts or arrays of token ids")
    found: list[RequestArguments] = []
    for index, one in enumerate(each):
        arguments: RequestArguments = {"prompt": None, **options, "input": one}
        if (request_id := options.get("request_id")) is not None:
            arguments["request_id"] = id_of(request_id, index, n=len(each))
        if (key := options.get("idempotency_key")) is not None:
            arguments["idempotency_key"] = id_of(key, index, n=len(each))
        found.append(arguments)
    return found


def _parted(inputs: Inputs) -> list[Any]:
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

    def left(self, request_id: str) -> float | None:
        """The seconds left; None for no limit. WaitTimeout when none are left."""
        if self._ends is None:
            return None
        left = self._ends - time.monotonic()
        if left <= 0:
            raise WaitTimeout(request_id)
        return left
