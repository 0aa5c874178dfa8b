"""What a run of many prompts is to do: the request of each prompt, and how its output is read."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from quire.client.following import Following, raise_unless_completed
from quire.client.generations import Generation
from quire.errors import InvalidOutput, InvalidRequest, QuireError, RequestFailed
from quire.queue.submit.messages import must_be_many
from quire.queue.submit.routing import check_group_name
from quire.records import FinishReason
from quire.wire.arguments import (
    SEED_BITS,
    GenerateOptions,
    RequestArguments,
    build_request,
    must_be_ahead,
)
from quire.wire.codec import without_numpy
from quire.wire.output import Completion, TokenChunk
from quire.wire.refusals import nearest, validated
from quire.wire.sampling import SamplingParams

#: How many requests of a run are in flight at once.
DEFAULT_WINDOW = 1024

#: The options of a request on which its output does not depend.
_OF_DELIVERY = {"priority", "deadline", "metadata", "headers"}

#: The types of the missing values of pandas.
_MISSING = ("NAType", "NaTType")

#: A weak model may write digits without end where a constraint allows it.
_UNBOUNDED = (
    "no `max_tokens` was set, so the output went on to the end of the context, or to the bound of "
    "the queue: set one"
)

#: Hex digits of what names a prompt in the id of its request.
ID_DIGITS = 24


@dataclass(slots=True)
class Row:
    """One prompt, and how far its request is. `error`: it has no request, or lost it for good."""

    index: int
    arguments: RequestArguments = field(default_factory=RequestArguments)
    attempt: int = 0
    losses: int = 0
    following: Following | None = None
    items: list[TokenChunk | Completion] = field(default_factory=list)
    #: Monotonic time, in seconds, at which its log last had something new.
    heard: float = 0.0
    completion: Completion | None = None
    error: QuireError | None = None
    #: An earlier call of the run has computed it.
    is_earlier: bool = False

    @property
    def has_ended(self) -> bool:
        return self.completion is not None or self.error is not None

    @property
    def numbered(self) -> RequestArguments:
        """The arguments under the id of this attempt."""
        if not self.attempt:
            return self.arguments
        request_id = f"{self.arguments['request_id']}.{self.attempt}"
        return {**self.arguments, "request_id": request_id}

    def follow(self, request_id: str) -> Following:
        """Reads the log of this request from its beginning."""
        self.following, self.items = Following(request_id, known=True), []
        self.heard = time.monotonic()
        return self.following


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run. `rows` makes a row for each prompt when it is asked for the next one.

    A run that `is_named` is continued by other calls; one that `is_bounded` sets `max_tokens`.
    `total` is the number of prompts, if known.
    """

    name: str
    is_named: bool
    is_bounded: bool
    rows: Iterator[Row]
    total: int | None
    parse: Callable[[str], Any] | None
    raises: bool
    shows_progress: bool
    window: int
    timeout: float | None

    @classmethod
    def of(cls, prompts: Iterable[Any], schema: Any, options: GenerateOptions) -> RunPlan:
        """The plan of a call of `generate`. InvalidRequest for a wrong option."""
        must_be_many("prompts", prompts)
        given: dict[str, Any] = without_numpy(dict(options))
        for option in given.keys() - GenerateOptions.__optional_keys__:
            reason = nearest(option, GenerateOptions.__optional_keys__)
            if option == "sampling":
                reason = ": give its parameters by their names, such as temperature=0"
            raise InvalidRequest(option, f"unknown argument{reason}")
        name, errors = given.pop("name", None), given.pop("errors", "raise")
        if errors not in ("raise", "return"):
            raise InvalidRequest("errors", 'must be "raise" or "return"')
        window, timeout = given.pop("window", DEFAULT_WINDOW), given.pop("timeout", None)
        if type(window) is not int or window < 1:
            raise InvalidRequest("window", "must be a positive integer")
        if timeout is not None:
            must_be_ahead("timeout", timeout)
        shows_progress = bool(given.pop("progress", True))
        sampling = {key: given.pop(key) for key in [*given] if key in SamplingParams.model_fields}
        parse = None
        if schema is not None:
            if sampling.get("json_schema") is not None:
                raise InvalidRequest("schema", "cannot be combined with json_schema")
            sampling["json_schema"], parse = _read_as(schema)
        body = validated(SamplingParams, sampling).to_body()
        _check_options(given)
        run = name if name is not None else f"generate-{secrets.token_hex(6)}"
        return cls(
            name=_checked_name(run),
            is_named=name is not None,
            is_bounded=body.get("max_tokens") is not None,
            rows=_rows(prompts, body, given, run=run),
            total=len(prompts) if isinstance(prompts, Sized) else None,
            parse=parse,
            raises=errors == "raise",
            shows_progress=shows_progress,
            window=window,
            timeout=timeout,
        )

    def generation(self, row: Row) -> Generation[Any]:
        """The result of a row that has ended. Raises its error if the run raises errors."""
        result = self._read(row)
        if result.error is not None and self.raises:
            if not isinstance(result.error, InvalidRequest):
                result.error.add_note(f"prompt {row.index} of the run {self.name}")
            raise result.error
        return result

    def _read(self, row: Row) -> Generation[Any]:
        if row.completion is None:
            return Generation(row.index, error=row.error)
        try:
            raise_unless_completed(row.completion)
            parsed = None if self.parse is None else self.parse(row.completion.text)
        except RequestFailed as error:
            return Generation(row.index, row.completion, error=error)
        except ValueError as error:
            invalid = _invalid(row.completion, error, is_bounded=self.is_bounded)
            return Generation(row.index, row.completion, error=invalid)
        return Generation(row.index, row.completion, parsed)


