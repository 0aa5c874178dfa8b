"""The rows of a step as a recurrence needs them: which token comes after which, and their states.

Knows no model. Rows are ordered by length, longest first, so that the rows that still have a token
are always the first ones: a scan computes the n-th tokens of all of them at once.
"""

from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np
import torch

from engine.cache.state_tags import IntArray, Turn
from engine.model.device.transfer import to_device
from engine.model.kernels.recurrent import Convolution, RowsStruct

#: From the states [rows, ...] and the inputs [rows, ...] of one token each to the new states and
#: the outputs.
Update = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class RecurrentRows:
    """The rows of one step, for all layers; `state` tensors have one row for each, in its order.

    Args:
        query_lens: [rows], the number of tokens of each row; the step has them one after the other.
        turn: the buffers that the rows read and write.
    """

    def __init__(self, query_lens: IntArray, turn: Turn, device: torch.device) -> None:
        assert query_lens.all(), "a row has at least one token"
        order = np.argsort(-query_lens, kind="stable")
        self._lens: IntArray = query_lens[order]
        self._offsets: IntArray = (np.cumsum(query_lens) - query_lens)[order]
        self._device = device
        #: The buffers in the order of the step's rows.
        self.turn = turn
        self._turn = Turn(turn.reads[order], turn.writes[order], turn.ends[order])
        self.reads = to_device(self._turn.reads, device)
        self.writes = to_device(self._turn.writes, device)
        self._windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def _counts(self) -> list[int]:
        """For each n, how many rows have an n-th token."""
        return [int(np.count_nonzero(self._lens > n)) for n in range(int(self._lens[0]))]

    @cached_property
    def _tokens(self) -> torch.Tensor:
        """The first tokens of all rows, then their second ones, and so on."""
        tokens = [self._offsets[:count] + n for n, count in enumerate(self._counts)]
        return to_device(np.concatenate(tokens), self._device)

    @cached_property
    def struct(self) -> RowsStruct:
        """The same rows for the kernels."""
        return RowsStruct.of(self._lens, self._offsets, self._turn.reads, self._turn.writes)

    @cached_property
    def begins(self) -> torch.Tensor:
        """[tokens], True for the first token of a request."""
        found = np.zeros(int(self._lens.sum()), dtype=np.bool_)
        found[self._offsets[self._turn.ends == self._lens]] = True
        return to_device(found, self._device)

    def scan(
        self, update: Update, state: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Update the states token by token; returns the outputs [tokens, ...] and the new states.

        `update` gets the states of some rows and the inputs [tokens, ...] of one token of each. It
        must compute each row by itself.
        """
        if len(self._counts) == 1:
            # Every row has one token, so the order of the rows is that of the step.
            new, outputs = update(state, *inputs)
            return outputs, new
        state = state.clone()
        ordered = [each.index_select(0, self._tokens) for each in inputs]
        found, first = [], 0
        for count in self._counts:
            part = (each[first : first + count] for each in ordered)
            new, output = update(state[:count], *part)
            state[:count] = new
            found.append(output)
            first += count
        joined = torch.cat(found)
        outputs = torch.empty_like(joined)
        outputs.index_copy_(0, self._tokens, joined)
        return outputs, state

    def convolve(
        self, inputs: torch.Tensor, history: torch.Tensor, convolution: Convolution
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A causal convolution of each channel; returns [tokens, channels] and the new history.

        Args:
            inputs: [tokens, channels].
            history: [rows, taps - 1, channels], the last inputs before the step, oldest first;
                zeros before the first token.
            convolution: its weights.

        Everything is in float32. The taps are added in their order, the bias last.
        """
        window, new = self.window(inputs, history)
        taps, bias = convolution
        taken = next(window) * taps[0]
        for tap, tokens in zip(taps[1:], window, strict=True):
            taken = taken + tokens * tap
        if bias is not None:
            taken = taken + bias
        return taken, new

    def window(
        self, inputs: torch.Tensor, history: torch.Tensor
    ) -> tuple[Iterator[torch.Tensor], torch.Tensor]:
        """The inputs before each token and its own, oldest first, and the new history.

        For each place of the window one tensor [tokens, channels]; the other arguments are those of
        `convolve`, with a history of one place less than the window has.
        """
        windows, kept = self._windows_of(history.shape[1] + 1)
        known = torch.cat((history.flatten(0, 1), inputs))
        return (known.index_select(0, place) for place in windows), known[kept]

    def _windows_of(self, taps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices into histories and inputs: [taps, tokens] and, for new histories, [rows, taps-1].

        All histories come first, then the inputs.
        """
        if taps not in self._windows:
            before, lens, offsets = taps - 1, self._lens, self._offsets
            first = len(lens) * before
            rows = np.repeat(np.arange(len(lens)), lens)
            local = np.arange(len(rows)) - np.repeat(np.cumsum(lens) - lens, lens)
            tokens = offsets[rows] + local
            windows = np.zeros((taps, len(rows)), dtype=np.int64)
            for tap in range(taps):
                is_known = local + tap < before
                windows[tap, tokens] = np.where(
                    is_known, rows * before + local + tap, first + tokens + tap - before
                )
            # A new history is the window of the token behind the row, without its last tap.
            behind = lens[:, None] + np.arange(before)
            kept = np.where(
                behind < before,
                np.arange(len(lens))[:, None] * before + behind,
                first + offsets[:, None] + behind - before,
            )
            self._windows[taps] = to_device(windows, self._device), to_device(kept, self._device)
        return self._windows[taps]
