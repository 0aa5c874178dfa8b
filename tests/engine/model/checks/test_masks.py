"""Only causal masks and sliding windows are served; every other mask is found and refused."""

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from engine.errors import ModelRefused
from engine.model.checks.probe import MAX_PROBED_POSITION, _window_of

CPU = torch.device("cpu")
LENGTH = 96
#: Longer than what is probed key by key.
LONG = 4 * MAX_PROBED_POSITION


def chunked(size: int):
    return chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))


def prefix(length: int):
    return or_masks(causal_mask_function, lambda batch, head, query, key: key < length)


def sinks(count: int, window: int):
    return or_masks(
        sliding_window_causal_mask_function(window),
        and_masks(causal_mask_function, lambda batch, head, query, key: key < count),
    )


def strided(step: int):
    def own(batch, head, query, key):
        return (query - key) % step == 0

    return and_masks(causal_mask_function, own)


def in_blocks(size: int):
    blocks = torch.arange(LENGTH)[None] // size
    return or_masks(causal_mask_function, blockwise_overlay(blocks))


@pytest.mark.parametrize(
    ("mask", "length", "window"),
    [
        (causal_mask_function, LENGTH, None),
        (causal_mask_function, LONG, None),
        (sliding_window_causal_mask_function(7), LENGTH, 7),
        (sliding_window_causal_mask_function(7), LONG, 7),
        (sliding_window_causal_mask_function(LENGTH), LENGTH, None),
        (chunked(LENGTH), LENGTH, None),
        (chunked(LONG), LONG, None),
        (chunked(1), LENGTH, 1),
    ],
)
def test_a_mask_that_is_causal_or_a_window_is_served(mask, length, window):
    assert _window_of(mask, length, CPU) == window


REFUSED = {
    "a chunk one token short": (chunked(LENGTH - 1), LENGTH),
    "small chunks": (chunked(8), LENGTH),
    "chunks that divide the length": (chunked(LENGTH // 2), LENGTH),
    "chunks longer than what is probed": (chunked(2 * MAX_PROBED_POSITION), LONG),
    "windows longer than what is probed": (
        sliding_window_causal_mask_function(2 * MAX_PROBED_POSITION),
        LONG,
    ),
    "a prefix that sees itself": (prefix(16), LENGTH),
    "a window in both directions": (sliding_window_bidirectional_mask_function(7), LENGTH),
    "sinks before a window": (sinks(4, 16), LENGTH),
    "every third key": (strided(3), LENGTH),
    "blocks that see themselves": (in_blocks(16), LENGTH),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_every_other_mask_is_refused(kind):
    mask, length = REFUSED[kind]
    with pytest.raises(ModelRefused, match=r"see something other than all earlier|depends on more"):
        _window_of(mask, length, CPU)
