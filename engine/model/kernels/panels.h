// Rows times quantized weights: the layout of the weights, and the product for one thread. Knows no
// layer.
//
// A weight is scale * (number - offset), or scale * number + minimum. Scales and minima are
// float16, one for each output and group of 32 inputs; numbers have 4 or 8 bits. A panel has two
// strips of 16 outputs. For each group it has the scales of its outputs, their minima if there are
// any, and then the numbers: four inputs of each output side by side, or in 4 bits eight, of which
// the low halves of four bytes are the first four. So a thread reads its panels from one end to the
// other.
//
// There is one form for any number of rows: numbers are unpacked in registers, once for each tile
// of rows.
#pragma once

#include "decoder.h"
#include "digit_rows.h"
#include "multiply.h"

namespace quire {

constexpr int64_t PANEL_STRIPS = 2, PANEL = PANEL_STRIPS * LANES;
// Rows of digits in a register tile; a tile of COLUMNS part vectors has twice as many accumulators.
constexpr int PANEL_ROWS = 6, COLUMNS = PARTS == 1 ? PANEL_STRIPS : 1;
// Numbers are prefetched this many bytes ahead.
constexpr int64_t PANEL_AHEAD = 4096;

// The sizes of a panel, in bytes.
struct PanelShape {
  int64_t factors, group, all;  // Scales and minima of a group; a whole group; all groups.

  explicit PanelShape(const QuireLinear& linear)
      : factors((linear.has_minima ? 2 : 1) * PANEL * (int64_t)sizeof(uint16_t)),
        group(factors + PANEL * GROUP * linear.bits / 8),
        all(group * (linear.inputs / GROUP)) {}
};

// Finite float16 values as float32.
inline PartVector widen_halves(const char* from) {
#if defined(__AVX512F__)
  return (PartVector)_mm512_maskz_cvtph_ps(0xffff, load<__m256i>(from));
#else
  typedef uint16_t PartHalves __attribute__((vector_size(PART_BYTES / 2)));
  const PartWords bits = __builtin_convertvector(load<PartHalves>(from), PartWords);
  // The exponents of float32 are larger by 112.
  const float exponents = 0x1p112f;
  const PartWords magnitude = (PartWords)((PartVector)((bits & 0x7fffu) << 13) * exponents);
  return (PartVector)(magnitude | (bits & 0x8000u) << 16);
#endif
}

// sums[r] = row of digits r . COLUMNS part vectors of the panel, from byte `column` of each word
// on. `ahead` is prefetched group by group; null for nothing.
template <int BITS, int R>
void panel_kernel(const DigitGroup* rows, int64_t groups, const char* panel,
                  const PanelShape& shape, int64_t column, const char* ahead, float* sums) {
  constexpr int64_t WORD = PANEL * sizeof(uint32_t), HALF = PART_BYTES / 2;
  const bool has_minima = shape.factors > PANEL * (int64_t)sizeof(uint16_t);
  PartVector total[R][COLUMNS] = {};
  for (int64_t g = 0; g < groups; g++, panel += shape.group, rows++) {
    PartIntegers sum[R][COLUMNS];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int c = 0; c < COLUMNS; c++) sum[r][c] = rows[r * groups].start - PartIntegers{};
    const char* numbers = panel + shape.factors + column;
    const auto add = [&](const PartWords (&words)[COLUMNS], int64_t word) {
#pragma GCC unroll 2
      for (int i = 0; i < Dot::FACTORS; i++)
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
          for (int c = 0; c < COLUMNS; c++)
            sum[r][c] = Dot::multiply(sum[r][c], rows[r * groups].factors[word][i],
                                      Dot::columns(words[c], i));
    };
#pragma GCC unroll 8
    for (int64_t word = 0; word < GROUP_WORDS; word += 8 / BITS, numbers += WORD) {
      PartWords words[COLUMNS];
      for (int c = 0; c < COLUMNS; c++) words[c] = load<PartWords>(numbers + c * PART_BYTES);
      if constexpr (BITS == 8) {
        add(words, word);
      } else {
        PartWords low[COLUMNS], high[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) {
          low[c] = words[c] & 0x0f0f0f0fu;
          high[c] = words[c] >> 4 & 0x0f0f0f0fu;
        }
        add(low, word);
        add(high, word + 1);
      }
    }
    if (ahead != nullptr) {
      for (int64_t line = 0; line < shape.group; line += 64) prefetch_line(ahead + line);
      ahead += shape.group;
    }
#pragma GCC unroll 2
    for (int c = 0; c < COLUMNS; c++) {
      const char* const scales = panel + column / 2 + c * HALF;
      const PartVector scale = widen_halves(scales);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++)
        total[r][c] +=
            scale * rows[r * groups].scale * __builtin_convertvector(sum[r][c], PartVector);
      if (!has_minima) continue;
      const PartVector minimum = widen_halves(scales + PANEL * sizeof(uint16_t));
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) total[r][c] += minimum * rows[r * groups].sum;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int c = 0; c < COLUMNS; c++)
      store((char*)(sums + r * PANEL) + column + c * PART_BYTES, total[r][c]);
}

