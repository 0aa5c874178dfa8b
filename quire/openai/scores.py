"""Scores over HTTP: `/v1/score`, `/v1/rerank` and `/v1/classify`, in the forms of vLLM and Jina.

Each text, or pair of texts, is a request of kind `scores`; with `choices`, each choice of each text
is one; see likelihoods.py. Pure functions from bodies to the fields
of these requests, and from their vectors to the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from quire.errors import InvalidRequest
from quire.openai.likelihoods import (
    LikelihoodForm,
    choices_of,
    likelihood_entries,
    likelihood_form_of,
    must_have_likelihoods,
)
from quire.wire.body_fields import UNSUPPORTED, changes_nothing, why_refused
from quire.wire.codec import is_token_ids
from quire.wire.output import Completion
from quire.wire.pooling import MAX_INPUTS

#: What is asked for; empty for calls that are none of these.
ScoreForm = Literal["", "score", "rerank", "classify"]

#: The paths of the API -> what is asked for.
SCORE_PATHS: Final[Mapping[str, ScoreForm]] = {
    "/v1/score": "score",
    "/v1/rerank": "rerank",
    "/v1/classify": "classify",
}

#: The fields of each form beside those of all, and which of them has the texts that are counted.
_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "score": ("text_1", "text_2"),
    "rerank": ("query", "documents", "top_n", "return_documents"),
    "classify": ("input", "choices", "normalize"),
}
_COUNTED: Final[Mapping[str, str]] = {"score": "text_2", "rerank": "documents", "classify": "input"}
_OF_ALL = ("model", "adapter", "user", "truncate_prompt_tokens", "use_activation")
#: What the queue's requests call the texts, and the errors about them.
_OWN_FIELDS = ("body.input", "body.pair")
_OWN_CHOICE = "body.choice"


def form_of(name: object) -> ScoreForm:
    """The form that a record names; empty for everything else."""
    return next((one for one in SCORE_PATHS.values() if one == name), "")


def scores_body(form: ScoreForm, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body as requests of kind `scores` have it, with lists of inputs and of their pairs.

    With `choices`, it has the list of the choices that each input has, as `choice`.
    InvalidRequest names the field of the caller.
    """
    known = (*_OF_ALL, *_FIELDS[form])
    for name, value in body.items():
        if name not in known and not changes_nothing(UNSUPPORTED["scores"], name, value):
            reason = why_refused(UNSUPPORTED["scores"], name, known=known)
            raise InvalidRequest(f"body.{name}", reason)
    fields = {name: body[name] for name in _OF_ALL if body.get(name) is not None}
    if form == "classify" and likelihood_form_of(body) is not None:
        inputs = _texts_or_ids(body)
        are_ids = not isinstance(inputs[0], str)
        return fields | {"input": inputs, "choice": choices_of(body, are_ids=are_ids)}
    if form == "classify":
        return fields | {"input": _texts(body, "input")}
    if form == "rerank":
        query, texts = body.get("query"), _listed(body)
        top_n_of(body)
        if body.get("return_documents"):
            message = "is not supported: each result has the index of its document"
            raise InvalidRequest("body.return_documents", message)
        if not isinstance(query, str) or not query:
            raise InvalidRequest("body.query", "must be a non-empty string")
        return fields | {"input": [query] * len(texts), "pair": texts}
    firsts, seconds = _texts(body, "text_1"), _texts(body, "text_2")
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        message = "must be one text, or as many as text_2 has"
        raise InvalidRequest("body.text_1", message)
    return fields | {"input": firsts, "pair": seconds}


def top_n_of(body: Mapping[str, Any]) -> int:
    """How many results a caller wants; 0 for all. InvalidRequest."""
    number = body.get("top_n")
    if number is None:
        return 0
    if type(number) is not int or number < 0:
        raise InvalidRequest("body.top_n", "must be an integer from 0 on")
    return number