def _check_options(options: Mapping[str, Any]) -> None:
    """InvalidRequest for a wrong option of the requests."""
    some: Any = {"messages": [{"role": "user", "content": "?"}], **options}
    build_request(some, tenant="default", now_ms=0)


def _checked_name(name: Any) -> str:
    """The name of a run. InvalidRequest."""
    if not isinstance(name, str):
        raise InvalidRequest("name", "must be a text")
    try:
        return check_group_name(name)
    except InvalidRequest as error:
        raise InvalidRequest("name", error.message) from None


def _rows(
    prompts: Iterable[Any], sampling: Mapping[str, Any], options: Mapping[str, Any], *, run: str
) -> Iterator[Row]:
    """The rows of a run. Each has an id and a seed that follow from all that makes its output."""
    options = {name: value for name, value in options.items() if value is not None}
    kept = [(name, options[name]) for name in sorted(options.keys() - _OF_DELIVERY)]
    common = hashlib.sha256(_json([run, sampling, kept]))
    for index, prompt in enumerate(prompts):
        try:
            subject = _subject(prompt)
            named = common.copy()
            named.update(_json([index, subject]))
        except InvalidRequest as error:
            yield Row(index, error=InvalidRequest(error.field, error.message, index=index))
            continue
        digest = named.digest()
        # Another call draws the same numbers, also when the queue has forgotten this one.
        seed = int.from_bytes(digest[-8:], "big") >> (64 - SEED_BITS)
        arguments: Any = {
            **options,
            **subject,
            "sampling": {"seed": seed, **sampling},
            "request_id": f"{index}-{digest.hex()[:ID_DIGITS]}",
        }
        yield Row(index, arguments)


def _subject(prompt: Any) -> dict[str, Any]:
    """The argument that a prompt is. InvalidRequest."""
    prompt = without_numpy(prompt)
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        is_chat = bool(prompt) and isinstance(prompt[0], Mapping)
        return {"messages" if is_chat else "prompt": list(prompt)}
    kind = type(prompt).__name__
    is_nan = isinstance(prompt, float) and math.isnan(prompt)
    if prompt is None or is_nan or kind in _MISSING:
        message = f"is missing ({prompt!r}): leave such rows out, or fill them"
        raise InvalidRequest("prompt", message)
    raise InvalidRequest(
        "prompt", f"must be a text, a chat (a list of messages) or token ids, not {kind}"
    )


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, default=_written).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest("prompt", f"is no JSON: {error}") from None


def _written(value: Any) -> str:
    """What stands in the digest of a prompt for a value that JSON does not have."""
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else repr(value)


def _read_as(schema: Any) -> tuple[dict[str, Any], Callable[[str], Any]]:
    """The JSON schema, and what reads an output. InvalidRequest."""
    if isinstance(schema, Mapping):
        return dict(schema), json.loads
    try:
        adapter = TypeAdapter(schema)
        return adapter.json_schema(), adapter.validate_json
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidRequest(
            "schema", f"must be a pydantic class or a JSON schema: {reason}"
        ) from error


def _invalid(completion: Completion, error: ValueError, *, is_bounded: bool) -> InvalidOutput:
    """The error of an output that cannot be read as the schema says."""
    if completion.finish_reason is FinishReason.LENGTH:
        advice = "raise `max_tokens`" if is_bounded else _UNBOUNDED
        message = f"the output was cut after {completion.usage.completion_tokens} tokens: {advice}"
    elif isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        message = f"{path}: {first['msg']}" if path else first["msg"]
    else:
        message = str(error)
    return InvalidOutput(f"{completion.request_id}: {message}", completion=completion)
