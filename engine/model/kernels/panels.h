// Rows times quantized weights: the layout of the weights, and the product for one thread. Knows no
// layer.
//
// A weight is scale * (number - offset), or scale * number + minimum. Scales and minima belong to
// one output and group of 32 inputs; numbers of 6 bits have a scale for each half of the group.
// They are float16, or nested: integers of 8 bits, times a float16 of eight groups.
//
// A panel has two strips of 16 outputs. Nested ones begin each eight groups with the float16
// factors of scales and of minima. Each group has the scales of its outputs, their minima if there
// are any, and then the numbers, as words of four bytes for each output: in 8 bits, eight words of
// four inputs. Otherwise four words have the low four bits of eight inputs each, of which the low
// halves of the bytes are the first four. Before them are the high bits: a word for each further
// bit of a number. So a thread reads its panels from one end to the other.
//
// There is one form for any number of rows: numbers are unpacked in registers, once for each tile
// of rows.
#pragma once

#include "decoder.h"
#include "digit_rows.h"
#include "multiply.h"

namespace quire {

constexpr int64_t PANEL_STRIPS = 2, PANEL = PANEL_STRIPS * LANES;
// Groups that share the factors of nested scales.
constexpr int64_t NESTED_GROUPS = 8;
// Rows of digits in a register tile; a tile of COLUMNS part vectors has twice as many accumulators.
constexpr int PANEL_ROWS = 6, COLUMNS = PARTS == 1 ? PANEL_STRIPS : 1;
// The sums of a row of digits: of two panels, which are multiplied by a tile in turns. So a row is read
// from the first-level cache for the second panel.
constexpr int64_t SUMS_STRIDE = TILE_STRIPS * LANES;
// Numbers are prefetched this many bytes ahead.
constexpr int64_t PANEL_AHEAD = 4096;

// The scales of a group of an output.
constexpr int64_t scales_of(int64_t bits) { return bits == 6 ? 2 : 1; }

// By how much the numbers are larger than what they stand for, as a power of two; only without
// minima.
constexpr int64_t offset_bits(int64_t bits) { return bits - 1; }

// The sizes of a panel, in bytes.
struct PanelShape {
  int64_t outer;    // The factors of nested scales and minima, of eight groups; or 0.
  int64_t scales;   // The scales of a group.
  int64_t factors;  // Scales and minima of a group.
  int64_t group;    // All of a group, without `outer`.
  int64_t all;      // All groups.

