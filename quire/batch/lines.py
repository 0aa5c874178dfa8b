"""The lines of OpenAI's batch files: of the input, the output and the error file.

Pure functions from text to records and back. An invalid line becomes a BadLine with the reason, and
never an exception, because in a batch it must fail alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

from quire.errors import InvalidRequest
from quire.openai.answers import Heading, response
from quire.openai.likelihoods import LikelihoodForm, likelihood_form_of
from quire.openai.requests import KINDS, OpenAIRequest
from quire.openai.scores import (
    SCORE_PATHS,
    ScoreForm,
    field_of,
    must_be_scores,
    scores_body,
    top_n_of,
)
from quire.openai.vectors import encoding_of
from quire.wire.choices import id_of
from quire.wire.json_text import read_object
from quire.wire.message import Message
from quire.wire.output import Completion
from quire.wire.pictures import forgotten
from quire.wire.protocol import Kind, is_session_id

#: The paths that a line can call -> the kind of its requests.
LINE_KINDS: Mapping[str, Kind] = {**KINDS, **dict.fromkeys(SCORE_PATHS, "scores")}

#: The beginning of the id of an answer, by the kind of its requests. That of scores is the
#: gateway's for all calls; vectors have no id.
_ANSWER_PREFIXES: Mapping[Kind, str] = {
    "chat.completions": "chatcmpl-",
    "completions": "cmpl-",
    "embeddings": "",
    "scores": "req-",
}

#: The longest `custom_id`, in characters.
MAX_CUSTOM_ID_LENGTH = 512

#: What a `custom_id` must be, for messages.
CUSTOM_ID_TEXT = f"a string of 1 to {MAX_CUSTOM_ID_LENGTH} characters"

#: Error codes of lines that the end of the batch interrupted; a resumed batch runs them again.
EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"

#: Begin of the result id of an invalid line. Its number and a hash of the error follow.
BAD_LINE_PREFIX = "batch_req_line_"


#: The most log-probabilities of the prompts of one line, whose answer is made as a whole.
MAX_LINE_LOGPROBS = 1 << 19


@dataclass(frozen=True)
class BatchLine:
    """One request of a batch. `digest` identifies it: a hash of batch name, id, url and body.

    A `session_id` is part of the hash if the line has one. The `body` of a call for scores is that
    of its requests, of which the answer has the `top_n` best; all if that is 0. `likelihoods` is
    the form of those of its choices, if it has any. A line that `lacks_pictures` is good for its
    answer, but not for its messages.
    """

    custom_id: str
    url: str
    body: Mapping[str, Any]
    digest: str
    session_id: str | None = None
    top_n: int = 0
    likelihoods: LikelihoodForm | None = None
    lacks_pictures: bool = False

    def without_pictures(self) -> tuple[BatchLine, int]:
        """The line without the data of its pictures, and how many characters these had."""
        if LINE_KINDS[self.url] != "chat.completions":
            return self, 0
        messages, num_characters = forgotten(self.body["messages"])
        if not num_characters:
            return self, 0
        body = {**self.body, "messages": messages}
        return replace(self, body=body, lacks_pictures=True), num_characters

    @property
    def form(self) -> ScoreForm:
        """What a call for scores asks for; empty for other calls."""
        return SCORE_PATHS.get(self.url, "")

    @property
    def result_id(self) -> str:
        return f"batch_req_{self.digest[:32]}"

    @cached_property
    def call(self) -> OpenAIRequest:
        """The call of OpenAI's API. Without a seed in the body, every run derives the same one."""
        return OpenAIRequest(LINE_KINDS[self.url], self.body, self.digest)

    @property
    def num_choices(self) -> int:
        """The number of choices of all prompts together."""
        return self.call.num_choices

    def request_id(self, choice: int = 0, *, attempt: int = 0) -> str:
        """The id of a choice's request: the same in every run, so a resumed run finds it."""
        return id_of(self._id(attempt), choice, n=self.num_choices)

    def message(self, choice: int = 0, *, attempt: int = 0, **envelope: Any) -> Message:
        """The message to submit for one choice. InvalidRequest for an invalid body."""
        assert not self.lacks_pictures, "the message would have other content"
        if self.session_id is not None:
            envelope["session_id"] = self.session_id
        return self.call.message(self._id(attempt), choice, **envelope)

    def _id(self, attempt: int) -> str:
        suffix = f".{attempt}" if attempt else ""
        return f"batch-{self.digest[:32]}{suffix}"


@dataclass(frozen=True, slots=True)
class BadLine:
    """An invalid line. `custom_id` is None if the line has no readable one."""

    number: int
    custom_id: str | None
    code: str
    message: str

    @property
    def result_id(self) -> str:
        text = json.dumps([self.custom_id, self.code, self.message])
        return f"{BAD_LINE_PREFIX}{self.number}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def parse_line(text: str, *, number: int, batch: str) -> BatchLine | BadLine:
    """Reads line `number` of the batch named `batch`. The body is checked last."""
    try:
        fields, fault = read_object(text)
    except InvalidRequest as error:
        return BadLine(number, None, "invalid_json", f"line {number}: {error.message}")
    if fault is not None and fault.path == "custom_id":
        message = f"line {number}: custom_id {fault.message}"
        return BadLine(number, None, "invalid_custom_id", message)
    custom_id = fields.get("custom_id")
    if not is_custom_id(custom_id):
        message = f"line {number}: custom_id must be {CUSTOM_ID_TEXT}"
        return BadLine(number, None, "invalid_custom_id", message)

    def bad(code: str, message: str) -> BadLine:
        return BadLine(number, custom_id, code, f"line {number}: {message}")

    if fault is not None:
        is_of_body = fault.path.startswith("body.")
        code = "invalid_request" if is_of_body else "invalid_json"
        return bad(code, f"{fault.path}: {fault.message}")
    if wrong := wrong_field(fields):
        return bad(*wrong)
    try:
        return _checked_line(custom_id, fields, digest=_digest_of(batch, fields))
    except InvalidRequest as error:
        return bad("invalid_request", str(error))


