# Generated from SamplingParams by `python -m ops.pages.sampling_types`: change that class.
"""The sampling parameters as keyword arguments, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class SamplingFields(TypedDict, total=False):
    """The fields of SamplingParams, each with the type that a caller may give."""

    #: The most tokens of the output; unset: the rest of the context, or what the queue sets.
    max_tokens: int | None
    #: No end-of-sequence token, stop token or stop string ends the output earlier.
    min_tokens: int
    #: 0 takes the likeliest token; the higher, the more random is the choice.
    temperature: float
    #: Sample from this many of the likeliest tokens; 0 and -1 keep all.
    top_k: int
    #: Sample from the likeliest tokens that together reach this probability; 1 keeps all.
    top_p: float
    #: Drop tokens less likely than this share of the likeliest one's probability.
    min_p: float
    #: Above 1, tokens that prompt or output already have become less likely.
    repetition_penalty: float
    #: Subtracted once from the logit of each token that the output has.
    presence_penalty: float
    #: Subtracted from a token's logit for each time that the output has it.
    frequency_penalty: float
    #: The only tokens that may be sampled; every token if left out.
    allowed_token_ids: Sequence[int]
    #: Token id to the number added to its logit. Keys in a body are decimal strings.
    logit_bias: Mapping[int, float]
    #: The output is JSON that this schema accepts. At most one of the five constraints.
    json_schema: type[Any] | Mapping[str, Any] | None
    #: The output is a JSON object.
    json_object: bool
    #: The whole output matches this regular expression.
    regex: str | None
    #: The output is one of these texts.
    choice: Sequence[str]
    #: The output follows this grammar, in the syntax of Lark.
    grammar: str | None
    #: In JSON, white space as `json.dumps` writes (`none`, which clients set), or `any`.
    json_whitespace: Literal["none", "any"] | None
    #: Seed of the noise. The client draws one at submit, so that a takeover has the same seed.
    seed: int | None
    #: Publish each token's log-probability, and those of this many likeliest; unset: none.
    logprobs: int | None
    #: The same of each token of the prompt, for its place in the prompt; unset: none.
    prompt_logprobs: int | None
    #: Texts that end the output.
    stop: str | Sequence[str]
    #: Tokens that end the output.
    stop_token_ids: Sequence[int]
    #: Do not end at the model's end-of-sequence token.
    ignore_eos: bool
    #: Keep the stop string that ended the output in its text.
    include_stop_str_in_output: bool
    #: Leave the model's control tokens out of the text.
    skip_special_tokens: bool
