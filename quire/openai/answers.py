"""Bodies of OpenAI's responses: whole responses, and the events of a stream.

Pure functions from completions and chunks to JSON, for batch files and for the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.openai.likelihoods import LikelihoodForm
from quire.openai.logprobs import compact, of_chat, of_completion, written
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
    created: int
    model: str
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
        """These fields as JSON; `is_piece` for an event of a stream."""
        name = "text_completion"
        if self.is_chat:
            name = "chat.completion.chunk" if is_piece else "chat.completion"
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}


def response(
    heading: Heading, completions: Sequence[Completion], *, num_prompts: int
) -> dict[str, Any]:
    """The body of a response from the whole outputs of its choices, ordered by prompt."""
    if heading.form:
        return _scores(heading, completions)
    if is_pooled(heading.kind):
        return embeddings_response(heading.model, completions, encoding=heading.encoding)
    counts: list[int | None] = []
    choices = [_choice(heading, *item, counts) for item in enumerate(completions)]
    usage = usage_of(completions, num_prompts=num_prompts, reasoning=counts)
    return heading.fields(is_piece=False) | {"choices": choices, "usage": usage}


def written_response(
    heading: Heading, completions: Sequence[Completion], *, num_prompts: int
) -> Iterator[str]:
    """Yields the same body as JSON text, in parts that are encoded one at a time."""
    if heading.form:
        yield compact(_scores(heading, completions))
        return
    if is_pooled(heading.kind):
        yield from written_embeddings(heading.model, completions, encoding=heading.encoding)
        return
    yield f'{compact(heading.fields(is_piece=False))[:-1]},"choices":['
    counts: list[int | None] = []
    for index, completion in enumerate(completions):
        choice = _choice(heading, index, replace(completion, logprobs=()), counts)
        if completion.logprobs:
            del choice["logprobs"]
            yield f'{compact(choice)[:-1]},"logprobs":'
            yield from written(completion.logprobs, is_chat=heading.is_chat)
            yield "}"
        else:
            yield compact(choice)
        yield "," if index < len(completions) - 1 else ""
    usage = usage_of(completions, num_prompts=num_prompts, reasoning=counts)
    yield f'],"usage":{compact(usage)}}}'


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
    completion: Completion, choice: int, *, num_choices: int, num_prompts: int, form: ScoreForm = ""
) -> Completion:
    """The end of a choice. If its prompt was refused, the error's field gets the prompt's index.

    With a single prompt the field stays `body.prompt`, or `body.input` of a vector. Calls for
    scores have other names for it. Of a choice that was refused it gets that choice's index.
    """
    error = completion.error
    fields = ("body.prompt", "body.input", "body.pair", "body.choice")
    if error is None or error.field not in fields:
        return completion
    prompt, index = divmod(choice, num_choices // num_prompts)
    if error.field == "body.choice":
        named = f"{error.field}.{index}" if form else error.field
    else:
        named = error.field if num_prompts == 1 else f"{error.field}.{prompt}"
    return replace(completion, error=replace(error, field=field_of(form, named)))


def opening(heading: Heading, index: int) -> dict[str, Any]:
    """The first event of a choice of a chat, with the role. Completions have no such event."""
    return _piece(heading, _delta(heading, index, "", role="assistant"))


def piece(heading: Heading, index: int, chunk: TokenChunk) -> dict[str, Any]:
    """The event of one chunk. Text offsets in its log-probabilities start at 0 for each chunk."""
    choice = _delta(heading, index, chunk.text)
    if chunk.logprobs:
        choice["logprobs"] = (of_chat if heading.is_chat else of_completion)(chunk.logprobs)
    return _piece(heading, choice | _token_ids(heading, chunk))


def ending(heading: Heading, index: int, completion: Completion) -> dict[str, Any]:
    """The last event of a choice: its finish reason, and text held back for stop strings."""
    choice = _delta(heading, index, completion.tail)
    if heading.is_chat and not completion.tail:
        choice["delta"] = {}
    return _piece(heading, choice | {"finish_reason": _finish_reason(completion)})


def piece_in_parts(
    heading: Heading, index: int, chunk: TokenChunk, message: MessageStream
) -> dict[str, Any] | None:
    """The event of one chunk of an output that has parts; None if it tells nothing yet.

    `message` has been fed all text before the chunk.
    """
    delta = message.delta(chunk.text, chunk.text_ends)
    if not delta and message.is_plain:
        delta = {"content": ""}
    if not delta and not chunk.logprobs and not heading.has_token_ids:
        return None
    choice = _delta(heading, index, "") | {"delta": delta}
    if chunk.logprobs:
        choice["logprobs"] = of_chat(chunk.logprobs)
    return _piece(heading, choice | _token_ids(heading, chunk))


def ending_in_parts(
    heading: Heading, index: int, completion: Completion, message: MessageStream
) -> dict[str, Any]:
    """The last event of a choice that has parts."""
    delta, stop = message.last_delta(completion.tail), _finish_reason(completion)
    if message.has_calls and completion.finish_reason is not FinishReason.LENGTH:
        stop = CALLED
    return _piece(heading, _delta(heading, index, "") | {"delta": delta, "finish_reason": stop})


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


def _choice(
    heading: Heading, index: int, completion: Completion, reasoning: list[int | None]
) -> dict[str, Any]:
    """One choice. Appends the number of its tokens that are reasoning, if it may have any."""
    choice: dict[str, Any] = {"index": index, "logprobs": None}
    choice["finish_reason"] = _finish_reason(completion)
    if completion.logprobs:
        choice["logprobs"] = (of_chat if heading.is_chat else of_completion)(completion.logprobs)
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
        choice["text"] = completion.text
    return choice | _token_ids(heading, completion)


def _token_ids(heading: Heading, output: Completion | TokenChunk) -> dict[str, Any]:
    return {"token_ids": list(output.token_ids)} if heading.has_token_ids else {}


def _finish_reason(completion: Completion) -> str:
    return "length" if completion.finish_reason is FinishReason.LENGTH else "stop"
