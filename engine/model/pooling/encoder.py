"""Encoders of transformers: a step is several whole prompts, one after the other, without padding.

Knows no architecture by name. The model's own forward pass runs on the concatenated prompts as a
batch of one; the attention function that we register computes each prompt alone. A model for which
that gives other hidden states than its own forward pass on each prompt alone, as found at load, is
computed by its own attention, prompts of equal length together.
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.nn.functional as functional
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from engine.errors import ModelRefused
from engine.model.pooling.folder import PoolingMode

#: The value of `attn_implementation`. No mask function has this name, so no masks are built.
PACKED_NAME = "quire_packed"
#: Options of an attention call that change nothing, or are computed here.
KNOWN_OPTIONS = frozenset({"scaling", "dropout", "is_causal", "position_ids", "use_cache"})
#: The largest relative error of a hidden state of the packed form: rounding explains no more.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
#: Lengths of the prompts of the check at load; unsorted, and two of them equal.
CHECKED_LENGTHS = (7, 3, 12, 3, 1)

logger = logging.getLogger(__name__)


class NotPacked(Exception):
    """This model cannot be computed with packed prompts; the message says why."""


class Prompts:
    """Prompts of one step, sorted by length: tokens one after the other, and where each begins.

    `order` are the indices of the given prompts in the order in which they are here.
    """

    def __init__(self, given: Sequence[Sequence[int]], seconds: Sequence[int | None]) -> None:
        self.order = sorted(range(len(given)), key=lambda index: len(given[index]))
        self.token_ids = [given[index] for index in self.order]
        self.seconds = [seconds[index] for index in self.order]
        self.lengths = [len(one) for one in self.token_ids]

    def groups(self) -> list[tuple[int, int]]:
        """The number of prompts and the length of each run of equal lengths."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths)]

    def types(self) -> list[list[int]]:
        """For each token whether it is of the second text of a pair, 0 or 1."""
        return [
            [int(second is not None and place >= second) for place in range(length)]
            for second, length in zip(self.seconds, self.lengths, strict=True)
        ]


class Form(Protocol):
    """Computes the hidden states of the prompts, [tokens, hidden]."""

    name: str

    def __call__(self, prompts: Prompts) -> torch.Tensor:
        """The states in the order of the prompts."""
        ...


class OwnForm:
    """The model's own forward pass, on prompts of equal length together."""

    name = "own"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._takes_types = _takes(model, "token_type_ids")

    def __call__(self, prompts: Prompts) -> torch.Tensor:
        found, first, types = [], 0, prompts.types()
        device = self._model.device
        for count, length in prompts.groups():
            part = slice(first, first + count)
            ids = torch.tensor(prompts.token_ids[part], device=device).view(count, length)
            options: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
            if self._takes_types:
                options["token_type_ids"] = torch.tensor(types[part], device=device)
            hidden = self._model(input_ids=ids, return_dict=True, **options).last_hidden_state
            found.append(hidden.flatten(0, 1))
            first += count
        return torch.cat(found)


class Classifier:
    """A model with a classification head: the scores [prompts, labels] of whole prompts.

    The head is part of the model's own forward pass, so prompts of equal length are computed
    together.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._takes_types = _takes(model, "token_type_ids")

    def __call__(self, prompts: Prompts) -> torch.Tensor:
        found, first, types = [], 0, prompts.types()
        device = self._model.device
        # A decoder finds the last token of each prompt by its padding token, if there are several.
        can_batch = getattr(self._model.config, "pad_token_id", None) is not None
        for count, _ in prompts.groups():
            for start in range(first, first + count, count if can_batch else 1):
                part = slice(start, start + count if can_batch else start + 1)
                ids = torch.tensor(prompts.token_ids[part], device=device)
                options: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
                if self._takes_types:
                    options["token_type_ids"] = torch.tensor(types[part], device=device)
                found.append(self._model(input_ids=ids, return_dict=True, **options).logits)
            first += count
        scores = torch.cat(found).float()
        back = torch.empty_like(scores)
        back[torch.tensor(prompts.order, device=device)] = scores
        return back


class PackedForm:
    """The model's forward pass on all prompts as one, with our attention.

    Args:
        offset: the position of the first token of a prompt; some families begin behind the id of
            their padding token.
    """

    name = "packed"

    def __init__(self, model: PreTrainedModel, *, offset: int) -> None:
        if not _takes(model, "position_ids"):
            raise NotPacked("it takes no position_ids")
        self._model = model
        self._offset = offset
        self._takes_types = _takes(model, "token_type_ids")

    def __call__(self, prompts: Prompts) -> torch.Tensor:
        device = self._model.device
        places = [torch.arange(length) for length in prompts.lengths]
        options: dict[str, Any] = {}
        if self._takes_types:
            types = [one for each in prompts.types() for one in each]
            options["token_type_ids"] = torch.tensor([types], device=device)
        ids = [token for one in prompts.token_ids for token in one]
        token = _groups.set(prompts.groups())
        try:
            output = self._model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=(torch.cat(places) + self._offset)[None].to(device),
                return_dict=True,
                **options,
            )
        finally:
            _groups.reset(token)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


def choose_form(model: PreTrainedModel) -> Form:
    """The packed form if it computes the same as the model's own pass, which serves otherwise.

    Raises:
        ModelRefused: the model cannot be computed at all.
    """
    prompts = _checked_prompts(model)
    _set_attention(model, "sdpa")
    own = OwnForm(model)
    try:
        expected = own(prompts)
    except Exception as error:
        raise ModelRefused(f"{type(model).__name__} cannot be computed: {error}") from error
    try:
        _set_attention(model, PACKED_NAME)
        form = PackedForm(model, offset=first_position(model))
        distance = relative_error(form(prompts), expected)
        if distance <= TOLERANCES[model.dtype]:
            return form
        reason = f"they are off by {distance:.1e}"
    except Exception as error:  # noqa: BLE001 - whatever it is, the model's own pass serves.
        reason = repr(error)
    logger.info("%s: prompts are not packed: %s", type(model).__name__, reason)
    _set_attention(model, "sdpa")
    return own


def num_embeddings(model: PreTrainedModel) -> int:
    """The number of token ids that may be an input."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return len(weight)


