"""The exponentials and tanh of the kernels against those of float64, in every variant."""

import ctypes

import numpy as np
import pytest

from engine.model.kernels.build import VARIANTS
from tests.engine.model.shims import compile_shim

SHIM = """
#include "vector.h"
using namespace quire;
extern "C" void all(const float* x, float* powers, float* short_powers, float* exponentials,
                    float* tangents, int64_t size) {
  for (int64_t i = 0; i < size; i += LANES) {
    store(powers + i, exp2(load<Vector>(x + i)));
    store(short_powers + i, exp2_for_bfloat16(load<Vector>(x + i)));
    store(exponentials + i, exponential(load<Vector>(x + i)));
    store(tangents + i, tanh(load<Vector>(x + i)));
  }
}
"""
#: Relative distance of a number from the next one, at most.
UNIT = 2.0**-23
#: What rounding to bfloat16 may take, as a share.
ROUNDING = 2.0**-9


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.name, scope="module")
def functions(request):
    """2^x, the same for bfloat16, e^x and tanh of an array; its size is a multiple of sixteen."""
    function = compile_shim(SHIM, request.param).all

    def compute(x):
        assert x.dtype == np.float32 and len(x) % 16 == 0
        found = [np.empty_like(x) for _ in range(4)]
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, *found)]
        function(*pointers, ctypes.c_int64(len(x)))
        return found

    return compute


@pytest.fixture
def exponentials(functions):
    """2^x, the same for bfloat16, and e^x."""
    return lambda x: functions(x)[:3]


@pytest.fixture
def tangents(functions):
    return lambda x: functions(x)[3]


def errors(found, exact):
    return np.max(np.abs(found - exact) / exact)


def test_powers_are_within_two_units_and_whole_ones_exact(exponentials):
    x = np.linspace(-126, 127, 1 << 20, dtype=np.float32)
    powers, _, _ = exponentials(x)
    assert errors(powers, 2.0 ** x.astype(np.float64)) < 2 * UNIT
    whole = np.arange(-126, 130, dtype=np.float32).clip(max=127)
    assert (exponentials(whole)[0] == 2.0**whole).all()


def test_short_powers_err_by_a_twentieth_of_what_rounding_takes(exponentials):
    steps = np.linspace(-126, 126, 1 << 20, dtype=np.float32)
    whole = np.arange(-126, 130, dtype=np.float32).clip(max=126)
    for x in (steps, whole, np.nextafter(whole, np.float32(-200)).clip(min=-126)):
        _, powers, _ = exponentials(x)
        assert errors(powers, 2.0 ** x.astype(np.float64)) < ROUNDING / 20


def test_exponentials_are_within_two_units(exponentials):
    x = np.linspace(-87, 88, 1 << 20, dtype=np.float32)
    _, _, found = exponentials(x)
    assert errors(found, np.exp(x.astype(np.float64))) < 2 * UNIT


def test_what_is_far_below_is_next_to_nothing_and_no_number_stays_none(exponentials):
    x = np.full(16, -np.inf, dtype=np.float32)
    x[1:4] = -1e30, -1e8, -200.0
    x[4] = np.nan
    for found in exponentials(x):
        assert (found[[0, 1, 2, 3]] >= 0).all() and (found[[0, 1, 2, 3]] < 1e-37).all()
        assert np.isnan(found[4])


def test_tangents_are_within_four_units_on_both_sides_of_nought(tangents):
    exponents = np.linspace(-40, 5, 1 << 19)
    near = np.linspace(0.5, 0.75, 1 << 19)
    for positive in (2.0**exponents, near):
        x = positive.astype(np.float32)
        exact = np.tanh(x.astype(np.float64))
        assert errors(tangents(x), exact) < 4 * UNIT
        assert (tangents(-x) == -tangents(x)).all()


def test_far_away_a_tangent_is_exactly_one_and_no_number_stays_none(tangents):
    x = np.full(16, 10.0, dtype=np.float32)
    x[1:4] = 88.0, 1e30, np.inf
    assert (tangents(x) == 1.0).all() and (tangents(-x) == -1.0).all()
    x[:] = np.nan
    assert np.isnan(tangents(x)).all()
    x[:] = 0.0
    assert (tangents(x) == 0.0).all()