  PanelShape(const QuirePanels& panels, int64_t inputs) {
    const int64_t kinds = panels.has_minima ? 2 : 1, half = sizeof(uint16_t);
    outer = panels.is_nested ? kinds * PANEL * half : 0;
    const int64_t factor = PANEL * (panels.is_nested ? 1 : half);
    scales = scales_of(panels.bits) * factor;
    factors = scales + (kinds - 1) * factor;
    group = factors + PANEL * GROUP * panels.bits / 8;
    const int64_t groups = inputs / GROUP;
    all = group * groups + outer * (groups / NESTED_GROUPS);
  }
};

// The strips first .. last-1 of a product, which have one form.
struct PanelPart {
  const QuirePanels* panels;
  int64_t first, last;
};

// The part that has a strip; the last part if none has it.
inline PanelPart part_of(const QuireLinear& linear, int64_t strip) {
  PanelPart part = {linear.parts, 0, linear.parts->num_strips};
  const QuirePanels* const last = linear.parts + linear.num_parts - 1;
  while (strip >= part.last && part.panels < last) {
    part.panels++;
    part.first = part.last;
    part.last += part.panels->num_strips;
  }
  return part;
}

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

// Integers of 8 bits as float32. The compiler converts bytes one by one, which takes longer than all
// products of a group, so they are named instructions.
inline PartVector widen_bytes(const char* from) {
#if defined(__AVX512F__)
  const PartIntegers integers =
      (PartIntegers)_mm512_maskz_cvtepi8_epi32(0xffff, load<__m128i>(from));
#elif defined(__AVX2__)
  typedef char Characters __attribute__((vector_size(16)));
  const PartIntegers integers = (PartIntegers)__builtin_ia32_pmovsxbd256(load<Characters>(from));
#else
  typedef int8_t PartBytes __attribute__((vector_size(PART_BYTES / 4)));
  const auto integers = __builtin_convertvector(load<PartBytes>(from), PartIntegers);
#endif
  return __builtin_convertvector(integers, PartVector);
}

// Scales or minima of a group, from byte `column` of their words on. `outer` has the factors of
// nested ones; null if they are not.
inline PartVector factors_at(const char* from, const char* outer, int64_t column) {
  if (outer == nullptr) return widen_halves(from + column / 2);
  return widen_halves(outer + column / 2) * widen_bytes(from + column / 4);
}

// Word `word` of the numbers of a group.
template <int BITS>
inline PartWords numbers_at(const char* from, int64_t word) {
  constexpr int64_t WORD = PANEL * sizeof(uint32_t), HIGH = BITS - 4;
  if constexpr (BITS == 8) return load<PartWords>(from + word * WORD);
  const PartWords pair = load<PartWords>(from + (HIGH + word / 2) * WORD);
  const PartWords low = (word % 2 ? pair >> 4 : pair) & 0x0f0f0f0fu;
  if constexpr (BITS == 4) return low;
  constexpr int64_t PER_WORD = 8 / (HIGH > 0 ? HIGH : 1);
  const PartWords high = load<PartWords>(from + word / PER_WORD * WORD);
  const int place = (int)(word % PER_WORD * HIGH);
  constexpr uint32_t MASK = ((1u << HIGH) - 1) * 0x10101010u;
  return low | ((place < 4 ? high << (4 - place) : high >> (place - 4)) & MASK);
}

// sums[r] = row of digits r . COLUMNS part vectors of the panel, from byte `column` of each word
// on. `ahead` is prefetched group by group; null for nothing.
template <int BITS, int R>
void panel_kernel(const DigitGroup* rows, int64_t groups, const char* panel,
                  const PanelShape& shape, int64_t column, const char* ahead, float* sums) {
  constexpr int SCALES = (int)scales_of(BITS), SHARE = (int)GROUP_WORDS / SCALES;
  const bool has_minima = shape.factors > shape.scales;
  // Of a group, and of its share of what eight groups have in common.
  const int64_t step = shape.all / groups;
  const char* outer = nullptr;
  PartVector total[R][COLUMNS] = {};
  for (int64_t g = 0; g < groups; g++, panel += shape.group, rows++) {
    if (shape.outer > 0 && g % NESTED_GROUPS == 0) {
      outer = panel;
      panel += shape.outer;
    }
    const char* const numbers = panel + shape.factors + column;
#pragma GCC unroll 2
    for (int part = 0; part < SCALES; part++) {
      PartIntegers sum[R][COLUMNS];
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const DigitGroup& row = rows[r * groups];
        const int32_t start = SCALES == 1 ? row.whole : row.halves[part];
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; c++)
          sum[r][c] = has_minima ? PartIntegers{} : (start - PartIntegers{}) << offset_bits(BITS);
      }
#pragma GCC unroll 8
      for (int64_t word = part * SHARE; word < (part + 1) * SHARE; word++) {
        PartWords words[COLUMNS];
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; c++)
          words[c] = numbers_at<BITS>(numbers + c * PART_BYTES, word);
#pragma GCC unroll 2
        for (int i = 0; i < Dot::FACTORS; i++)
#pragma GCC unroll 6
          for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int c = 0; c < COLUMNS; c++)
              sum[r][c] = Dot::multiply(sum[r][c], rows[r * groups].factors[word][i],
                                        Dot::columns(words[c], i));
      }
      const char* const scales = panel + shape.scales / SCALES * part;
#pragma GCC unroll 2
      for (int c = 0; c < COLUMNS; c++) {
        const PartVector scale = factors_at(scales, outer, column + c * PART_BYTES);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
          total[r][c] +=
              scale * rows[r * groups].scale * __builtin_convertvector(sum[r][c], PartVector);
      }
    }
    if (ahead != nullptr) {
      for (int64_t line = 0; line < step; line += 64) prefetch_line(ahead + line);
      ahead += step;
    }
    if (!has_minima) continue;
    const char* const minima = outer == nullptr ? nullptr : outer + shape.outer / 2;
#pragma GCC unroll 2
    for (int c = 0; c < COLUMNS; c++) {
      const PartVector minimum =
          factors_at(panel + shape.scales, minima, column + c * PART_BYTES);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) total[r][c] += minimum * rows[r * groups].sum;
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int c = 0; c < COLUMNS; c++)
      store((char*)(sums + r * SUMS_STRIDE) + column + c * PART_BYTES, total[r][c]);
}

