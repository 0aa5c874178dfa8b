"""The lines of OpenAI's batch files: what is asked in one, and what is answered in two others.

Pure: text in, records out, and back. A line that cannot be right becomes a BadLine that says why,
and never an exception: in a batch it fails alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.batch_logprobs import of_chat, of_completion
from quire.choices import check_number, choice_of, id_of
from quire.errors import InvalidRequest
from quire.output import Completion, FinishReason
from quire.protocol import GenerationRequest, Kind
from quire.sampling import validated

#: What may stand in `url`, and the kind of request it means.
KINDS: dict[str, Kind] = {
    "/v1/chat/completions": "chat.completions",
    "/v1/completions": "completions",
}

#: The longest `custom_id`, in characters.
MAX_CUSTOM_ID_LENGTH = 512

#: Ends that are the batch's and not the line's: a resumed batch tries these lines again.
EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"


#: The result of a line that cannot be run is named by the number of the line.
BAD_LINE_PREFIX = "batch_req_line_"


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch. `digest` names it: by the batch, its id, and all it asks for."""

    custom_id: str
    url: str
    body: Mapping[str, Any]
    digest: str

    @property
    def result_id(self) -> str:
        return f"batch_req_{self.digest[:32]}"

    @property
    def num_choices(self) -> int:
        """How many answers are asked for."""
        n: int | None = self.body.get("n")
        return 1 if n is None else n

    def request_id(self, choice: int = 0, *, attempt: int = 0) -> str:
        """The same in every run, so that a second run finds what the first has begun."""
        return id_of(self._id(attempt), choice, n=self.num_choices)

    def request(self, choice: int = 0, *, attempt: int = 0, **envelope: Any) -> GenerationRequest:
        """The message to submit for one choice. InvalidRequest for a body that cannot be right."""
        check_number(self.num_choices, field="body.n")
        body = {name: value for name, value in self.body.items() if name != "n"}
        if body.get("seed") is None:
            # Without a seed of its own the line gets one that a later run draws again.
            body["seed"] = int(self.digest[32:47], 16)
        fields = {"id": self._id(attempt), "kind": KINDS[self.url], "body": body}
        request = validated(GenerationRequest, fields | envelope)
        request.parse_body()
        # The cap is looked at here, too: over it, one line would stop its whole submit.
        request.encode()
        return choice_of(request, choice, n=self.num_choices)

    def _id(self, attempt: int) -> str:
        suffix = f".{attempt}" if attempt else ""
        return f"batch-{self.digest[:32]}{suffix}"


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be run. `custom_id` is None when the line has none that can be read."""

    number: int
    custom_id: str | None
    code: str
    message: str

    @property
    def result_id(self) -> str:
        return f"{BAD_LINE_PREFIX}{self.number}"


def parse_line(text: str, *, number: int, batch: str) -> BatchLine | BadLine:
    """Reads line `number` of the batch named `batch`. The body is looked into by `request` only."""
    try:
        fields = json.loads(text)
    # Nesting without end is an error of its own kind.
    except (ValueError, RecursionError) as error:
        return BadLine(number, None, "invalid_json", f"line {number}: {error}")
    if not isinstance(fields, dict):
        return BadLine(number, None, "invalid_json", f"line {number}: not an object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_LENGTH:
        wanted = f"a string of 1 to {MAX_CUSTOM_ID_LENGTH} characters"
        message = f"line {number}: custom_id must be {wanted}"
        return BadLine(number, None, "invalid_custom_id", message)

    def bad(code: str, message: str) -> BadLine:
        return BadLine(number, custom_id, code, f"line {number}: {message}")

    if fields.get("method", "POST") != "POST":
        return bad("invalid_method", "method must be POST")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in KINDS:
        return bad("invalid_url", f"url must be one of {', '.join(KINDS)}")
    if not isinstance(body, dict):
        return bad("invalid_body", "body must be an object")
    asked = json.dumps([batch, custom_id, url, body], sort_keys=True)
    digest = hashlib.sha256(asked.encode()).hexdigest()
    line = BatchLine(custom_id, url, body, digest)
    try:
        line.request()
    except InvalidRequest as error:
        return bad("invalid_request", str(error))
    return line


def output_line(line: BatchLine, completions: Sequence[Completion]) -> str:
    """The line of a completed request for the output file, from the whole output of each choice.

    The prompt is counted once, as the first choice found it.
    """
    first, usage = completions[0], completions[0].usage
    num_generated = sum(completion.usage.completion_tokens for completion in completions)
    is_chat = KINDS[line.url] == "chat.completions"
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{line.digest[:32]}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": first.model or line.body.get("model") or "",
        "choices": [
            _choice(index, completion, is_chat=is_chat)
            for index, completion in enumerate(completions)
        ],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": usage.prompt_tokens + num_generated,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }
    response = {"status_code": 200, "request_id": first.request_id, "body": body}
    return _line(line.result_id, line.custom_id, response=response, error=None)


def error_line(line: BatchLine | BadLine, code: str, message: str) -> str:
    """The line for the error file of a request that did not complete."""
    error = {"code": code, "message": message}
    return _line(line.result_id, line.custom_id, response=None, error=error)


def _choice(index: int, completion: Completion, *, is_chat: bool) -> dict[str, Any]:
    stop = "length" if completion.finish_reason is FinishReason.LENGTH else "stop"
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": stop}
    if completion.logprobs:
        choice["logprobs"] = (of_chat if is_chat else of_completion)(completion.logprobs)
    if is_chat:
        choice["message"] = {"role": "assistant", "content": completion.text}
    else:
        choice["text"] = completion.text
    return choice


def _line(result_id: str, custom_id: str | None, **outcome: Any) -> str:
    fields = {"id": result_id, "custom_id": custom_id, **outcome}
    # Escaped, because a custom_id may hold half a surrogate pair, which no file can.
    return json.dumps(fields) + "\n"
