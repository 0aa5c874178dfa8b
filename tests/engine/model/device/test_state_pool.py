"""The tensors of recurrent states: sizes, and copies between device and host."""

import numpy as np
import pytest
import torch

from engine.batch import StateCopy
from engine.errors import DeviceFailed
from engine.model.device.state_pool import StatePool, bytes_of_slots, bytes_per_state

SHAPES = [[(2, 3)], [(4,), (2, 2)]]


def test_the_sizes_are_those_of_the_tensors():
    pool = StatePool(SHAPES, num_slots=5)
    assert bytes_per_state(SHAPES) == 4 * (6 + 4 + 4)
    assert pool.nbytes == bytes_of_slots(SHAPES, 5) == 12 * bytes_per_state(SHAPES)
    assert bytes_of_slots([], 5) == 0


def test_a_state_comes_back_from_the_host_bit_for_bit_in_another_slot():
    pool = StatePool(SHAPES, num_slots=2, num_host_slots=1)
    pool.poison()
    turn = pool.turn(np.array([1]), np.array([0]), np.array([6]))
    for layer, parts in enumerate(SHAPES):
        for part, shape in zip(pool.layer(layer), parts, strict=True):
            part[int(turn.writes[0])] = torch.randn(shape)
    pool.commit(turn)
    before = [part[2].clone() for layer in range(2) for part in pool.layer(layer)]
    pool.swap_out([StateCopy(1, 0, 6)])
    pool.poison()
    pool.swap_in([StateCopy(0, 0, 6)])
    buffer = pool.tags.buffer_after(0, 6)
    after = [part[buffer] for layer in range(2) for part in pool.layer(layer)]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    with pytest.raises(DeviceFailed, match="no recurrent state after 5"):
        pool.swap_out([StateCopy(0, 0, 5)])


def test_the_zero_state_is_never_poisoned():
    pool = StatePool(SHAPES, num_slots=2)
    pool.poison()
    for layer in range(2):
        for part in pool.layer(layer):
            assert part[pool.tags.zero].count_nonzero() == 0
            assert part[: pool.tags.zero].isnan().all()
