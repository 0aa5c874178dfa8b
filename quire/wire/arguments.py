"""The arguments of a client's caller for one request, and the message built from them."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal, TypedDict, TypeVar

from quire.errors import InvalidRequest
from quire.wire.codec import without_numpy
from quire.wire.compact_json import with_whitespace
from quire.wire.pictures import taken_out
from quire.wire.pooling import POOLED_KINDS, PooledKind
from quire.wire.protocol import GenerationRequest, Kind, Priority
from quire.wire.refusals import nearest, validated
from quire.wire.sampling import ParsedBody, SamplingParams
from quire.wire.sampling_fields import SamplingFields

#: Bits of a seed that the client draws.
SEED_BITS = 63

#: The latest time that a request may name, in seconds from now: a year.
MAX_AHEAD_SECONDS = 31_536_000
#: The shortest expiry that Redis supports.
MIN_KEPT_SECONDS = 0.001
#: The longest of all durations: ten years. Redis and the timeouts of threads refuse much longer
#: ones, but only later, with an error that seems to come from the work in progress.
MAX_SECONDS = 315_360_000


class PoolingOptions(TypedDict, total=False):
    """The arguments that only a request for a vector has; see `PoolingParams`."""

    dimensions: int | None
    prompt_name: str | None
    truncate_prompt_tokens: int | None
    #: The second text of a pair, for scores.
    pair: str | None
    use_activation: bool | None
    #: A continuation of the input, for its likelihood: a text or token ids, as the input is.
    choice: str | Sequence[int] | None


class RequestOptions(PoolingOptions, total=False):
    """All arguments except the prompt; see `Client.submit`."""

    #: Asks for a vector of this text, or of these token ids, instead of an output.
    input: str | Sequence[int] | None
    #: Which vector: `embeddings`, unless another kind is named.
    kind: PooledKind | None
    messages: Sequence[Mapping[str, Any]] | None
    #: The functions that the answer to `messages` may call, in OpenAI's form, and how.
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    #: Variables of the model's chat template, such as `enable_thinking`.
    chat_template_kwargs: Mapping[str, Any] | None
    sampling: SamplingParams | SamplingFields | Mapping[str, Any] | None
    priority: str | int | Priority
    #: Seconds from now.
    deadline: float | None
    #: How long it should take. It ranks the request under `adaptive`, and never ends it.
    target_latency_seconds: float | None
    #: The request is not queued before this many seconds from now.
    delay_seconds: float | None
    #: The request is not queued before this time, which has a time zone.
    not_before: datetime | None
    model: str | None
    #: The name of an adapter of the model.
    adapter: str | None
    tenant: str | None
    #: A new id is minted if there is none.
    request_id: str | None
    idempotency_key: str | None
    #: Requests of a tenant with the same session run one after the other, in their order.
    session_id: str | None
    metadata: Mapping[str, Any] | None
    headers: Mapping[str, str] | None


class RequestArguments(RequestOptions, total=False):
    """All arguments of one request, as `Client.submit_many` takes them."""

    prompt: str | Sequence[int] | None


class GenerateOptions(SamplingFields, total=False):
    """The options of `Client.generate`: the sampling parameters, and those of `submit` for all."""

    #: The name of the run: another call with it goes on with the run.
    name: str | None
    errors: Literal["raise", "return"]
    #: Whether to show how far the run is, if somebody looks at a terminal or notebook.
    progress: bool
    #: The most requests in flight.
    window: int
    #: In seconds, for the whole run.
    timeout: float | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    priority: str | int | Priority
    #: For each request, in seconds from its submit.
    deadline: float | None
    model: str | None
    adapter: str | None
    tenant: str | None
    metadata: Mapping[str, Any] | None
    headers: Mapping[str, str] | None


class QueueSettings(TypedDict, total=False):
    """Settings of a client's queue other than its name; each as in `Broker`.

    The durations should be those of the queue's workers: they limit how long a request may wait and
    how long its output can be read. `max_backlog` is per shard.
    """

    max_backlog: int | None
    max_queue_seconds: float
    retention_seconds: float
    lease_seconds: float
    max_attempts: int
    retry_seconds: float
    durable: bool


_Function = TypeVar("_Function", bound=Callable[..., Any])


def named_options(options: type) -> Callable[[_Function], _Function]:
    """Names each of the options, a TypedDict, in the signature of a function that takes them all.

    Notebooks and `help` read it. Type checkers read the function itself.
    """
    # An annotation that nobody has evaluated yet is a ForwardRef.
    kinds = {
        name: getattr(kind, "__forward_arg__", kind)
        for name, kind in options.__annotations__.items()
    }
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=kind)
        for name, kind in kinds.items()
    ]

    def name_them(function: _Function) -> _Function:
        signature = inspect.signature(function)
        given = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        vars(function)["__signature__"] = signature.replace(parameters=[*given, *named])
        return function

    return name_them


#: The arguments that are fields of the body of a chat with the same name.
_OF_CHATS = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs")

#: The arguments that are fields of the body of a request for a vector.
_OF_VECTORS = tuple(PoolingOptions.__optional_keys__)

#: The arguments that are fields of the message with the same name.
_ENVELOPE = ("priority", "idempotency_key", "session_id", "metadata", "headers", "tenant")


def build_request(
    arguments: RequestArguments, *, tenant: str, now_ms: int | None
) -> tuple[GenerationRequest, ParsedBody]:
    """Builds the checked request and its parsed body.

    `now_ms` is the time of the broker's clock, for deadlines and delays; see `needs_clock`.
    InvalidRequest names the argument at fault.
    """
    if not isinstance(arguments, Mapping):
        raise InvalidRequest("request", "must be a text, a request or a map of arguments")
    for name in arguments:
        if name not in _ARGUMENTS:
            raise InvalidRequest(name, f"unknown argument{_suggestion(name)}")
    arguments = without_numpy(dict(arguments))
    kind, body = _pooled(arguments) or _generating(arguments)
    pictures: Mapping[str, bytes] = {}
    if "messages" in body:
        body["messages"], pictures = taken_out(body["messages"], is_openai=False)
    for name in ("model", "adapter"):
        if arguments.get(name) is not None:
            body[name] = arguments.get(name)
    fields = {name: arguments.get(name) for name in _ENVELOPE} | {"id": arguments.get("request_id")}
    fields |= _times(arguments, now_ms=now_ms)
    given = {name: value for name, value in fields.items() if value is not None}
    message = {"tenant": tenant, **given, "kind": kind, "body": body}
    try:
        request = validated(GenerationRequest, message)
    except InvalidRequest as error:
        # The caller knows the name of the argument, not that of the message's field.
        field = "request_id" if error.field == "id" else error.field
        raise InvalidRequest(field, error.message) from None
    body, parsed = with_whitespace(dict(request.body), request.parse_body())
    return request.model_copy(update={"body": body}), replace(parsed, pictures=pictures)


def _generating(arguments: RequestArguments) -> tuple[Kind, dict[str, Any]]:
    """The kind and the body of a request for an output."""
    kind, body = _subject(arguments.get("prompt"), arguments.get("messages"))
    sampling = arguments.get("sampling")
    if not isinstance(sampling, SamplingParams):
        if not isinstance(sampling, Mapping | None):
            raise InvalidRequest("sampling", "must be a SamplingParams or a map of its fields")
        if "n" in (sampling or {}):
            raise InvalidRequest("sampling.n", f"unknown field{_suggestion('n')}")
        sampling = validated(SamplingParams, sampling or {}, prefix="sampling.")
    body |= sampling.to_body()
    # A generation that another worker resumes must continue with the same noise.
    body.setdefault("seed", secrets.randbits(SEED_BITS))
    return kind, body | _of_chat(arguments)


def _pooled(arguments: RequestArguments) -> tuple[Kind, dict[str, Any]] | None:
    """The kind and the body of a request for a vector; None for one for an output."""
    named = {name: arguments.get(name) for name in _OF_VECTORS}
    options = {name: value for name, value in named.items() if value is not None}
    given, kind = arguments.get("input"), arguments.get("kind")
    if given is None:
        for name in ("kind", *options):
            if arguments.get(name) is not None:
                raise InvalidRequest(name, "needs an input")
        return None
    for name in ("prompt", "messages", "sampling", *_OF_CHATS):
        if arguments.get(name) is not None:
            raise InvalidRequest(name, "cannot be combined with input")
    if kind not in (None, *POOLED_KINDS):
        raise InvalidRequest("kind", f"must be one of {', '.join(POOLED_KINDS)}")
    if not isinstance(given, str) and not _is_sequence(given):
        raise InvalidRequest("input", "must be a text or a sequence of token ids")
    text = given if isinstance(given, str) else list(given)
    choice = arguments.get("choice")
    if choice is not None and _is_sequence(choice):
        options["choice"] = list(choice)
    return kind or "embeddings", {"input": text, **options}


def must_be_ahead(field: str, seconds: float) -> None:
    """InvalidRequest(field) unless `seconds` is in 0 < seconds <= MAX_AHEAD_SECONDS."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= MAX_AHEAD_SECONDS:
        raise InvalidRequest(
            field, f"must be a positive number of seconds up to {MAX_AHEAD_SECONDS}"
        )


