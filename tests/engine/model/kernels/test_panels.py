"""Rows times quantized weights, in every variant: results, edges, independence of other rows."""

import ctypes

import numpy as np
import pytest
import torch

from engine.model.kernels.build import VARIANTS
from engine.model.kernels.packing import PANEL, pack_panels
from engine.model.kernels.quantized import GROUP, QuantizedWeight, concatenated
from tests.engine.model.shims import compile_shim

SHIM = """
#include <memory>
#include "panels.h"
using namespace quire;
static QuireLinear linear_of(const void* packed, int64_t inputs, int64_t outputs, int64_t bits,
                             int64_t has_minima) {
  return {packed, nullptr, inputs, outputs, bits, has_minima};
}
struct Product { QuireLinear linear; };
extern "C" void product(const float* rows, int64_t stride, int64_t count, int64_t digits,
                        const void* packed, int64_t inputs, int64_t outputs, int64_t bits,
                        int64_t has_minima, float* to) {
  const QuireLinear linear = linear_of(packed, inputs, outputs, bits, has_minima);
  const std::unique_ptr<float[]> sums(new float[SUMS_SIZE]);
  Workspace workspace;
  Team team(1);
  DigitWriter<Float32> writer(digits);
  writer.lay_out(workspace, std::vector<Product>{{linear}}, count, 1);
  workspace.reserve(0);
  RoundedRows<Float32> from{(float*)rows, nullptr, stride};
  const int64_t strips = (outputs + LANES - 1) / LANES;
  multiply_panels(writer.of(from, count, linear, team, 0), linear, 0, strips,
                  PrefetchRange{(const uint32_t*)packed, LANES}, sums.get(),
                  [&](int64_t row, int64_t strip, const float* values, int64_t num) {
                    std::copy_n(values, num * LANES, to + (row * strips + strip) * LANES);
                  });
}
extern "C" void read(const void* packed, int64_t inputs, int64_t bits, int64_t has_minima,
                     int64_t output, float* to) {
  read_output(linear_of(packed, inputs, 0, bits, has_minima), output, to);
}
"""
#: Around the sizes of tiles for each number of digits, and where threads share the work.
NUM_ROWS = (1, 2, 3, 4, 5, 7, 12, 13)
FORMS = [(4, False), (4, True), (8, False), (8, True)]
#: The error of a product over the sum of its absolute terms, by digits.
TOLERANCES = {1: 2e-2, 2: 1e-4, 3: 1e-6}


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.name, scope="module")
def library(request):
    return compile_shim(SHIM, request.param)


def random_weight(outputs: int, inputs: int, bits: int, *, has_minima: bool) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(outputs + inputs + bits)
    groups = inputs // GROUP
    numbers = torch.randint(1 << bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    # Scales of both signs, and subnormal ones.
    scales = torch.randn(outputs, groups, generator=generator).half()
    scales[::7] *= 1e-6
    minima = torch.randn(outputs, groups, generator=generator).half() if has_minima else None
    return QuantizedWeight(numbers, scales, minima, bits)


def multiply(library, rows: torch.Tensor, weight: QuantizedWeight, digits: int) -> torch.Tensor:
    (count, inputs), outputs = rows.shape, len(weight.numbers)
    packed = pack_panels(weight)
    # The memory between rows is NaN.
    memory = torch.full((count, inputs + 16), torch.nan)
    memory[:, :inputs] = rows
    strips = -(-outputs // 16)
    found = np.full((count, strips * 16), np.nan, dtype=np.float32)
    library.product(
        ctypes.c_void_p(memory.data_ptr()),
        *map(ctypes.c_int64, (inputs + 16, count, digits)),
        ctypes.c_void_p(packed.data_ptr()),
        *map(ctypes.c_int64, (inputs, outputs, weight.bits, weight.minima is not None)),
        found.ctypes.data_as(ctypes.c_void_p),
    )
    return torch.from_numpy(found)[:, :outputs]


def random_rows(count: int, inputs: int) -> torch.Tensor:
    """Rows with groups of very different sizes, one of them zero."""
    rows = torch.randn(count, inputs, generator=torch.Generator().manual_seed(inputs))
    rows[:, :GROUP] *= 1e4
    rows[::2, -GROUP:] = 0.0
    return rows


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
@pytest.mark.parametrize("digits", TOLERANCES)
def test_a_product_agrees_with_float64_and_a_row_is_the_same_beside_any_others(
    library, bits, has_minima, digits
):
    for outputs, inputs in ((96, 32), (49, 160)):
        weight = random_weight(outputs, inputs, bits, has_minima=has_minima)
        rows = random_rows(max(NUM_ROWS), inputs)
        values = weight.dequantized().double()
        together = multiply(library, rows, weight, digits)
        size = rows.double().abs() @ values.abs().T
        errors = (together - rows.double() @ values.T).abs() / size.clamp(min=1e-9)
        assert errors.max() < TOLERANCES[digits]
        for count in NUM_ROWS:
            first = max(NUM_ROWS) - count
            assert torch.equal(multiply(library, rows[first:], weight, digits), together[first:])


@pytest.mark.parametrize("outputs", [1, 16, 17, 32, 33, 48])
def test_an_output_is_the_same_beside_any_others(library, outputs):
    whole = random_weight(96, 64, 4, has_minima=True)
    rows = random_rows(5, 64)
    part = whole.select(lambda tensor: tensor[:outputs])
    found = multiply(library, rows, part, 2)
    assert torch.equal(found, multiply(library, rows, whole, 2)[:, :outputs])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_no_finite_result_and_others_are_as_before(library, broken):
    weight = random_weight(32, 64, 8, has_minima=False)
    rows = random_rows(3, 64)
    expected = multiply(library, rows, weight, 1)
    rows[1, 40] = broken
    found = multiply(library, rows, weight, 1)
    assert not found[1].isfinite().any()
    assert torch.equal(found[::2], expected[::2])


@pytest.mark.parametrize(("bits", "has_minima"), FORMS)
def test_one_output_is_read_as_its_weights(library, bits, has_minima):
    weight = random_weight(70, 96, bits, has_minima=has_minima)
    packed, values = pack_panels(weight), weight.dequantized()
    found = np.empty(96, dtype=np.float32)
    for output in (0, 1, 31, 32, 69):
        library.read(
            ctypes.c_void_p(packed.data_ptr()),
            *map(ctypes.c_int64, (96, bits, has_minima, output)),
            found.ctypes.data_as(ctypes.c_void_p),
        )
        torch.testing.assert_close(torch.from_numpy(found), values[output], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_weights_of_different_forms_are_joined_with_the_values_of_each(first, second):
    parts = [random_weight(3 + bits, 64, bits, has_minima=least) for bits, least in (first, second)]
    whole = concatenated(parts)
    assert whole.bits == max(first[0], second[0])
    expected = torch.cat([part.dequantized() for part in parts])
    torch.testing.assert_close(whole.dequantized(), expected, rtol=1e-6, atol=1e-6)


def test_panels_are_as_small_as_the_blocks_of_a_file():
    for (bits, has_minima), size in zip(FORMS, (18, 20, 34, 36), strict=True):
        packed = pack_panels(random_weight(PANEL, GROUP, bits, has_minima=has_minima))
        assert packed.nbytes == PANEL * size
