"""Rows times a packed matrix, in every variant: results, edges, independence of other rows."""

import ctypes
import subprocess

import numpy as np
import pytest
import torch

from engine.model.kernels import build
from engine.model.kernels.build import VARIANTS
from engine.model.kernels.packing import LANES, PER_WORD, pack
from tests.engine.model.decoder.test_kernels import runnable
from tests.engine.model.shims import compile_shim

SHIM = """
#include <memory>
#include "multiply.h"
using namespace quire;
template <class T>
void product(const void* rows, const void* low, int64_t stride, int64_t count,
             const void* packed, int64_t inner, int64_t strips, float* to) {
  const MatrixUnit unit;
  const std::unique_ptr<float[]> sums(new float[SUMS_SIZE]);
  typedef const typename T::RowWord* Words;
  multiply<T>(Rows<T>{(Words)rows, stride, count, (Words)low},
              (const uint32_t*)packed, inner, 0, strips,
              PrefetchRange{(const uint32_t*)packed, LANES},
              sums.get(), [&](int64_t row, int64_t strip, const float* values, int64_t num) {
                std::copy_n(values, num * LANES, to + (row * strips + strip) * LANES);
              });
}
#define QUIRE_PRODUCT(NAME, TYPE)                                                                 \\
  extern "C" void NAME(const void* rows, const void* low, int64_t stride, int64_t count,         \\
                       const void* packed, int64_t inner, int64_t strips, float* to) {            \\
    product<TYPE>(rows, low, stride, count, packed, inner, strips, to);                          \\
  }                                                                                               \\
  extern "C" int64_t NAME##_row_bytes() { return sizeof(typename TYPE::Row::Element); }
QUIRE_PRODUCT(float32, Float32)
QUIRE_PRODUCT(bfloat16, BFloat16)
"""
#: Rows around the sizes of tiles, of AMX tile registers and of a row block.
NUM_ROWS = (1, 2, 7, 12, 16, 17, 19, 32, 33, 50, 64, 257)
#: Elements of the inner dimension: part of a register, whole ones, with a tail, two inner blocks.
INNER = (2, 16, 30, 48, 130, 2080)
#: Rows behind the last one that the matrix unit may read.
MISSING_ROWS = 16


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.name, scope="module")
def library(request):
    return compile_shim(SHIM, request.param)


