"""Converts a wire request to the engine's Request. Knows no queue and no thread.

Only this module builds engine Requests, so only this module needs the types of both sides.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.output.detokenizer import Detokenizer
from engine.picture import Picture
from engine.request import Pooling, Request
from engine.sampling_params import SamplingParams as EngineSampling
from quire.errors import InvalidRequest
from quire.wire.adapters import adapter_of
from quire.wire.constraints import CONSTRAINTS, Constraint
from quire.wire.logprobs import MAX_PROMPT_IDS, ToldPrompt, check_prompt_logprobs
from quire.wire.pictures import places_of
from quire.wire.pooling import is_pooled
from quire.wire.protocol import GenerationRequest, Kind, ParsedBody, SamplingParams
from service.worker.constraints.grammars import ANY_OBJECT
from service.worker.constraints.schemas.checks import SchemaRefused
from service.worker.constraints.strict_calls import answering_grammar, strict_grammar
from service.worker.constraints.terminals import json_rule
from service.worker.incoming.origins import with_changed_chat
from service.worker.model.continuations import encode_continued, refuse_faulty_choice
from service.worker.model.pictures import DecodedPicture
from service.worker.model.served import ServedModel
from service.worker.model.text import ModelTokenizer
from service.worker.outgoing.completions import Origin
from service.worker.outgoing.delivery import Delivery
from service.worker.settings.config import Settings

#: The most tokens of the output of a request without `max_tokens`, to earlier versions. One that
#: such a version has submitted keeps this meaning.
EARLIER_DEFAULT = 256


class EncodedPrompt(NamedTuple):
    """A prompt as the engine gets it.

    `opening` is a mark of reasoning that it opens, or empty. `choice_from` is the index of the
    first token that belongs to a choice, if the request has one.
    """

    token_ids: list[int]
    pooling: Pooling | None = None
    opening: str = ""
    choice_from: int | None = None
    pictures: tuple[Picture, ...] = ()


def engine_request(
    request: GenerationRequest,
    delivery: Delivery,
    *,
    served: ServedModel,
    settings: Settings,
    now_ms: int,
    pictures: Sequence[DecodedPicture] = (),
) -> tuple[Request, Constraint | None]:
    """The engine's Request for a request that was claimed at `now_ms`, and its constraint.

    The Request has no constraint yet, because compiling one takes time; see
    `compiling`. After a takeover the request continues after the published token
    ids in `delivery`: the engine replays them through stop conditions and text, and first checks
    whether the output is already complete. The Origin in `delivery` is replaced if the chat is
    another prompt than in earlier versions. `pictures` are those of the chat, in their order.

    Raises:
        InvalidRequest: the request can never be served; the error names the field.
    """
    body = request.parse_body()
    must_be_served(request.kind, body, served)
    adapter = adapter_of(request.body, model=settings.model_name)
    if adapter is not None and adapter.name not in served.adapters:
        raise adapter.refusal(served.adapters)
    prompt = _prompt_of(request, body, delivery, served, pictures)
    prompt_ids, pooling, choice_from = _kept(prompt, body), prompt.pooling, prompt.choice_from
    max_tokens = 1
    if pooling is None:
        left = served.engine.config.max_model_len - len(prompt_ids)
        max_tokens = longest_output(body.sampling, delivery.origin.answer_limit, left=left)
    sampling = engine_sampling(body.sampling, request_id=request.id, max_tokens=max_tokens)
    if sampling.prompt_logprobs is None:
        delivery.told_prompt = delivery.told_prompt or _told_prompt(prompt_ids, body)
    if choice_from is not None:
        sampling = replace(
            sampling, temperature=0.0, prompt_logprobs=0, prompt_logprobs_from=choice_from
        )
    else:
        check_prompt_logprobs(len(prompt_ids), sampling.prompt_logprobs)
    origin = delivery.origin
    converted = Request(
        request_id=delivery.key,
        prompt_token_ids=prompt_ids,
        sampling=sampling,
        # The queue ranks by the same arrival, so that both have the same order.
        arrival_time=origin.arrived,
        priority=origin.priority,
        output_token_ids=list(delivery.token_ids),
        deadline=_deadline_of(request, origin, settings=settings, now_ms=now_ms),
        due=origin.due,
        # No tenant has a zero byte in its name.
        cache_salt=f"{request.tenant}\0{body.cache_salt}" if body.cache_salt else request.tenant,
        adapter=adapter.name if adapter is not None else None,
        text=_text_stream(request, body, served, sampling, prompt_ids, opening=prompt.opening),
        pooling=pooling,
        pictures=prompt.pictures,
    )
    return converted, _constraint_of(body, served)


def _kept(prompt: EncodedPrompt, body: ParsedBody) -> list[int]:
    """The tokens of the prompt that the body keeps. InvalidRequest if that might cut a picture."""
    most, prompt_ids = body.max_prompt_tokens, prompt.token_ids
    if most is None or most >= len(prompt_ids):
        return prompt_ids
    if prompt.pictures:
        raise InvalidRequest("body.truncate_prompt_tokens", "would cut a prompt with pictures")
    return prompt_ids[:most] if body.keeps_beginning else prompt_ids[-most:]


def _told_prompt(prompt_ids: list[int], body: ParsedBody) -> ToldPrompt:
    """What the log tells of a prompt without its log-probabilities. InvalidRequest."""
    if body.told_prompt != "ids":
        return len(prompt_ids) if body.told_prompt else ()
    if len(prompt_ids) > MAX_PROMPT_IDS:
        message = f"a prompt of {len(prompt_ids)} tokens is told by at most {MAX_PROMPT_IDS} ids"
        raise InvalidRequest("body.return_token_ids", message)
    return tuple(prompt_ids)


def _constraint_of(body: ParsedBody, served: ServedModel) -> Constraint | None:
    """The constraint on an output, as this model writes calls. InvalidRequest."""
    tools, constraint, marks = body.tools, body.constraint, served.tokenizer.call_marks
    is_compact = body.sampling.json_whitespace == "none"
    if tools is None or tools.required:
        return constraint and replace(constraint, is_compact=is_compact)
    if constraint is not None:
        schema = ANY_OBJECT if constraint.kind == "json_object" else constraint.value
        field = constraint.field
        try:
            content = json_rule("content", schema, is_compact=is_compact)
            field = tools.strict_field or "body.tools"
            grammar = answering_grammar(marks, tools, content, is_compact=is_compact)
        except SchemaRefused as error:
            raise InvalidRequest(field, str(error)) from error
        return Constraint("grammar", grammar, constraint.field)
    if not tools.strict:
        return None
    field = tools.strict_field
    if marks is None:
        message = (
            "cannot be enforced, as this model has no mark that tells its calls from text; a"
            " tool_choice of required or of one function can be"
        )
        raise InvalidRequest(field, message)
    try:
        grammar = strict_grammar(marks, tools, is_compact=is_compact)
    except SchemaRefused as error:
        raise InvalidRequest(field, str(error)) from error
    return Constraint("grammar", grammar, field)


def _prompt_of(
    request: GenerationRequest,
    body: ParsedBody,
    delivery: Delivery,
    served: ServedModel,
    pictures: Sequence[DecodedPicture],
) -> EncodedPrompt:
    if body.pooling is not None and body.pooling.choice is not None:
        assert body.prompt is not None
        prompt_ids, first = encode_continued(
            body.prompt, body.pooling.choice, tokenizer=served.tokenizer
        )
        refuse_faulty_choice(prompt_ids, first, served.engine.config)
        return EncodedPrompt(prompt_ids, Pooling(), choice_from=first)
    if body.pooling is not None:
        assert served.vectors is not None and body.prompt is not None
        prompt_ids, pooling = served.vectors.encode(
            body.prompt,
            body.pooling,
            tokenizer=served.tokenizer,
            max_tokens=served.engine.config.max_model_len,
        )
        return EncodedPrompt(prompt_ids, pooling)
    if body.messages is None:
        return EncodedPrompt(_prompt_ids(body.prompt, served.tokenizer))
    prompt_ids, is_changed, opening = served.tokenizer.encode_chat(
        body.messages,
        created_ms=request.created_ms,
        tools=body.tools.tools if body.tools is not None else (),
        arguments=body.template_arguments,
        settings=body.template_settings,
    )
    if is_changed:
        delivery.origin = with_changed_chat(delivery.origin)
    if not pictures:
        return EncodedPrompt(prompt_ids, opening=opening)
    assert served.pictures is not None, "the request would have been refused"
    most = served.engine.config.max_model_len
    expanded = served.pictures.expand(prompt_ids, pictures, most=most)
    return EncodedPrompt(expanded.token_ids, opening=opening, pictures=expanded.pictures)


def _text_stream(
    request: GenerationRequest,
    body: ParsedBody,
    served: ServedModel,
    sampling: EngineSampling,
    prompt_ids: list[int],
    *,
    opening: str,
) -> Detokenizer | None:
    if body.pooling is not None:
        return None
    return served.tokenizer.text_stream(
        sampling,
        prompt=prompt_ids,
        # A constraint holds from the first token on, so such an output has no reasoning.
        opening=opening if body.constraint is None else "",
        keeps_marks=body.messages is not None and request.body.get("skip_special_tokens") is None,
        keeps_calls=body.tools is not None,
    )


def must_be_served(kind: Kind, body: ParsedBody, served: ServedModel) -> None:
    """InvalidRequest if this model does not serve such requests."""
    for place in places_of(body.messages) if served.pictures is None else ():
        raise InvalidRequest(place.field, "this worker's model reads no pictures")
    if body.pooling is not None and body.pooling.choice is not None:
        if served.vectors is not None:
            message = f"this worker's model makes {served.vectors.kind}, and generates no text"
            raise InvalidRequest("body.choice", message)
        if not served.engine.config.max_scored_tokens:
            raise InvalidRequest("body.choice", "this worker's engine computes no likelihoods")
        return
    if served.vectors is None and is_pooled(kind):
        message = f"this worker's model generates text, and makes no {kind}"
        if kind == "scores":
            message += " without choices to compare"
        raise InvalidRequest("kind", message)
    if served.vectors is not None and kind != served.vectors.kind:
        own = served.vectors.kind
        raise InvalidRequest("kind", f"this worker's model makes {own}, and serves no {kind}")


def _deadline_of(
    request: GenerationRequest, origin: Origin, *, settings: Settings, now_ms: int
) -> float | None:
    """When the engine gives the request up, on its own clock: the earlier of both limits."""
    limits = []
    if request.deadline_ms is not None:
        limits.append(origin.received + (request.deadline_ms - now_ms) / 1000)
    if settings.request_timeout_seconds is not None:
        limits.append(origin.received + settings.request_timeout_seconds)
    return min(limits, default=None)


def longest_output(wire: SamplingParams, limit: int | None, *, left: int) -> int:
    """The most tokens of an output. InvalidRequest if a request asks for more, and names no length.

    `limit` is that of the claim, see `Claimed`; `left` is what the prompt leaves of the context.
    """
    if wire.max_tokens is not None:
        return wire.max_tokens
    # Whether a prompt leaves no room is found out with all other faults of a prompt.
    most = max(1, min(EARLIER_DEFAULT if limit is None else limit or left, left))
    if wire.min_tokens > most:
        message = f"is greater than the {most} tokens that a request without max_tokens gets here"
        raise InvalidRequest("body.min_tokens", message)
    return most


def engine_sampling(wire: SamplingParams, *, request_id: str, max_tokens: int) -> EngineSampling:
    """The engine's sampling parameters for those of the wire, for an output of `max_tokens`.

    Clients may set a seed. Without one, the seed is a function of the request's id, so that it is
    the same on every worker that runs the request.
    """
    seed = wire.seed
    if seed is None:
        digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little", signed=True)
    biases = tuple(wire.logit_bias.items())
    fields = wire.model_dump(exclude={*CONSTRAINTS, "json_whitespace"})
    own = {"seed": seed, "logit_bias": biases, "max_tokens": max_tokens}
    return EngineSampling(**fields | own)


def _prompt_ids(prompt: str | list[int] | None, tokenizer: ModelTokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode_prompt(prompt)
    assert prompt is not None
    return prompt