def first_position(model: PreTrainedModel) -> int:
    """The position of a prompt's first token: some families begin behind that of padding."""
    embeddings = getattr(model, "embeddings", None)
    padding = getattr(embeddings, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def pooled(hidden: torch.Tensor, prompts: Prompts, mode: PoolingMode) -> torch.Tensor:
    """[prompts, hidden] in float32, in the order in which the prompts were given."""
    lengths = torch.tensor(prompts.lengths, device=hidden.device)
    ends = lengths.cumsum(0)
    if mode == "cls":
        found = hidden[ends - lengths]
    elif mode == "lasttoken":
        found = hidden[ends - 1]
    else:
        found = torch.segment_reduce(hidden.float(), mode, lengths=lengths)
    back = torch.empty_like(found, dtype=torch.float32)
    back[torch.tensor(prompts.order, device=hidden.device)] = found.float()
    return back


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance of a token's state from the expected one, relative to its length."""
    distances = (found.float() - expected.float()).norm(dim=-1)
    return float((distances / expected.float().norm(dim=-1)).max())


def _checked_prompts(model: PreTrainedModel) -> Prompts:
    limit = getattr(model.config, "max_position_embeddings", None) or max(CHECKED_LENGTHS)
    num_tokens = num_embeddings(model)
    padding = getattr(model.config, "pad_token_id", None)
    usable = [id_ for id_ in range(min(num_tokens, 1 << 12)) if id_ != padding]
    given = [
        [usable[(7919 * place + length) % len(usable)] for place in range(min(length, limit - 2))]
        for length in CHECKED_LENGTHS
    ]
    return Prompts([one for one in given if one], [None] * len([one for one in given if one]))


def _takes(model: PreTrainedModel, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _set_attention(model: PreTrainedModel, name: str) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


#: The lengths of the prompts of the pass that runs: pairs of a count and a length.
_groups: ContextVar[Sequence[tuple[int, int]]] = ContextVar("quire_packed_groups")


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """[1, tokens, heads, dim] from [1, heads, tokens, dim]: each prompt attends to itself."""
    _check_call(module, query, key, mask, options)
    heads, num_tokens = query.shape[1], query.shape[2]
    # Written in place of torch.cat: a third of the time of short prompts.
    found = query.new_empty(1, num_tokens, heads, value.shape[-1])
    first = 0
    for count, length in _groups.get():
        part = slice(first, first + count * length)
        shape = (count, length)
        q, k, v = (
            one[0, :, part].reshape(heads, *shape, -1).transpose(0, 1)
            for one in (query, key, value)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, scale=options.get("scaling"))
        found[0, part].view(count, length, heads, -1).copy_(attended.transpose(1, 2))
        first += count * length
    return found, None


def _check_call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    options: Mapping[str, Any],
) -> None:
    """NotPacked for what this attention does not compute."""
    given = {name for name, value in options.items() if value is not None and value is not False}
    others = sorted(given - KNOWN_OPTIONS)
    if mask is not None or others or key.shape != query.shape:
        raise NotPacked(f"{type(module).__name__} has a mask, or {others}, or groups of heads")
    if options.get("is_causal") or getattr(module, "is_causal", False):
        raise NotPacked(f"{type(module).__name__} looks at earlier tokens only")


# Registered once: the function has no state of its own.
AttentionInterface.register(PACKED_NAME, _attend)