// The sums of `count` rows of digits, PANEL_ROWS at most, with a whole panel.
inline void multiply_panel(const DigitGroup* rows, int64_t count, int64_t groups, const char* panel,
                           int64_t bits, const PanelShape& shape, const char* ahead, float* sums) {
  typedef decltype(&panel_kernel<8, 1>) Kernel;
#define QUIRE_KERNELS(BITS)                                                            \
  {panel_kernel<BITS, 1>, panel_kernel<BITS, 2>, panel_kernel<BITS, 3>,                \
   panel_kernel<BITS, 4>, panel_kernel<BITS, 5>, panel_kernel<BITS, 6>}
  static constexpr Kernel kernels[][PANEL_ROWS] = {QUIRE_KERNELS(4), QUIRE_KERNELS(5),
                                                   QUIRE_KERNELS(6), QUIRE_KERNELS(8)};
#undef QUIRE_KERNELS
  const Kernel kernel = kernels[bits == 8 ? 3 : bits - 4][count - 1];
  for (int64_t column = 0; column < PANEL * 4; column += COLUMNS * PART_BYTES, ahead = nullptr)
    kernel(rows, groups, panel, shape, column, ahead, sums);
}

// Every row times the strips first .. last-1; arguments as in multiply.h. `first` is even.
template <class Epilogue>
void multiply_panels(const DigitRows& rows, const QuireLinear& linear, int64_t first, int64_t last,
                     const PrefetchRange& next, float* sums, const Epilogue& epilogue) {
  for (int64_t strip = first; strip < last;) {
    const PanelPart part = part_of(linear, strip);
    const PanelShape shape(*part.panels, linear.inputs);
    const int64_t end = std::min(last, part.last);
    const char* panel =
        (const char*)part.panels->packed + (strip - part.first) / PANEL_STRIPS * shape.all;
    for (int64_t count; strip < end; strip += count, panel += count / PANEL_STRIPS * shape.all) {
      count = std::min<int64_t>(TILE_STRIPS, end - strip);
      bool first_tile = true;
      for_each_tile(rows.count, PANEL_ROWS / rows.digits, [&](int64_t r, int64_t n) {
        for (int64_t s = 0; s < count; s += PANEL_STRIPS) {
          const char* const from = panel + s / PANEL_STRIPS * shape.all;
          const char* ahead = nullptr;
          if (first_tile)
            ahead = strip + s + PANEL_STRIPS >= last ? (const char*)next.start : from + PANEL_AHEAD;
          multiply_panel(rows.at(r), n * rows.digits, rows.groups, from, part.panels->bits, shape,
                         ahead, sums + s * LANES);
        }
        first_tile = false;
        for (int64_t i = 0; i < n; i++) {
          float* const to = sums + i * rows.digits * SUMS_STRIDE;
          for (int64_t d = 1; d < rows.digits; d++)
            for (int64_t j = 0; j < count * LANES; j += LANES)
              store(to + j, load<Vector>(to + j) + load<Vector>(to + d * SUMS_STRIDE + j));
          epilogue(rows.first_row + r + i, strip, to, count);
        }
      });
    }
  }
}

// Reads the weights of one output.
inline void read_output(const QuireLinear& linear, int64_t output, float* to) {
  const PanelPart part = part_of(linear, output / LANES);
  const int64_t bits = part.panels->bits, panel = output / PANEL - part.first / PANEL_STRIPS;
  const int64_t column = output % PANEL, vector = column / PART_LANES * PART_BYTES;
  const PanelShape shape(*part.panels, linear.inputs);
  const char* group = (const char*)part.panels->packed + panel * shape.all;
  const char* outer = nullptr;
  for (int64_t i = 0; i < linear.inputs; i += GROUP, group += shape.group) {
    if (shape.outer > 0 && i % (GROUP * NESTED_GROUPS) == 0) {
      outer = group;
      group += shape.outer;
    }
    const bool has_minima = shape.factors > shape.scales;
    const char* const minima = outer == nullptr ? nullptr : outer + shape.outer / 2;
    const float minimum =
        has_minima ? factors_at(group + shape.scales, minima, vector)[column % PART_LANES] : 0.0f;
    const float offset = has_minima ? 0.0f : (float)(1 << offset_bits(bits));
    const int64_t scales = scales_of(bits), share = GROUP_WORDS / scales;
    float scale = 0.0f;
    for (int64_t word = 0; word < GROUP_WORDS; word++) {
      if (word % share == 0) {
        const char* const at = group + shape.scales / scales * (word / share);
        scale = factors_at(at, outer, vector)[column % PART_LANES];
      }
      const char* const numbers = group + shape.factors + vector;
      const PartWords words = bits == 4   ? numbers_at<4>(numbers, word)
                              : bits == 5 ? numbers_at<5>(numbers, word)
                              : bits == 6 ? numbers_at<6>(numbers, word)
                                          : numbers_at<8>(numbers, word);
      const uint32_t four = words[column % PART_LANES];
      for (int64_t j = 0; j < 4; j++) {
        const auto number = (float)(four >> 8 * j & 255);
        to[i + word * 4 + j] = scale * (number - offset) + minimum;
      }
    }
  }
}

}  // namespace quire