def _checked_line(custom_id: str, fields: Mapping[str, Any], *, digest: str) -> BatchLine:
    """The line, if each of its requests is valid. InvalidRequest names the caller's field."""
    url, body, top_n, likelihoods = fields["url"], fields["body"], 0, None
    form = SCORE_PATHS.get(url, "")
    if form:
        likelihoods = likelihood_form_of(body) if form == "classify" else None
        top_n = top_n_of(body) if form == "rerank" else 0
        body = scores_body(form, body)
    session = fields.get("session_id")
    line = BatchLine(custom_id, url, body, digest, session, top_n, likelihoods)
    try:
        line.call.check()
    except InvalidRequest as error:
        raise InvalidRequest(field_of(form, error.field), error.message) from None
    if (most := line.call.most_prompt_logprobs) > MAX_LINE_LOGPROBS:
        message = (
            f"may need {most} log-probabilities or ids of the prompts of this line; at most "
            f"{MAX_LINE_LOGPROBS} are allowed: ask for fewer, or use several lines"
        )
        use = line.call.prompt_use
        has_logprobs = use.has_logprobs or use.is_echoed
        field = "body.prompt_logprobs" if has_logprobs else "body.return_token_ids"
        raise InvalidRequest(line.call.prompt_use.field(field) or field, message)
    return line


class WrongField(NamedTuple):
    """Why a line cannot be read: the code of its error and the message."""

    code: str
    message: str


def is_custom_id(value: object) -> TypeGuard[str]:
    """Whether a line can have this `custom_id`."""
    return isinstance(value, str) and 0 < len(value) <= MAX_CUSTOM_ID_LENGTH


def wrong_field(fields: Mapping[str, Any]) -> WrongField | None:
    """What is wrong with a field beside the `custom_id`; None if all can be read."""
    url, session = fields.get("url"), fields.get("session_id")
    if fields.get("method", "POST") != "POST":
        return WrongField("invalid_method", "method must be POST")
    if not isinstance(url, str) or url not in LINE_KINDS:
        return WrongField("invalid_url", f"url must be one of {', '.join(LINE_KINDS)}")
    if not isinstance(fields.get("body"), dict):
        return WrongField("invalid_body", "body must be an object")
    if session is not None and not (isinstance(session, str) and is_session_id(session)):
        return WrongField("invalid_session_id", "session_id must be the name of a session")
    return None


def _digest_of(batch: str, fields: Mapping[str, Any]) -> str:
    """A hash of the batch's name and the line; a line without a session has none in it."""
    content = [batch, fields["custom_id"], fields["url"], fields["body"]]
    if fields.get("session_id") is not None:
        content.append(fields["session_id"])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def response_body(line: BatchLine, completions: Sequence[Completion]) -> dict[str, Any]:
    """The body of the response, from the whole outputs of all choices.

    InvalidRequest if the model makes no answer of this form.
    """
    must_be_scores(line.form, completions, likelihoods=line.likelihoods)
    first, kind = completions[0], LINE_KINDS[line.url]
    heading = Heading(
        id=f"{_ANSWER_PREFIXES[kind]}{line.digest[:32]}",
        kind=kind,
        created=int(time.time()),
        model=first.model or line.body.get("model") or "",
        tools=line.call.tool_names,
        encoding=encoding_of(line.body.get("encoding_format")),
        reasoning=line.call.reasoning(),
        has_token_ids=line.body.get("return_token_ids") is True,
        types=line.call.argument_types,
        form=line.form,
        top_n=line.top_n,
        likelihoods=line.likelihoods,
        prompt=line.call.prompt_use,
        metadata=line.call.metadata,
    )
    call = line.call
    return response(heading, completions, num_prompts=call.num_prompts, prompts=call.kept_prompts)


def output_line(line: BatchLine, request_id: str, body: Mapping[str, Any]) -> str:
    """The line for the output file. `request_id` is that of the first choice."""
    answer = {"status_code": 200, "request_id": request_id, "body": body}
    return _line(line.result_id, line.custom_id, response=answer, error=None)


def error_line(line: BatchLine | BadLine, code: str, message: str) -> str:
    """The line for the error file, for a line that did not complete."""
    error = {"code": code, "message": message}
    return _line(line.result_id, line.custom_id, response=None, error=error)


def _line(result_id: str, custom_id: str | None, **outcome: Any) -> str:
    fields = {"id": result_id, "custom_id": custom_id, **outcome}
    # Escaped to ASCII: a custom_id may hold half a surrogate pair, which UTF-8 cannot encode.
    return json.dumps(fields) + "\n"