// The sums of `count` rows of digits, PANEL_ROWS at most, with a whole panel.
inline void multiply_panel(const DigitGroup* rows, int64_t count, int64_t groups, const char* panel,
                           const QuireLinear& linear, const char* ahead, float* sums) {
  typedef decltype(&panel_kernel<8, 1>) Kernel;
  static constexpr Kernel kernels[2][PANEL_ROWS] = {
      {panel_kernel<4, 1>, panel_kernel<4, 2>, panel_kernel<4, 3>, panel_kernel<4, 4>,
       panel_kernel<4, 5>, panel_kernel<4, 6>},
      {panel_kernel<8, 1>, panel_kernel<8, 2>, panel_kernel<8, 3>, panel_kernel<8, 4>,
       panel_kernel<8, 5>, panel_kernel<8, 6>}};
  const Kernel kernel = kernels[linear.bits == 8][count - 1];
  const PanelShape shape(linear);
  for (int64_t column = 0; column < PANEL * 4; column += COLUMNS * PART_BYTES, ahead = nullptr)
    kernel(rows, groups, panel, shape, column, ahead, sums);
}

// Every row times the strips first .. last-1; arguments as in multiply.h. `first` is even.
template <class Epilogue>
void multiply_panels(const DigitRows& rows, const QuireLinear& linear, int64_t first, int64_t last,
                     const PrefetchRange& next, float* sums, const Epilogue& epilogue) {
  const PanelShape shape(linear);
  for (int64_t strip = first; strip < last; strip += PANEL_STRIPS) {
    const int64_t count = std::min(PANEL_STRIPS, last - strip);
    const char* const panel = (const char*)linear.packed + strip / PANEL_STRIPS * shape.all;
    const bool is_last = strip + count >= last;
    const char* ahead = is_last ? (const char*)next.start : panel + PANEL_AHEAD;
    for_each_tile(rows.count, PANEL_ROWS / rows.digits, [&](int64_t r, int64_t n) {
      multiply_panel(rows.at(r), n * rows.digits, rows.groups, panel, linear, ahead, sums);
      ahead = nullptr;
      for (int64_t i = 0; i < n; i++) {
        float* const to = sums + i * rows.digits * PANEL;
        for (int64_t d = 1; d < rows.digits; d++)
          for (int64_t j = 0; j < PANEL; j += LANES)
            store(to + j, load<Vector>(to + j) + load<Vector>(to + d * PANEL + j));
        epilogue(rows.first_row + r + i, strip, to, count);
      }
    });
  }
}

// Reads the weights of one output.
inline void read_output(const QuireLinear& linear, int64_t output, float* to) {
  const PanelShape shape(linear);
  const auto* group = (const uint8_t*)linear.packed + output / PANEL * shape.all;
  const int64_t column = output % PANEL;
  const auto half = [](const uint8_t* from) {
    alignas(64) char halves[PART_BYTES / 2] = {};
    std::memcpy(halves, from, sizeof(uint16_t));
    return widen_halves(halves)[0];
  };
  for (int64_t i = 0; i < linear.inputs; i += GROUP, group += shape.group) {
    const float scale = half(group + column * 2);
    const float minimum = linear.has_minima ? half(group + (PANEL + column) * 2) : 0.0f;
    for (int64_t j = 0; j < GROUP; j++) {
      const int64_t word = linear.bits == 8 ? j / 4 : j / 8;
      int32_t number = group[shape.factors + (word * PANEL + column) * 4 + j % 4];
      if (linear.bits == 4) number = j / 4 % 2 ? number >> 4 : number & 15;
      to[i + j] = scale * (float)(number - offset_of(linear)) + minimum;
    }
  }
}

}  // namespace quire
