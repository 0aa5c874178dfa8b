"""Rows times quantized weights, in every variant: results, edges, independence of other rows."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.model.kernels.build import VARIANTS
from engine.model.kernels.library import PanelsStruct
from engine.model.kernels.packing import LANES, PANEL, pack_panels
from engine.model.kernels.quantized import GROUP, NESTED_GROUPS, QuantizedWeight, joined
from tests.engine.model.shims import compile_shim

SHIM = """
#include <memory>
#include "panels.h"
using namespace quire;
struct Product { QuireLinear linear; };
extern "C" void product(const float* rows, int64_t stride, int64_t count, int64_t digits,
                        const QuirePanels* parts, int64_t num_parts, int64_t inputs,
                        int64_t outputs, float* to) {
  const QuireLinear linear = {nullptr, nullptr, inputs, outputs, parts, num_parts, digits};
  const std::unique_ptr<float[]> sums(new float[SUMS_SIZE]);
  Workspace workspace;
  Team team(1);
  DigitWriter<Float32> writer;
  writer.lay_out(workspace, std::vector<Product>{{linear}}, count, 1);
  workspace.reserve(0);
  RoundedRows<Float32> from{(float*)rows, nullptr, stride};
  const int64_t strips = (outputs + LANES - 1) / LANES;
  multiply_panels(writer.of(from, count, linear, team, 0), linear, 0, strips,
                  PrefetchRange{(const uint32_t*)parts->packed, LANES}, sums.get(),
                  [&](int64_t row, int64_t strip, const float* values, int64_t num) {
                    std::copy_n(values, num * LANES, to + (row * strips + strip) * LANES);
                  });
}
extern "C" void read(const QuirePanels* parts, int64_t num_parts, int64_t inputs, int64_t output,
                     float* to) {
  read_output({nullptr, nullptr, inputs, 0, parts, num_parts}, output, to);
}
"""
#: Around the sizes of tiles for each number of digits, and where threads share the work.
NUM_ROWS = (1, 2, 3, 4, 5, 7, 12, 13)
PLAIN_FORMS = [(4, False), (4, True), (5, False), (5, True), (8, False), (8, True)]
#: Bits, whether there are minima, whether scales are nested.
FORMS = [*((*form, False) for form in PLAIN_FORMS), (4, True, True), (5, True, True),
         (6, False, True)]  # fmt: skip
#: The error of a product over the sum of its absolute terms, by digits.
TOLERANCES = {1: 2e-2, 2: 1e-4, 3: 1e-6}


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.name, scope="module")
def library(request):
    return compile_shim(SHIM, request.param)


def random_weight(
    outputs: int, inputs: int, bits: int, has_minima: bool, is_nested: bool = False
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(outputs + inputs + bits)
    numbers = torch.randint(1 << bits, (outputs, inputs), generator=generator, dtype=torch.uint8)

    def factors(size: int) -> torch.Tensor:
        # Of both signs, and subnormal ones.
        values = torch.randn(outputs, inputs // size, generator=generator).half()
        values[::7] *= 1e-6
        return values

    def integers(size: int) -> torch.Tensor:
        shape = (outputs, inputs // size)
        return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)

    size = GROUP // 2 if bits == 6 else GROUP
    own = integers if is_nested else factors
    shared = GROUP * NESTED_GROUPS
    return QuantizedWeight(
        numbers,
        scales=own(size),
        minima=own(GROUP) if has_minima else None,
        bits=bits,
        scale_factors=factors(shared) if is_nested else None,
        minimum_factors=factors(shared) if is_nested and has_minima else None,
    )


def panels_of(parts: Sequence[QuantizedWeight]):
    """The structs of some parts, and the memory that they refer to."""
    packed = [pack_panels(part) for part in parts]
    structs = (PanelsStruct * len(parts))()
    for struct, part, memory in zip(structs, parts, packed, strict=True):
        struct.packed, struct.num_strips = memory.data_ptr(), -(-len(part.numbers) // LANES)
        struct.bits, struct.has_minima, struct.is_nested = part.form
    return structs, packed


def multiply(library, rows: torch.Tensor, parts, digits: int) -> torch.Tensor:
    (count, inputs), outputs = rows.shape, sum(len(part.numbers) for part in parts)
    structs, _kept = panels_of(parts)
    # The memory between rows is NaN.
    memory = torch.full((count, inputs + 16), torch.nan)
    memory[:, :inputs] = rows
    strips = -(-outputs // 16)
    found = np.full((count, strips * 16), np.nan, dtype=np.float32)
    library.product(
        ctypes.c_void_p(memory.data_ptr()),
        *map(ctypes.c_int64, (inputs + 16, count, digits)),
        structs,
        *map(ctypes.c_int64, (len(parts), inputs, outputs)),
        found.ctypes.data_as(ctypes.c_void_p),
    )
    return torch.from_numpy(found)[:, :outputs]


def random_rows(count: int, inputs: int) -> torch.Tensor:
    """Rows with groups of very different sizes, one of them zero."""
    rows = torch.randn(count, inputs, generator=torch.Generator().manual_seed(inputs))
    rows[:, :GROUP] *= 1e4
    rows[::2, -GROUP:] = 0.0
    return rows


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("digits", TOLERANCES)
def test_a_product_agrees_with_float64_and_a_row_is_the_same_beside_any_others(
    library, form, digits
):
    for outputs, inputs in ((96, 256), (49, 512)) if form[2] else ((96, 32), (49, 160)):
        weight = random_weight(outputs, inputs, *form)
        rows = random_rows(max(NUM_ROWS), inputs)
        values = weight.dequantized().double()
        together = multiply(library, rows, [weight], digits)
        size = rows.double().abs() @ values.abs().T
        errors = (together - rows.double() @ values.T).abs() / size.clamp(min=1e-9)
        assert errors.max() < TOLERANCES[digits]
        for count in NUM_ROWS:
            first = max(NUM_ROWS) - count
            assert torch.equal(multiply(library, rows[first:], [weight], digits), together[first:])


@pytest.mark.parametrize("outputs", [1, 16, 17, 32, 33, 48])
def test_an_output_is_the_same_beside_any_others(library, outputs):
    whole = random_weight(96, 64, 4, True)
    rows = random_rows(5, 64)
    part = whole.select(lambda tensor: tensor[:outputs])
    found = multiply(library, rows, [part], 2)
    assert torch.equal(found, multiply(library, rows, [whole], 2)[:, :outputs])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_no_finite_result_and_others_are_as_before(library, broken):
    weight = random_weight(32, 64, 8, False)
    rows = random_rows(3, 64)
    expected = multiply(library, rows, [weight], 1)
    rows[1, 40] = broken
    found = multiply(library, rows, [weight], 1)
    assert not found[1].isfinite().any()
    assert torch.equal(found[::2], expected[::2])


@pytest.mark.parametrize("digits", [1, 2])
def test_parts_of_several_forms_have_the_outputs_of_each(library, digits):
    outputs = (32, 96, 64, 17)
    forms = [(4, True, True), (6, False, True), (8, False, False), (5, True, True)]
    parts = [random_weight(n, 256, *form) for n, form in zip(outputs, forms, strict=True)]
    rows = random_rows(7, 256)
    expected = torch.cat([multiply(library, rows, [part], digits) for part in parts], dim=1)
    assert torch.equal(multiply(library, rows, parts, digits), expected)


def test_one_output_is_read_as_its_weights(library):
    parts = [random_weight(64, 512, *form) for form in FORMS]
    parts.append(random_weight(6, 512, 4, False))
    structs, _kept = panels_of(parts)
    values = torch.cat([part.dequantized() for part in parts])
    # Products of nested scales are thousands of times larger, and may cancel.
    slack = [1e-6 if part.scale_factors is None else 1e-4 for part in parts for _ in part.numbers]
    found = np.empty(512, dtype=np.float32)
    for output in (*range(0, len(values), 31), len(values) - 1):
        library.read(
            structs,
            *map(ctypes.c_int64, (len(parts), 512, output)),
            found.ctypes.data_as(ctypes.c_void_p),
        )
        torch.testing.assert_close(
            torch.from_numpy(found), values[output], rtol=1e-6, atol=slack[output]
        )


@pytest.mark.parametrize("first", PLAIN_FORMS)
@pytest.mark.parametrize("second", PLAIN_FORMS)
def test_weights_of_different_forms_are_joined_with_the_values_of_each(first, second):
    parts = [random_weight(3 + form[0], 64, *form) for form in (first, second)]
    whole = joined(parts)
    assert whole.bits == (8 if first[0] != second[0] else first[0])
    expected = torch.cat([part.dequantized() for part in parts])
    torch.testing.assert_close(whole.dequantized(), expected, rtol=1e-6, atol=1e-6)


def test_nested_forms_are_joined_only_with_their_own():
    first, second, third = (random_weight(3, 256, *FORMS[index]) for index in (-3, -2, 0))
    assert joined([first, second]) is None
    assert joined([third, first]) is None
    expected = torch.cat([first.dequantized()] * 2)
    assert torch.equal(joined([first, first]).dequantized(), expected)


def test_a_weight_whose_minimum_would_be_infinite_is_not_joined():
    plain, with_minima = random_weight(3, 64, 8, False), random_weight(3, 64, 8, True)
    assert joined([plain, with_minima]) is not None
    assert joined([replace(plain, scales=torch.full_like(plain.scales, 600)), with_minima]) is None


def test_panels_are_as_small_as_the_blocks_of_a_file():
    # Of nested ones, scales and minima have 8 bits instead of 6.
    sizes = (18, 20, 22, 24, 34, 36, (144 + 4) / 8, (176 + 4) / 8, 210 / 8)
    for form, size in zip(FORMS, sizes, strict=True):
        assert pack_panels(random_weight(PANEL, 256, *form)).nbytes == 8 * PANEL * size