@pytest.fixture(params=["float32", "bfloat16"])
def multiply(request, library):
    """Rows [rows, inner], plus their low parts if given, times weight [outputs, inner]."""
    dtype = getattr(torch, request.param)
    function = getattr(library, request.param)
    # Without an instruction that multiplies pairs of bfloat16, rows are float32.
    row_bytes = getattr(library, f"{request.param}_row_bytes")()
    row_dtype = dtype if row_bytes == dtype.itemsize else torch.float32

    def compute(rows, weight, low=None):
        count, inner = rows.shape
        packed, per_word = pack(weight.to(dtype)), PER_WORD[dtype]
        # The stride is larger than a row, and the memory between and behind rows is NaN.
        shape = (2, count + MISSING_ROWS, inner + 2 * LANES)
        memory = torch.full(shape, torch.nan, dtype=row_dtype)
        memory[0, :count, :inner] = rows
        if low is not None:
            memory[1, :count, :inner] = low
        found = np.full((count, packed.shape[0] * LANES), np.nan, dtype=np.float32)
        function(
            ctypes.c_void_p(memory[0].data_ptr()),
            ctypes.c_void_p(memory[1].data_ptr() if low is not None else None),
            ctypes.c_int64(memory.shape[2] // per_word),
            ctypes.c_int64(count),
            ctypes.c_void_p(packed.data_ptr()),
            ctypes.c_int64(inner // per_word),
            ctypes.c_int64(packed.shape[0]),
            found.ctypes.data_as(ctypes.c_void_p),
        )
        return torch.from_numpy(found)[:, : len(weight)]

    compute.dtype = dtype
    return compute


def random(*shape, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("inner", INNER)
def test_a_product_agrees_with_float64_and_a_row_is_the_same_beside_any_others(multiply, inner):
    weight = random(100, inner, dtype=multiply.dtype, seed=inner)
    rows = random(max(NUM_ROWS), inner, dtype=multiply.dtype, seed=inner + 1)
    exact = rows.double() @ weight.double().T
    size = rows.double().abs() @ weight.double().abs().T
    together = multiply(rows, weight)
    assert ((together - exact).abs() / size).max() < 2e-6
    for count in NUM_ROWS:
        first = max(NUM_ROWS) - count
        assert torch.equal(multiply(rows[first:], weight), together[first:])


@pytest.mark.parametrize("outputs", [1, 16, 17, 32, 48, 65, 128])
def test_a_column_is_the_same_beside_any_others(multiply, outputs):
    rows = random(40, 62, dtype=multiply.dtype, seed=1)
    weight = random(200, 62, dtype=multiply.dtype, seed=2)
    for count in (1, 9, 40):
        expected = multiply(rows[:count], weight)[:, :outputs]
        assert torch.equal(multiply(rows[:count], weight[:outputs]), expected)


@pytest.mark.parametrize("inner", [30, 2080])
def test_low_parts_of_rows_are_multiplied_too(multiply, inner):
    weight = random(70, inner, dtype=multiply.dtype, seed=3)
    values = random(33, inner, dtype=torch.float32, seed=4)
    rows = values.to(multiply.dtype)
    low = (values - rows.float()).to(multiply.dtype)
    exact = (rows.double() + low.double()) @ weight.double().T
    together = multiply(rows, weight, low)
    assert (
        (together - exact).abs() / (values.abs().double() @ weight.double().abs().T)
    ).max() < 2e-6
    for count in (1, 5, 16, 20):
        assert torch.equal(multiply(rows[:count], weight, low[:count]), together[:count])


def test_libraries_of_one_process_keep_their_tables_to_themselves():
    source = """
    template <class T>
    const int* table() {
      static constexpr int numbers[] = {NUMBER, NUMBER};
      return numbers;
    }
    extern "C" int number(int index) { return table<int>()[index]; }
    """
    for number in (1, 2):
        library = compile_shim(source.replace("NUMBER", str(number)), VARIANTS[-1])
        assert library.number(1) == number


READ = """
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "matrix_unit.h"
int main(int, char** arguments) {
  syscall(SYS_arch_prctl, REQUEST, FEATURE);
  const quire::MatrixUnit unit;
  void* lines = aligned_alloc(64, 64 * strtoul(arguments[1], nullptr, 10));
  quire::load_register<4>(lines, 64);
  free(lines);
}
"""


def test_the_sanitizer_sees_what_the_matrix_unit_reads(tmp_path):
    """Without touch_lines(), the sanitizer of `check_native` would not see AMX accesses."""
    variant = VARIANTS[0]
    if not runnable(variant):
        pytest.skip(f"this processor cannot run {variant.name}")
    (tmp_path / "read.cpp").write_text(READ)
    names = {"REQUEST": build.ARCH_REQ_XCOMP_PERM, "FEATURE": build.XFEATURE_XTILEDATA}
    flags = [*variant.options, *(f"-D{name}={value}" for name, value in names.items())]
    compiler, program = build._compiler(), str(tmp_path / "read")
    assert compiler is not None
    # A compiler without this file prints the bare name.
    if build._run(compiler, "-print-file-name=libasan.so").strip() == "libasan.so":
        pytest.skip("this compiler has no address sanitizer")
    command = [compiler, "-std=c++17", "-Wno-psabi", "-fsanitize=address", *flags]
    command += [f"-I{build.SOURCES}", str(tmp_path / "read.cpp"), "-o", program]
    subprocess.run(command, check=True)
    enough, short = (
        subprocess.run([program, lines], capture_output=True, text=True, check=False)
        for lines in ("16", "15")
    )
    assert (enough.returncode, enough.stderr) == (0, "")
    assert short.returncode != 0
    assert "heap-buffer-overflow" in short.stderr