def needs_clock(arguments: RequestArguments) -> bool:
    """Whether `build_request` needs the time of the broker's clock for these arguments."""
    return isinstance(arguments, Mapping) and any(
        arguments.get(name) is not None for name in _TIME_ARGUMENTS
    )


#: The arguments that set a time; each may be at most a year ahead of the broker's clock.
_TIME_ARGUMENTS = ("deadline", "delay_seconds", "not_before")

_ARGUMENTS = frozenset(RequestArguments.__optional_keys__)


def _subject(
    prompt: str | Sequence[int] | None, messages: Sequence[Mapping[str, Any]] | None
) -> tuple[Kind, dict[str, Any]]:
    if (prompt is None) == (messages is None):
        raise InvalidRequest("prompt", "give either a prompt or messages, or an input")
    if messages is not None:
        if not _is_sequence(messages):
            raise InvalidRequest("messages", "must be a sequence of maps")
        maps = [dict(one) if isinstance(one, Mapping) else one for one in messages]
        return "chat.completions", {"messages": maps}
    if isinstance(prompt, str):
        return "completions", {"prompt": prompt}
    if not _is_sequence(prompt):
        raise InvalidRequest("prompt", "must be a text or a sequence of token ids")
    if prompt and isinstance(prompt[0], Mapping):
        raise InvalidRequest("prompt", "is a chat: give it as messages=")
    return "tokens", {"prompt": list(prompt or ())}


