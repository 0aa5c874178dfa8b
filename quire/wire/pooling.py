"""Requests for a vector instead of an output: embeddings, and the scores of a classification head.

Scores of a `choice` are the likelihood of a continuation under a model that generates text.
The vector is in the terminal record; such a request publishes no token. A worker of an earlier
version refuses these kinds by the field `kind`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from quire.errors import InvalidRequest, ProtocolError
from quire.wire.body_fields import UNSUPPORTED, changes_nothing, why_refused
from quire.wire.codec import MAX_ARRAY_LENGTH, is_token_ids

PooledKind = Literal["embeddings", "scores"]

#: The kinds of requests that get a vector.
POOLED_KINDS: Final[tuple[PooledKind, ...]] = ("embeddings", "scores")

#: The most inputs of one call, as in OpenAI's API.
MAX_INPUTS = 2048

#: The most numbers of one vector. The largest model known today has 12,288.
MAX_DIMENSIONS = 1 << 16
BYTES_PER_NUMBER = 4

#: The longest name of a prompt of the model, in characters.
MAX_PROMPT_NAME = 64

#: The value of `truncate_prompt_tokens` for the length of the model.
TO_MODEL_LENGTH = -1

#: The forms in which OpenAI's API writes a vector.
ENCODING_FORMATS = ("float", "base64")

_KNOWN: Mapping[PooledKind, tuple[str, ...]] = {
    "embeddings": ("dimensions", "encoding_format", "prompt_name"),
    "scores": ("pair", "use_activation", "choice"),
}
#: What a request with a `choice` cannot have: a head reads these, or the choice would be cut.
_NOT_WITH_CHOICE = ("pair", "use_activation", "truncate_prompt_tokens")
#: `user` identifies the caller, as in OpenAI's API.
_KNOWN_OF_ALL = ("input", "model", "adapter", "user", "truncate_prompt_tokens")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What vector is wanted.

    Args:
        dimensions: how many numbers of the vector are kept; None for all. The vector is normalized
            again if the model's vectors are.
        prompt_name: the prompt of the model that is put before the text; None for its default.
        truncate_prompt_tokens: the most tokens of the prompt, which is cut behind them;
            TO_MODEL_LENGTH for as many as the model reads. With None, a longer one is refused.
        pair: the second text of a pair; None for one text.
        use_activation: whether scores are probabilities, and not the numbers of the head.
        choice: a continuation of the input, a text or token ids as the input is. The vector is the
            natural log-probability of each of its tokens under a model that generates text. Of
            texts, these are the tokens behind the longest common beginning of the tokens of the
            input and those of input and choice together. None for the scores of a head.
    """

    dimensions: int | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None
    pair: str | None = None
    use_activation: bool = True
    choice: str | tuple[int, ...] | None = None

    def differing(self) -> dict[str, Any]:
        """The values that differ from their defaults, by name."""
        defaults = PoolingParams()
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: one for name, one in values.items() if one != getattr(defaults, name)}


def is_pooled(kind: str) -> bool:
    """Whether requests of this kind get a vector, and no output."""
    return kind in POOLED_KINDS


def parse_pooling(
    kind: PooledKind, body: Mapping[str, Any]
) -> tuple[str | list[int], PoolingParams]:
    """The text or token ids, and what is wanted of them. InvalidRequest as `body.<field>`."""
    known = (*_KNOWN_OF_ALL, *_KNOWN[kind])
    for name, value in body.items():
        if name not in known and not changes_nothing(UNSUPPORTED[kind], name, value):
            reason = why_refused(UNSUPPORTED[kind], name, known=known)
            raise InvalidRequest(f"body.{name}", reason)
    dimensions = _number(body, "dimensions", least=1, most=MAX_DIMENSIONS)
    if body.get("encoding_format") not in (None, *ENCODING_FORMATS):
        raise InvalidRequest("body.encoding_format", f"must be {' or '.join(ENCODING_FORMATS)}")
    most_tokens = _number(body, "truncate_prompt_tokens", least=-1, most=MAX_ARRAY_LENGTH)
    if most_tokens == 0:
        raise InvalidRequest("body.truncate_prompt_tokens", "must be positive, or -1")
    use_activation = body.get("use_activation")
    if not isinstance(use_activation, bool | None):
        raise InvalidRequest("body.use_activation", "must be true or false")
    prompt = _input(body.get("input"))
    return prompt, PoolingParams(
        dimensions=dimensions,
        prompt_name=_prompt_name(body.get("prompt_name")),
        truncate_prompt_tokens=most_tokens,
        pair=_pair(prompt, body.get("pair")),
        use_activation=use_activation is not False,
        choice=_choice(prompt, body),
    )


def numbers_of(vector: bytes) -> list[float]:
    """The numbers of a vector on the wire, which has them as float32, little-endian."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def bytes_of(numbers: Sequence[float]) -> bytes:
    """A vector in its form on the wire."""
    vector = array("f", numbers)
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()


def checked_vector(vector: object) -> bytes:
    """The vector of a terminal record. ProtocolError if it is none."""
    if not isinstance(vector, bytes) or len(vector) % BYTES_PER_NUMBER:
        raise ProtocolError("a vector is not a whole number of float32")
    if len(vector) > MAX_DIMENSIONS * BYTES_PER_NUMBER:
        raise ProtocolError(f"a vector has more than {MAX_DIMENSIONS} numbers")
    return vector


def _input(given: object) -> str | list[int]:
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and 0 < len(given) <= MAX_ARRAY_LENGTH and is_token_ids(given):
        return given
    raise InvalidRequest(
        "body.input", "must be a non-empty string or a non-empty array of token ids"
    )


def _pair(prompt: str | list[int], pair: object) -> str | None:
    if pair is None:
        return None
    if not isinstance(pair, str) or not pair:
        raise InvalidRequest("body.pair", "must be a non-empty string")
    if not isinstance(prompt, str):
        raise InvalidRequest("body.pair", "needs an input that is a text")
    return pair


def _choice(prompt: str | list[int], body: Mapping[str, Any]) -> str | tuple[int, ...] | None:
    choice = body.get("choice")
    if choice is None:
        return None
    for name in _NOT_WITH_CHOICE:
        if body.get(name) is not None:
            raise InvalidRequest(f"body.{name}", "cannot be combined with a choice")
    if isinstance(prompt, str):
        if isinstance(choice, str) and choice:
            return choice
        raise InvalidRequest("body.choice", "must be a non-empty string, as the input is a text")
    if isinstance(choice, list) and 0 < len(choice) <= MAX_DIMENSIONS and is_token_ids(choice):
        return tuple(choice)
    message = f"must be an array of 1 to {MAX_DIMENSIONS} token ids, as the input is one"
    raise InvalidRequest("body.choice", message)


def _prompt_name(name: object) -> str | None:
    if name is None or (isinstance(name, str) and 0 < len(name) <= MAX_PROMPT_NAME):
        return name
    raise InvalidRequest("body.prompt_name", f"must have 1 to {MAX_PROMPT_NAME} characters")


def _number(body: Mapping[str, Any], name: str, *, least: int, most: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise InvalidRequest(f"body.{name}", f"must be an integer from {least} to {most}")
    return value