def field_of(form: ScoreForm, field: str) -> str:
    """The caller's name of a field of the queue's requests."""
    if form and field.startswith(_OWN_CHOICE):
        return field.replace(_OWN_CHOICE, "body.choices", 1)
    own, _, index = field.partition(".")[2].partition(".")
    if not form or f"body.{own}" not in _OWN_FIELDS:
        return field
    return f"body.{_COUNTED[form]}" + (f".{index}" if index else "")


def must_be_scores(
    form: ScoreForm, completions: Sequence[Completion], *, likelihoods: LikelihoodForm | None = None
) -> None:
    """InvalidRequest if the model gives no single score, or no likelihood, that is asked for."""
    if likelihoods is not None:
        must_have_likelihoods(completions)
    if form not in ("score", "rerank"):
        return
    most = max(len(one.embedding) for one in completions)
    if most != 1:
        message = f"has {most} classes and so no single score: use /v1/classify"
        raise InvalidRequest("body.model", message)


def scores_response(
    form: ScoreForm,
    heading: Mapping[str, Any],
    completions: Sequence[Completion],
    *,
    top_n: int = 0,
    likelihoods: LikelihoodForm | None = None,
) -> dict[str, Any]:
    """The body of the answer; `heading` has its `id`, `created` and `model`.

    An iterator stands in the place of a long list; see `logprobs.written`.
    """
    tokens = sum(one.usage.prompt_tokens for one in completions)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    if form == "rerank":
        scores = [(one.embedding[0], index) for index, one in enumerate(completions)]
        best = sorted(scores, key=lambda one: (-one[0], one[1]))[: top_n or len(scores)]
        results = [{"index": index, "relevance_score": score} for score, index in best]
        fields = {"id": heading["id"], "model": heading["model"], "usage": usage}
        return fields | {"results": results}
    if likelihoods is not None:
        entries = likelihood_entries(likelihoods, completions)
    else:
        entries = (_entry(form, index, one) for index, one in enumerate(completions))
    return {**heading, "object": "list", "data": entries, "usage": usage}


def _entry(form: ScoreForm, index: int, completion: Completion) -> dict[str, Any]:
    numbers = completion.embedding
    if form == "score":
        return {"index": index, "object": "score", "score": numbers[0]}
    label = completion.label or None
    return {"index": index, "label": label, "probs": numbers, "num_classes": len(numbers)}


def _texts(body: Mapping[str, Any], name: str) -> list[str]:
    """One text or several, as a list. InvalidRequest."""
    given = body.get(name)
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts:
        message = "must be a non-empty string, or a non-empty array of them"
        raise InvalidRequest(f"body.{name}", message)
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(f"body.{name}", f"must have at most {MAX_INPUTS} texts")
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            path = f"body.{name}" if texts is not given else f"body.{name}.{index}"
            raise InvalidRequest(path, "must be a non-empty string")
    return texts


def _texts_or_ids(body: Mapping[str, Any]) -> list[Any]:
    """Texts, or arrays of token ids, one or several, as a list. InvalidRequest."""
    given = body.get("input")
    if not isinstance(given, list) or not given or type(given[0]) not in (int, list):
        return list(_texts(body, "input"))
    arrays = given if isinstance(given[0], list) else [given]
    for index, one in enumerate(arrays):
        if not isinstance(one, list) or not one or not is_token_ids(one):
            path = "body.input" if arrays is not given else f"body.input.{index}"
            raise InvalidRequest(path, "must be a non-empty array of token ids")
    return arrays


def _listed(body: Mapping[str, Any]) -> list[str]:
    """The documents, each a text or a map with its `text`, as Jina has them. InvalidRequest."""
    given = body.get("documents")
    if not isinstance(given, list):
        raise InvalidRequest("body.documents", "must be a non-empty array of texts")
    plain = [
        one["text"] if isinstance(one, dict) and set(one) == {"text"} else one for one in given
    ]
    return _texts({"documents": plain}, "documents")