def _of_chat(arguments: RequestArguments) -> dict[str, Any]:
    """The fields of the body that only a chat may have.

    The model of a body takes its tools from a list only, so a tuple of tools becomes one.
    """
    found = {name: arguments.get(name) for name in _OF_CHATS if arguments.get(name) is not None}
    if found and arguments.get("messages") is None:
        raise InvalidRequest(next(iter(found)), "needs messages")
    tools = found.get("tools")
    return found | ({"tools": list(tools)} if isinstance(tools, tuple) else {})


def _is_sequence(value: object) -> bool:
    """Whether this is a sequence of items. Bytes are not: their items would pass as token ids."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _suggestion(name: str) -> str:
    """A clause that names what the caller probably meant; empty if nothing is similar."""
    if name == "n":
        return "; submit_choices asks for several answers"
    if name in SamplingParams.model_fields:
        return "; it is a field of sampling"
    return nearest(name, _ARGUMENTS)


def _times(arguments: RequestArguments, *, now_ms: int | None) -> dict[str, int]:
    """Deadline and earliest time of a request, in unix milliseconds of the broker's clock."""
    times: dict[str, int] = {}
    if (deadline := arguments.get("deadline")) is not None:
        times["deadline_ms"] = _after(now_ms, "deadline", deadline)
    if (target := arguments.get("target_latency_seconds")) is not None:
        must_be_ahead("target_latency_seconds", target)
        times["target_latency_ms"] = max(1, int(target * 1000))
    if (delay := arguments.get("delay_seconds")) is not None:
        times["not_before_ms"] = _after(now_ms, "delay_seconds", delay)
    if (moment := arguments.get("not_before")) is not None:
        if delay is not None:
            raise InvalidRequest("not_before", "cannot be combined with delay_seconds")
        times["not_before_ms"] = _unix_ms(now_ms, moment)
    if "deadline_ms" in times and times["deadline_ms"] <= times.get("not_before_ms", 0):
        raise InvalidRequest("deadline", "passes before the request may be queued")
    return times


def _unix_ms(now_ms: int | None, moment: datetime) -> int:
    assert now_ms is not None, "a time is checked against the broker's clock"
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise InvalidRequest("not_before", "must be a datetime with a time zone")
    moment_ms = int(moment.timestamp() * 1000)
    if moment_ms > now_ms + 1000 * MAX_AHEAD_SECONDS:
        raise InvalidRequest("not_before", f"is more than {MAX_AHEAD_SECONDS} seconds ahead")
    # A time in the past means now. One before 1970 would be negative, which the message refuses.
    return max(1, moment_ms)


def _after(now_ms: int | None, field: str, seconds: float) -> int:
    assert now_ms is not None, "a delay needs the broker's clock"
    must_be_ahead(field, seconds)
    return now_ms + max(1, int(seconds * 1000))
