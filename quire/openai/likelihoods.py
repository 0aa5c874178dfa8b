"""Likelihoods of choices: `/v1/classify` with `choices`, asked of a model that generates text.

Each choice of each input is a request of kind `scores`. Pure functions from the body of the call to
its choices, and from the vectors of these requests to the entries of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from quire.errors import InvalidRequest
from quire.openai.logprobs import MIN_LOGPROB
from quire.wire.codec import is_token_ids
from quire.wire.output import Completion

#: How the log-probabilities of a choice's tokens become its log-likelihood.
Normalize = Literal["sum", "mean"]

#: The fewest and the most choices of one call.
MIN_CHOICES, MAX_CHOICES = 2, 64

#: The longest label, in characters; that of a classification head's class in a record.
MAX_LABEL_LENGTH = 256
#: The most bytes of all labels of a call. They are kept in the metadata of its first request, which
#: has room for 16 KiB.
MAX_LABELS_BYTES = 12 << 10

_NORMALIZES: Final[Mapping[str, Normalize]] = {"sum": "sum", "mean": "mean"}


@dataclass(frozen=True, slots=True)
class LikelihoodForm:
    """How the answer tells the likelihoods.

    `labels` has one for each choice: its text, which may be cut, and None for token ids.
    """

    labels: tuple[str | None, ...]
    normalize: Normalize = "sum"

    def fields(self) -> dict[str, Any]:
        """The likelihoods as JSON; see `likelihood_form_from`."""
        return {"labels": list(self.labels), "normalize": self.normalize}


def likelihood_form_of(body: Mapping[str, Any]) -> LikelihoodForm | None:
    """What a body of `/v1/classify` asks for; None without choices. InvalidRequest."""
    normalize = body.get("normalize")
    if body.get("choices") is None:
        if normalize is not None:
            raise InvalidRequest("body.normalize", "needs choices")
        return None
    if normalize is not None and (not isinstance(normalize, str) or normalize not in _NORMALIZES):
        raise InvalidRequest("body.normalize", f"must be {' or '.join(_NORMALIZES)}")
    choices = _listed(body)
    most_bytes = MAX_LABELS_BYTES // len(choices)
    labels = tuple(
        _cut(one, most_bytes=most_bytes) if isinstance(one, str) else None for one in choices
    )
    return LikelihoodForm(labels, _NORMALIZES[normalize or "sum"])


def likelihood_form_from(fields: object, *, num_choices: int) -> LikelihoodForm | None:
    """Reads `LikelihoodForm.fields`; None for all else. `num_choices` are those of an input."""
    match fields:
        case {"labels": [*labels], "normalize": str(name)} if name in _NORMALIZES:
            if len(labels) == num_choices and all(isinstance(one, str | None) for one in labels):
                return LikelihoodForm(tuple(labels), _NORMALIZES[name])
    return None


def choices_of(body: Mapping[str, Any], *, are_ids: bool) -> list[Any]:
    """The choices of each input; texts, or arrays of token ids if the inputs are. InvalidRequest.

    The error names the choice at fault.
    """
    choices = _listed(body)
    for index, choice in enumerate(choices):
        if are_ids:
            is_right = isinstance(choice, list) and bool(choice) and is_token_ids(choice)
            message = "must be a non-empty array of token ids, as each input is one"
        else:
            is_right = isinstance(choice, str) and bool(choice)
            message = "must be a non-empty string, as each input is a text"
        if not is_right:
            raise InvalidRequest(f"body.choices.{index}", message)
    return choices


def must_have_likelihoods(completions: Sequence[Completion]) -> None:
    """InvalidRequest if the model gave none for some choice: nothing can be compared with it."""
    if any(not one.vector for one in completions):
        raise InvalidRequest("body.model", "gave no log-probabilities of a choice")


def likelihood_entries(
    form: LikelihoodForm, completions: Sequence[Completion]
) -> Iterator[dict[str, Any]]:
    """Yields the entry of each input; `completions` has all choices of the first, and so on.

    `logprobs` are the log-likelihoods that `probs` are the softmax of. Of equal ones, the first
    choice is the label.
    """
    each = len(form.labels)
    for index in range(len(completions) // each):
        vectors = [one.embedding for one in completions[index * each :][:each]]
        logprobs = [_likelihood(one, form.normalize) for one in vectors]
        probs = _softmax(logprobs)
        yield {
            "index": index,
            "label": form.labels[logprobs.index(max(logprobs))],
            "probs": probs,
            "num_classes": each,
            "logprobs": logprobs,
            "num_tokens": [len(one) for one in vectors],
        }


def _likelihood(numbers: Sequence[float], normalize: Normalize) -> float:
    if min(numbers) < MIN_LOGPROB:
        numbers = [max(one, MIN_LOGPROB) for one in numbers]
    total = math.fsum(numbers)
    return total / len(numbers) if normalize == "mean" else total


def _softmax(logprobs: Sequence[float]) -> list[float]:
    most = max(logprobs)
    shares = [math.exp(one - most) for one in logprobs]
    whole = math.fsum(shares)
    return [one / whole for one in shares]


def _listed(body: Mapping[str, Any]) -> list[Any]:
    choices = body.get("choices")
    if not isinstance(choices, list) or not MIN_CHOICES <= len(choices) <= MAX_CHOICES:
        message = f"must be an array of {MIN_CHOICES} to {MAX_CHOICES} choices"
        raise InvalidRequest("body.choices", message)
    return choices


def _cut(text: str, *, most_bytes: int) -> str:
    # A choice with half a surrogate pair is refused later, by its name.
    data = text[:MAX_LABEL_LENGTH].encode(errors="replace")
    return data[:most_bytes].decode(errors="ignore")
