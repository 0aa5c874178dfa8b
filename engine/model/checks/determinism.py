"""Checks batch invariance at start: a token's logits must not depend on other tokens of the step.

Works for every path. A library may sum in another order for three rows than for thirty. If two
tokens are nearly equally likely, a request could then get another token when it is batched,
chunked, preempted or taken over differently. So no kernel is trusted: the model that will serve is
run with its own shapes, alone, beside other prompts and in chunks of many sizes, at the beginning
of a text and after a long context. Every logit must be the same, bit for bit.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import torch

from engine.model.causal_model import CausalModel
from engine.model.checks.rehearsal import Rehearsal, Step, prompt_of

#: Lengths of the compared prompts: within a block, across a block's end, and several blocks.
PROMPT_LENGTHS = (1, 3, 17, 26, 40)
#: Sizes of chunks, used in rotation, so that matrix products get many different numbers of rows.
CHUNK_LENGTHS = (1, 5, 2, 16, 3, 1, 1, 9)
#: Cached tokens before the prompts: several of the spans in which attention processes keys.
CONTEXT_LENGTH = 600
#: For each sliding window up to this length, a context of its length is checked too, so that the
#: window excludes keys.
LONGEST_WINDOW = 8192
#: Length of an additional prompt after cached tokens: another order of sums changes only few
#: tokens, so many are compared.
LENGTH_BEHIND = 100
#: Numbers of rows are padded to a multiple of one of these, tried in this order. The last candidate
#: is the size of the largest step: then all steps have the same number of rows.
MULTIPLES = (1, 16)

logger = logging.getLogger(__name__)


class NotInvariant(Exception):
    """A token's logits depend on other tokens of the step; the message says in which case."""


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """One way to compute the prompts, possibly with other prompts in the same steps.

    Args:
        name: completes the sentence "the logits change ...".
        others: lengths of the other prompts.
        steps: for each step, the number of tokens of each prompt and then of each other prompt.
    """

    name: str
    others: tuple[int, ...]
    steps: Sequence[Step]


def invariant_multiple(
    model: CausalModel,
    rehearsal: Rehearsal,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    windows: Sequence[int] = (),
    adapters: Sequence[str] = (),
) -> int:
    """The smallest multiple, as in `compute_logits`, with which tokens do not depend on each other.

    `windows` are the sliding windows of the model's layers: the number of keys a token sees, itself
    included.

    Raises:
        NotInvariant: tokens depend on each other with every multiple.
    """
    contexts = _contexts(windows, max_model_len=max_model_len, block_size=rehearsal.block_size)
    smaller = (multiple for multiple in MULTIPLES if multiple < max_num_batched_tokens)
    reason: NotInvariant | None = None
    for multiple in (*smaller, max_num_batched_tokens):
        try:
            for context in contexts:
                check_invariance(
                    model,
                    replace(rehearsal, multiple=multiple, num_cached=context),
                    max_model_len=max_model_len,
                    max_num_batched_tokens=max_num_batched_tokens,
                    adapters=adapters,
                )
        except NotInvariant as found:
            logger.info("%s", found)
            reason = found
        else:
            return multiple
    assert reason is not None
    raise reason


def check_invariance(
    model: CausalModel,
    rehearsal: Rehearsal,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    adapters: Sequence[str] = (),
) -> None:
    """Compare every logit of prompts computed alone with those of all other arrangements.

    With `adapters`, the prompts use no adapter and each of the adapters in rotation.

    Raises:
        NotInvariant: a bit of a logit differs.
    """
    longest = min(max_model_len - rehearsal.num_cached, max_num_batched_tokens)
    lengths = [length for length in PROMPT_LENGTHS if length <= longest]
    has_room = longest >= LENGTH_BEHIND and sum(lengths) + LENGTH_BEHIND <= max_num_batched_tokens
    if rehearsal.num_cached and has_room:
        lengths.append(LENGTH_BEHIND)
    prompts = [prompt_of(length, model.vocab_size) for length in lengths]
    names = (None, *adapters)
    expected = rehearsal.logits(model, prompts, _one_by_one(lengths), adapters=names)
    for arrangement in _arrangements(lengths, longest=longest, budget=max_num_batched_tokens):
        others = [prompt_of(length, model.vocab_size) for length in arrangement.others]
        found = rehearsal.logits(model, [*prompts, *others], arrangement.steps, adapters=names)
        for length, first, second in zip(lengths, expected, found, strict=False):
            if not torch.equal(first, second):
                cached = rehearsal.num_cached
                after = f" after {cached} cached ones" if cached else ""
                raise NotInvariant(
                    f"{model.name} with {rehearsal.backend.name} attention, rows in multiples of "
                    f"{rehearsal.multiple}: the logits of a prompt of {length} tokens{after} "
                    f"change {arrangement.name}"
                )


def _contexts(windows: Sequence[int], *, max_model_len: int, block_size: int) -> list[int]:
    """The numbers of cached tokens to check with, ascending, so that the cheapest comes first.

    These are 0 and multiples of the block size, as far as the model's length allows.
    """
    wanted = [CONTEXT_LENGTH, *(window for window in windows if window <= LONGEST_WINDOW)]
    longest = max(LENGTH_BEHIND, *PROMPT_LENGTHS)
    most = max(0, max_model_len - longest) // block_size
    return sorted({0, *(block_size * min(-(-length // block_size), most) for length in wanted)})


def _arrangements(lengths: Sequence[int], *, longest: int, budget: int) -> Iterator[_Arrangement]:
    """The arrangements to compare, the cheapest first."""
    all_but_last = [length - 1 for length in lengths]
    steps = [step for step in _one_by_one(all_but_last) if any(step)]
    yield _Arrangement(
        "if its last token is a decode", (), [*steps, *_one_by_one([1] * len(lengths))]
    )
    yield _Arrangement("in chunks", (), list(_chunks(lengths)))
    room = budget - sum(lengths)
    if room < 0:
        return
    others = [longest] * (room // longest)
    if room % longest:
        others.append(room % longest)
    yield _Arrangement("in a full step", tuple(others), [[*lengths, *others]])


def _one_by_one(lengths: Sequence[int]) -> list[Step]:
    """One step for each prompt."""
    return [
        [length if other == index else 0 for other in range(len(lengths))]
        for index, length in enumerate(lengths)
    ]


def _chunks(lengths: Sequence[int]) -> Iterator[Step]:
    """Steps with a chunk of every unfinished prompt, in varying sizes."""
    sizes = cycle(CHUNK_LENGTHS)
    left = list(lengths)
    while any(left):
        step = [min(length, next(sizes)) for length in left]
        left = [length - size for length, size in zip(left, step, strict=True)]
        yield step
