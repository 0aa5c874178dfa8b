"""The rows of a step for a recurrence: each token follows its own, and each row is by itself."""

import numpy as np
import pytest
import torch

from engine.cache.state_tags import Turn
from engine.model.kernels.recurrent import Convolution
from engine.model.recurrence import RecurrentRows
from engine.model.wide.mixers.layer_state import LayerState

CPU = torch.device("cpu")
CHANNELS, TAPS = 5, 3
LENGTHS = (3, 1, 7, 2, 1)


def rows_of(*lengths: int) -> RecurrentRows:
    numbers = np.arange(len(lengths))
    return RecurrentRows(np.array(lengths), Turn(numbers, numbers, np.array(lengths)), CPU)


def inputs_of(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, CHANNELS, generator=generator) for length in lengths]


def decay(state, inputs):
    new = state * 0.5 + inputs.tanh()
    return new, new.sin()


def in_rows_order(rows: RecurrentRows, states: torch.Tensor) -> torch.Tensor:
    """States of the rows of the step, of states in the order of the rows."""
    return torch.empty_like(states).index_copy_(0, rows.writes, states)


@pytest.mark.parametrize("lengths", [LENGTHS, (1, 1, 1), (4,)])
def test_a_scan_gives_each_row_what_it_has_alone_bit_for_bit(lengths):
    rows, inputs = rows_of(*lengths), inputs_of(*lengths)
    states = torch.randn(len(lengths), CHANNELS)
    outputs, new = rows.scan(decay, states.index_select(0, rows.reads), torch.cat(inputs))
    new = in_rows_order(rows, new)
    for row, (found, tokens) in enumerate(zip(outputs.split(lengths), inputs, strict=True)):
        state = states[row : row + 1]
        for token, one in zip(tokens, found, strict=True):
            state, wanted = decay(state, token[None])
            assert torch.equal(one, wanted[0])
        assert torch.equal(new[row], state[0])


@pytest.mark.parametrize("bias", [None, torch.arange(CHANNELS) / 8])
def test_a_convolution_of_chunks_is_that_of_the_whole_and_that_of_torch(bias):
    taps = torch.randn(TAPS, CHANNELS)
    convolution = Convolution(taps, bias)
    whole = inputs_of(*LENGTHS)
    zeros = torch.zeros(len(LENGTHS), TAPS - 1, CHANNELS)
    rows = rows_of(*LENGTHS)
    joined, history = rows.convolve(torch.cat(whole), zeros, convolution)
    history = in_rows_order(rows, history)
    for row, (found, tokens) in enumerate(zip(joined.split(LENGTHS), whole, strict=True)):
        padded = torch.nn.functional.pad(tokens.T[None], (TAPS - 1, 0))
        wanted = torch.conv1d(padded, taps.T[:, None], bias, groups=CHANNELS)[0].T
        torch.testing.assert_close(found, wanted)
        kept = zeros[:1]
        for token, one in zip(tokens, found, strict=True):
            output, kept = rows_of(1).convolve(token[None], kept, convolution)
            assert torch.equal(output[0], one)
        assert torch.equal(kept[0], history[row])


def test_the_first_token_of_a_request_is_that_of_a_row_that_starts_at_0():
    lens, ends = np.array([1, 3, 2]), np.array([9, 3, 2])
    rows = RecurrentRows(lens, Turn(np.arange(3), np.arange(3), ends), CPU)
    assert rows.begins.tolist() == [False, True, False, False, True, False]


def test_a_window_has_the_tokens_before_each_and_then_its_own():
    rows = RecurrentRows(np.array([2, 1]), Turn(np.arange(2), np.arange(2), np.array([7, 1])), CPU)
    window, history = rows.window(
        torch.tensor([[8.0], [9.0], [5.0]]), torch.tensor([[[6.0], [7.0]], [[0.0], [0.0]]])
    )
    found = torch.cat(list(window), dim=1)
    assert found.tolist() == [[6, 7, 8], [7, 8, 9], [0, 0, 5]]
    assert history.flatten(1).tolist() == [[8, 9], [0, 5]]


def test_layers_read_and_write_the_buffers_of_their_rows():
    lens = np.array([1, 4])
    rows = RecurrentRows(lens, Turn(np.array([5, 2]), np.array([4, 3]), lens), CPU)
    part = torch.arange(6.0)[:, None].expand(6, 2).clone()
    state = LayerState([part], rows)
    # The longest row comes first.
    assert state.read(0)[:, 0].tolist() == [2.0, 5.0]
    state.write(0, torch.tensor([[30.0, 30.0], [40.0, 40.0]]))
    assert part[:, 0].tolist() == [0.0, 1.0, 2.0, 30.0, 40.0, 5.0]
