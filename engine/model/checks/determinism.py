"""Checks batch invariance at start: do a token's logits depend on what is computed beside it?

Knows no form of a model. A library may sum in another order for three rows than for thirty. A
request that is batched, chunked, preempted or taken over differently may then get another token
where two are nearly equally likely. So no kernel is trusted: the model that will serve is run with
its own shapes, alone, beside others and in chunks of many sizes, at the beginning of a text and far
into it, and every logit must be the same bit for bit.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import torch

from engine.model.causal_model import CausalModel
from engine.model.checks.rehearsal import Rehearsal, Step, prompt_of

#: Lengths of the compared prompts: within a block, across its end, and of a few blocks.
PROMPT_LENGTHS = (1, 3, 17, 26, 40)
#: Sizes of chunks, taken in turns, so that the matrix products get many numbers of rows.
CHUNK_LENGTHS = (1, 5, 2, 16, 3, 1, 1, 9)
#: Cached tokens before the prompts: several of the spans in which attention processes keys.
CONTEXT_LENGTH = 600
#: Also as many as each layer's window has, so that it leaves keys out; windows up to this many.
LONGEST_WINDOW = 8192
#: Length of a further prompt after cached tokens: another order of summing shows in few tokens.
LENGTH_BEHIND = 100
#: Numbers of rows are padded to a multiple of one of these, tried in this order, and at last of the
#: largest step's size, so that all steps have the same one.
MULTIPLES = (1, 16)

logger = logging.getLogger(__name__)


class NotInvariant(Exception):
    """A token's logits depend on its neighbours; says beside what they changed."""


@dataclass(frozen=True, slots=True)
class _Company:
    """One way to compute the prompts, and perhaps others beside them.

    Args:
        beside: lengths of the others.
        steps: how many tokens of each prompt and then of each other one.
    """

    name: str
    beside: tuple[int, ...]
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
    """The smallest multiple, as in `compute_logits`, that makes tokens independent of each other.

    `windows` are the sliding windows of the model's layers: keys a token sees, itself included.

    Raises:
        NotInvariant: no multiple does.
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
    """Compare every logit of some prompts computed alone with those computed in other ways.

    Where there are `adapters`, the prompts take them in turns, and one of them has none.

    Raises:
        NotInvariant: a bit differs.
    """
    longest = min(max_model_len - rehearsal.num_cached, max_num_batched_tokens)
    lengths = [length for length in PROMPT_LENGTHS if length <= longest]
    has_room = longest >= LENGTH_BEHIND and sum(lengths) + LENGTH_BEHIND <= max_num_batched_tokens
    if rehearsal.num_cached and has_room:
        lengths.append(LENGTH_BEHIND)
    prompts = [prompt_of(length, model.vocab_size) for length in lengths]
    names = (None, *adapters)
    expected = rehearsal.logits(model, prompts, _one_by_one(lengths), adapters=names)
    for company in _companies(lengths, longest=longest, budget=max_num_batched_tokens):
        beside = [prompt_of(length, model.vocab_size) for length in company.beside]
        found = rehearsal.logits(model, [*prompts, *beside], company.steps, adapters=names)
        for length, first, second in zip(lengths, expected, found, strict=False):
            if not torch.equal(first, second):
                behind = f" behind {rehearsal.num_cached} others" if rehearsal.num_cached else ""
                raise NotInvariant(
                    f"{model.name} with {rehearsal.backend.name} attention, rows in multiples of "
                    f"{rehearsal.multiple}: the logits of a prompt of {length} tokens{behind} "
                    f"change {company.name}"
                )


def _contexts(windows: Sequence[int], *, max_model_len: int, block_size: int) -> list[int]:
    """Numbers of cached tokens to check with: 0, and whole blocks as far as the model has room.

    The cheapest come first.
    """
    wanted = [CONTEXT_LENGTH, *(window for window in windows if window <= LONGEST_WINDOW)]
    longest = max(LENGTH_BEHIND, *PROMPT_LENGTHS)
    most = max(0, max_model_len - longest) // block_size
    return sorted({0, *(block_size * min(-(-length // block_size), most) for length in wanted)})


def _companies(lengths: Sequence[int], *, longest: int, budget: int) -> Iterator[_Company]:
    """The ways to compute the prompts, the cheapest first."""
    all_but_last = [length - 1 for length in lengths]
    steps = [step for step in _one_by_one(all_but_last) if any(step)]
    yield _Company("as the next of a text", (), [*steps, *_one_by_one([1] * len(lengths))])
    yield _Company("in chunks", (), list(_chunks(lengths)))
    room = budget - sum(lengths)
    if room < 0:
        return
    beside = [longest] * (room // longest)
    if room % longest:
        beside.append(room % longest)
    yield _Company("in a full step", tuple(beside), [[*lengths, *beside]])


def _one_by_one(lengths: Sequence[int]) -> list[Step]:
    """A step for each prompt."""
    return [
        [length if place == index else 0 for place in range(len(lengths))]
        for index, length in enumerate(lengths)
    ]


def _chunks(lengths: Sequence[int]) -> Iterator[Step]:
    """All prompts at once, each in chunks of other sizes, until the last has ended."""
    sizes = cycle(CHUNK_LENGTHS)
    left = list(lengths)
    while any(left):
        step = [min(length, next(sizes)) for length in left]
        left = [length - size for length, size in zip(left, step, strict=True)]
        yield step
