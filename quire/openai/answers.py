"""Bodies of OpenAI's responses: whole responses, and the events of a stream.

Pure functions from completions and chunks to JSON, for batch files and for the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.openai.likelihoods import LikelihoodForm
from quire.openai.logprobs import (
    columns_of_chat,
    columns_of_completion,
    columns_of_prompt,
    compact,
    filled,
    written,
)
from quire.openai.prompts import NO_PROMPT, PromptUse
from quire.openai.scores import ScoreForm, field_of, scores_response
from quire.openai.tools.answers import CALLED, MessageStream
from quire.openai.tools.argument_types import ArgumentTypes
from quire.openai.tools.reasoning import NO_REASONING, ReasoningUse
from quire.openai.vectors import VectorEncoding, embeddings_response, written_embeddings
from quire.wire.output import Completion, FinishReason, TokenChunk
from quire.wire.pooling import is_pooled
from quire.wire.protocol import Kind


@dataclass(frozen=True, slots=True)
class Heading:
    """The fields common to a response and to all events of a stream. `created`: unix seconds.

    `tools` are the names of the functions that the output may call, and `reasoning` the reasoning
    that it may have. If it `has_token_ids`, choices and events have those of their tokens.
    """

    id: str
    kind: Kind
    created: int = 0
    model: str = ""
    tools: tuple[str, ...] = ()
    reasoning: ReasoningUse = NO_REASONING
    has_token_ids: bool = False
    #: How the answer writes vectors, if it has them.
    encoding: VectorEncoding = "float"
    #: The types of the arguments of `tools`.
    types: ArgumentTypes = field(default_factory=dict)
    #: What is asked for if the call is for scores, and how many of them; 0 for all.
    form: ScoreForm = ""
    top_n: int = 0
    #: How a call for scores tells the likelihoods of its choices, if it has any.
    likelihoods: LikelihoodForm | None = None
    #: What the answer has of its prompts.
    prompt: PromptUse = NO_PROMPT
    #: What the caller of a chat gave it; its whole answer shows it again.
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return self.kind == "chat.completions"

    @property
    def has_parts(self) -> bool:
        """Whether the output is split into content, reasoning and calls."""
        return bool(self.tools or self.reasoning.names)

    def message_stream(self, choice: int) -> MessageStream:
        """A new stream of the deltas of this choice."""
        return MessageStream(
            self.id, choice, self.tools, types=self.types, reasoning=self.reasoning
        )

    def fields(self, *, is_piece: bool) -> dict[str, Any]:
        """The fields of the answer as JSON; `is_piece` for an event of a stream."""
        name = "text_completion"
        if self.is_chat:
            name = "chat.completion.chunk" if is_piece else "chat.completion"
        fields = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        shows_metadata = self.metadata and not is_piece
        return fields | ({"metadata": dict(self.metadata)} if shows_metadata else {})


def response(
    heading: Heading,
    completions: Sequence[Completion],
    *,
    num_prompts: int,
    prompts: Sequence[str] = (),
) -> dict[str, Any]:
    """The body of a response from the whole outputs of its choices, ordered by prompt.

    `prompts` are the texts that are kept with the call; see `PromptUse`.
    """
    if heading.form:
        whole: dict[str, Any] = filled(_scores(heading, completions))
        return whole
    if is_pooled(heading.kind):
        return embeddings_response(heading.model, completions, encoding=heading.encoding)
    counts: list[int | None] = []
    kept = _kept_of(completions, num_prompts=num_prompts, prompts=prompts)
    choices = [
        filled(_choice(heading, index, completion, counts, kept=kept[index]))
        for index, completion in enumerate(completions)
    ]
    usage = usage_of(completions, num_prompts=num_prompts, reasoning=counts)
    prompt: dict[str, Any] = filled(_of_prompt(heading, completions[0], of_chat=True))
    whole = {"choices": choices, "usage": usage} | _fingerprint(completions[0]) | prompt
    return heading.fields(is_piece=False) | whole


def written_response(
    heading: Heading,
    completions: Sequence[Completion],
    *,
    num_prompts: int,
    prompts: Sequence[str] = (),
) -> Iterator[str]:
    """Yields the same body as JSON text, in parts that are encoded one at a time."""
    if heading.form:
        yield from written(_scores(heading, completions))
        return
    if is_pooled(heading.kind):
        yield from written_embeddings(heading.model, completions, encoding=heading.encoding)
        return
    yield f'{compact(heading.fields(is_piece=False))[:-1]},"choices":['
    counts: list[int | None] = []
    kept = _kept_of(completions, num_prompts=num_prompts, prompts=prompts)
    for index, completion in enumerate(completions):
        yield "," if index else ""
        yield from written(_choice(heading, index, completion, counts, kept=kept[index]))
    usage = usage_of(completions, num_prompts=num_prompts, reasoning=counts)
    yield f'],"usage":{compact(usage)},{compact(_fingerprint(completions[0]))[1:-1]}'
    for name, tokens in _of_prompt(heading, completions[0], of_chat=True).items():
        yield f',"{name}":'
        yield from written(tokens)
    yield "}"


def usage_of(
    completions: Sequence[Completion], *, num_prompts: int, reasoning: Sequence[int | None] = ()
) -> dict[str, Any]:
    """The tokens of all choices. Each prompt is counted once, with the usage of its first choice.

    `num_prompts` divides the number of completions. `reasoning` has the tokens of each choice that
    are reasoning, None where that is not known. They are told if all are known and any is not 0.
    """
    of_prompts = [one.usage for one in completions[:: len(completions) // num_prompts]]
    num_prompt_tokens = sum(usage.prompt_tokens for usage in of_prompts)
    num_generated = sum(completion.usage.completion_tokens for completion in completions)
    num_reasoning = sum(one or 0 for one in reasoning) if None not in reasoning else 0
    details = {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt_tokens + num_generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in of_prompts)
        },
    } | (details if num_reasoning else {})


def naming_prompt(
    completion: Completion,
    choice: int,
    *,
    num_choices: int,
    num_prompts: int,
    form: ScoreForm = "",
    use: PromptUse = NO_PROMPT,
) -> Completion:
    """The end of a choice. If its prompt was refused, the error's field gets the prompt's index.

    With a single prompt the field stays `body.prompt`, or `body.input` of a vector. Calls for
    scores have other names for it. Of a choice that was refused it gets that choice's index. `use`
    knows the name of a field that the caller did not write.
    """
    error = completion.error
    if error is None:
        return completion
    if error.field not in ("body.prompt", "body.input", "body.pair", "body.choice"):
        return replace(completion, error=replace(error, field=use.field(error.field)))
    prompt, index = divmod(choice, num_choices // num_prompts)
    if error.field == "body.choice":
        named = f"{error.field}.{index}" if form else error.field
    else:
        named = error.field if num_prompts == 1 else f"{error.field}.{prompt}"
    return replace(completion, error=replace(error, field=field_of(form, named)))


def opening(heading: Heading, index: int) -> dict[str, Any]:
    """The first event of a choice of a chat, with the role. Completions have no such event."""
    return _piece(heading, _delta(heading, index, "", role="assistant"))


def piece(heading: Heading, index: int, chunk: TokenChunk, *, kept: str = "") -> dict[str, Any]:
    """The event of one chunk. Text offsets in its log-probabilities start at 0 for each chunk.

    The first chunk has what the answer has of its prompt, whose text may be `kept`. Then iterators
    stand in the place of long lists; see `logprobs.written`.
    """
    text = "" if heading.prompt.is_alone else chunk.text
    if not chunk.start:
        text = heading.prompt.text(kept, chunk.prompt_tokens) + text
    logprobs = _logprobs(heading, chunk, kept=kept)
    choice = _delta(heading, index, text) | logprobs | _token_ids(heading, chunk)
    return _first_piece(heading, index, chunk, choice)


def ending(
    heading: Heading, index: int, completion: Completion, *, kept: str = ""
) -> dict[str, Any]:
    """The last event of a choice: its finish reason, and text held back for stop strings.

    `kept` is the text of an echoed prompt, if no token has come that it could have come with.
    """
    tail = kept + ("" if heading.prompt.is_alone else completion.tail)
    choice = _delta(heading, index, tail)
    if heading.is_chat and not tail:
        choice["delta"] = {}
    choice["finish_reason"] = _finish_reason(heading, completion)
    return _piece(heading, choice) | _fingerprint(completion)


def piece_in_parts(
    heading: Heading, index: int, chunk: TokenChunk, message: MessageStream
) -> dict[str, Any] | None:
    """The event of one chunk of an output that has parts; None if it tells nothing yet.

    `message` has been fed all text before the chunk.
    """
    delta = message.delta(chunk.text, chunk.text_ends)
    if not delta and message.is_plain:
        delta = {"content": ""}
    if not delta and not (chunk.logprobs or chunk.told_prompt) and not heading.has_token_ids:
        return None
    choice = _delta(heading, index, "") | {"delta": delta} | _logprobs(heading, chunk)
    return _first_piece(heading, index, chunk, choice | _token_ids(heading, chunk))


def ending_in_parts(
    heading: Heading, index: int, completion: Completion, message: MessageStream
) -> dict[str, Any]:
    """The last event of a choice that has parts."""
    delta, stop = message.last_delta(completion.tail), _finish_reason(heading, completion)
    if message.has_calls and completion.finish_reason is not FinishReason.LENGTH:
        stop = CALLED
    choice = _delta(heading, index, "") | {"delta": delta, "finish_reason": stop}
    return _piece(heading, choice) | _fingerprint(completion)


def usage_so_far(prompts: Sequence[int], num_generated: int) -> dict[str, Any] | None:
    """The usage in an event of a stream: the tokens of the prompts that are known, and of outputs.

    None while no prompt is known.
    """
    if not prompts:
        return None
    num_prompt = sum(prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


def usage_piece(
    heading: Heading,
    completions: Sequence[Completion],
    *,
    num_prompts: int,
    reasoning: Sequence[int | None] = (),
) -> dict[str, Any]:
    """The event after all choices, for `stream_options.include_usage`; see `usage_of`."""
    usage = usage_of(completions, num_prompts=num_prompts, reasoning=reasoning)
    return heading.fields(is_piece=True) | {"choices": [], "usage": usage}


def _piece(heading: Heading, choice: dict[str, Any]) -> dict[str, Any]:
    return heading.fields(is_piece=True) | {"choices": [choice]}


def _first_piece(
    heading: Heading, index: int, chunk: TokenChunk, choice: dict[str, Any]
) -> dict[str, Any]:
    """The event of a choice; of a chat, that of the first token has the prompt once."""
    if not chunk.prompt_token_ids:
        return _piece(heading, filled(choice))
    event = _piece(heading, choice | _of_prompt(heading, chunk, of_chat=False))
    return event | ({} if index else _of_prompt(heading, chunk, of_chat=True))


def _delta(heading: Heading, index: int, text: str, **more: str) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
    content = {"delta": more | {"content": text}} if heading.is_chat else {"text": text}
    return choice | content


def _scores(heading: Heading, completions: Sequence[Completion]) -> dict[str, Any]:
    fields = {"id": heading.id, "created": heading.created, "model": heading.model}
    return scores_response(
        heading.form,
        fields,
        completions,
        top_n=heading.top_n,
        likelihoods=heading.likelihoods,
    )


def _kept_of(
    completions: Sequence[Completion], *, num_prompts: int, prompts: Sequence[str]
) -> list[str]:
    """The kept text of the prompt of each choice; empty without one."""
    each = len(completions) // num_prompts
    return [prompts[n // each] if prompts else "" for n in range(len(completions))]


def _choice(
    heading: Heading,
    index: int,
    completion: Completion,
    reasoning: list[int | None],
    *,
    kept: str,
) -> dict[str, Any]:
    """One choice. Appends the number of its tokens that are reasoning, if it may have any.

    Iterators stand in the place of long lists; see `logprobs.written`.
    """
    choice: dict[str, Any] = {"index": index} | _logprobs(heading, completion, kept=kept)
    choice["finish_reason"] = _finish_reason(heading, completion)
    if heading.has_parts:
        stream = heading.message_stream(index)
        message = stream.whole(completion.text, completion.text_ends)
        reasoning.append(stream.num_reasoning_tokens)
        choice["message"] = message
        if "tool_calls" in message and completion.finish_reason is not FinishReason.LENGTH:
            choice["finish_reason"] = CALLED
    elif heading.is_chat:
        choice["message"] = {"role": "assistant", "content": completion.text}
    else:
        text = "" if heading.prompt.is_alone else completion.text
        choice["text"] = heading.prompt.text(kept, completion.prompt_tokens) + text
    prompt = _of_prompt(heading, completion, of_chat=False)
    return choice | _token_ids(heading, completion) | prompt


def _token_ids(heading: Heading, output: Completion | TokenChunk) -> dict[str, Any]:
    if not heading.has_token_ids:
        return {}
    return {"token_ids": [] if heading.prompt.is_alone else list(output.token_ids)}


def _logprobs(
    heading: Heading, output: Completion | TokenChunk, *, kept: str = ""
) -> dict[str, Any]:
    """The log-probabilities of the output, after those of an echoed prompt."""
    if not output.logprobs:
        return {"logprobs": None}
    if heading.is_chat:
        return {"logprobs": columns_of_chat(output.logprobs)}
    before = output.prompt_tokens if heading.prompt.is_echoed else ()
    after = () if heading.prompt.is_alone else output.logprobs
    echoed = kept if before and heading.prompt.is_kept else None
    columns = columns_of_completion((*before, *after), echoed=echoed, ends=output.text_ends)
    return {"logprobs": columns}


def _of_prompt(
    heading: Heading, output: Completion | TokenChunk, *, of_chat: bool
) -> dict[str, Any]:
    """What is told of a prompt: of completions with each choice, of a chat once with the answer.

    Empty if this place is that of the other kind. The ids are null if the log does not have them:
    its worker was of an earlier version.
    """
    if heading.is_chat is not of_chat:
        return {}
    told: dict[str, Any] = {}
    if heading.prompt.has_logprobs:
        told["prompt_logprobs"] = columns_of_prompt(output.prompt_tokens)
    if heading.has_token_ids:
        told["prompt_token_ids"] = list(output.prompt_token_ids) or None
    return told


def _fingerprint(completion: Completion) -> dict[str, Any]:
    """The engine that ended an output; null if no engine did, or one of an earlier version."""
    return {"system_fingerprint": completion.fingerprint or None}


def _finish_reason(heading: Heading, completion: Completion) -> str:
    if heading.prompt.is_alone:
        return "length"
    return "length" if completion.finish_reason is FinishReason.LENGTH else "stop"
