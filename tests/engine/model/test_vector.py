"""The exponentials of the kernels against those of float64, in every variant."""

import ctypes

import numpy as np
import pytest

from engine.model.kernels.build import VARIANTS
from tests.engine.model.shims import compile_shim

SHIM = """
#include "vector.h"
using namespace quire;
extern "C" void both(const float* x, float* powers, float* exponentials, int64_t size) {
  for (int64_t i = 0; i < size; i += LANES) {
    store(powers + i, power_of_two(load<Vector>(x + i)));
    store(exponentials + i, exponential(load<Vector>(x + i)));
  }
}
"""
#: Relative distance of a number from the next one, at most.
UNIT = 2.0**-23


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.name, scope="module")
def both(request, tmp_path_factory):
    """2^x and e^x of an array, whose size is a multiple of sixteen."""
    folder = tmp_path_factory.mktemp(request.param.name)
    function = compile_shim(SHIM, request.param, folder).both

    def compute(x):
        assert x.dtype == np.float32 and len(x) % 16 == 0
        found = np.empty_like(x), np.empty_like(x)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, *found)]
        function(*pointers, ctypes.c_int64(len(x)))
        return found

    return compute


def errors(found, exact):
    return np.max(np.abs(found - exact) / exact)


def test_powers_are_within_two_units_and_whole_ones_exact(both):
    x = np.linspace(-126, 127, 1 << 20, dtype=np.float32)
    powers, _ = both(x)
    assert errors(powers, 2.0 ** x.astype(np.float64)) < 2 * UNIT
    whole = np.arange(-126, 130, dtype=np.float32).clip(max=127)
    assert (both(whole)[0] == 2.0**whole).all()


def test_exponentials_are_within_two_units(both):
    x = np.linspace(-87, 88, 1 << 20, dtype=np.float32)
    _, exponentials = both(x)
    assert errors(exponentials, np.exp(x.astype(np.float64))) < 2 * UNIT


def test_what_is_far_below_is_next_to_nothing_and_no_number_stays_none(both):
    x = np.full(16, -np.inf, dtype=np.float32)
    x[1:4] = -1e30, -1e8, -200.0
    x[4] = np.nan
    for found in both(x):
        assert (found[[0, 1, 2, 3]] >= 0).all() and (found[[0, 1, 2, 3]] < 1e-37).all()
        assert np.isnan(found[4])
