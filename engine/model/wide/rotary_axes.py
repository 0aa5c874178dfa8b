"""Positions of time, height and width, for rotary embeddings that divide their angles among them.

Knows no model. A token of text has one position on all three axes. Those of a picture have their
places in its grid, and the text behind it goes on after the longest side: its rotary positions are
smaller than its places in the cache. All are a function of the prompt's pictures alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Grid(NamedTuple):
    """The places of a picture's tokens, from `start` on: time, then height, then width."""

    start: int
    time: int
    height: int
    width: int

    @property
    def end(self) -> int:
        return self.start + self.time * self.height * self.width


def rotary_positions(grids: Sequence[Grid], start: int, end: int) -> IntArray:
    """The positions [3, end - start] of the tokens `start .. end - 1` of a prompt.

    Source: `get_rope_index` of Qwen2-VL in transformers, after "Qwen2-VL: Enhancing Vision-Language
    Model's Perception of the World at Any Resolution" (2024), https://arxiv.org/abs/2409.12191.
    """
    places = np.arange(start, end)
    found = np.tile(places, (3, 1))
    saved = 0
    for grid in grids:
        inside = (places >= grid.start) & (places < grid.end)
        index = places[inside] - grid.start
        rows = index // grid.width
        axes = rows // grid.height, rows % grid.height, index % grid.width
        found[:, inside] = np.stack(axes) + grid.start - saved
        saved += grid.end - grid.start - max(grid.height, grid.width)
        behind = places >= grid.end
        found[:, behind] = places[behind] - saved
    return found
