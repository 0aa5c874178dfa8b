// Activation rows as integers of 8 bits, for products with quantized weights. Knows no layer.
//
// A row is a sum of rows of digits. In each group of 32 inputs, the first digit of a value is the
// value over the group's scale, rounded to -127 .. 127; the next digit is the rest in 254ths of
// that scale, and so on. Products of integers are exact, so the result of a row depends neither on
// other rows nor on the order in which integers are added.
#pragma once

#include <algorithm>

#include "decoder.h"
#include "rounded_rows.h"
#include "team.h"
#include "workspace.h"

namespace quire {

// Inputs that share a scale, and the 32-bit words that hold their digits.
constexpr int64_t GROUP = 32, GROUP_WORDS = 8;
// Most digits of a value; as many have the precision of float32.
constexpr int64_t MAX_DIGITS = 3;
// With at most this many rows, every thread computes the digits of all rows for itself: that is
// faster than a barrier.
constexpr int64_t OWN_DIGIT_ROWS = 4;

typedef int8_t Bytes __attribute__((vector_size(16)));
typedef int32_t PartIntegers __attribute__((vector_size(PART_BYTES)));

// What multiplies four numbers of 0 .. 255 by four digits and adds all products to each lane. Takes
// FACTORS steps; step i adds factors[i] * columns(numbers, i).
struct Dot {
#if defined(__AVX512VNNI__)
  static constexpr int FACTORS = 1;
  static PartWords columns(PartWords numbers, int) { return numbers; }
  static PartIntegers multiply(PartIntegers sum, uint32_t factors, PartWords columns) {
    return (PartIntegers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)columns,
                                             _mm512_set1_epi32((int)factors));
  }
#else
  // Without such an instruction, pairs of 16-bit integers are multiplied: the bytes 0 and 2, then
  // the bytes 1 and 3.
  static constexpr int FACTORS = 2;
  static PartWords columns(PartWords numbers, int i) {
    return (i == 0 ? numbers : numbers >> 8) & 0x00ff00ffu;
  }
  static PartIntegers multiply(PartIntegers sum, uint32_t factors, PartWords columns) {
    const PartWords both = factors - PartWords{};
#if defined(__AVX512BW__)
    return sum + (PartIntegers)_mm512_madd_epi16((__m512i)both, (__m512i)columns);
#elif defined(__AVX2__)
    typedef short Shorts __attribute__((vector_size(32)));
    return sum + (PartIntegers)__builtin_ia32_pmaddwd256((Shorts)both, (Shorts)columns);
#elif defined(__SSE2__)
    typedef short Shorts __attribute__((vector_size(16)));
    return sum + (PartIntegers)__builtin_ia32_pmaddwd128((Shorts)both, (Shorts)columns);
#else
    return sum + ((PartIntegers)(both << 16) >> 16) * (PartIntegers)(columns & 0xffffu) +
           ((PartIntegers)both >> 16) * (PartIntegers)(columns >> 16);
#endif
  }
#endif
};

// The digits of one group of a row.
struct DigitGroup {
  uint32_t factors[GROUP_WORDS][Dot::FACTORS];
  float scale;
  float sum;  // Of the digits, times the scale: what a minimum of weights is multiplied by.
  // The sums of all digits and of each half of them, negated: the shares of an offset of one.
  int32_t whole, halves[2];
};

struct DigitRows {
  const DigitGroup* rows;  // [rows][digits][groups].
  int64_t groups, digits, count;
  int64_t first_row = 0;  // Index of the first of these rows in the product.

  const DigitGroup* at(int64_t row) const { return rows + row * digits * groups; }
  DigitRows part(const Share& share) const {
    return {at(share.first), groups, digits, share.last - share.first, first_row + share.first};
  }
};

// The digits of 32 values, in `digits` groups that are `stride` apart.
inline void split_group(Vector first, Vector second, int64_t digits, int64_t stride,
                        DigitGroup* to) {
  // Compared as integers, a NaN is larger than infinity, and infinity is larger than all others.
  const Integers a = (Integers)absolute(first), b = (Integers)absolute(second);
  const auto larger = [](Integers a, Integers b) { return a > b ? a : b; };
  const int32_t bits = reduce_lanes(larger(a, b), larger);
  float highest;
  std::memcpy(&highest, &bits, sizeof highest);
  // Below 1e-30 a group is zero, and its scale has an inverse otherwise.
  const bool is_zero = highest < 1e-30f;
  float scale = is_zero ? 0.0f : highest / 127.0f, inverse = is_zero ? 0.0f : 127.0f / highest;
  for (int64_t d = 0; d < digits; d++, to += stride) {
    const Vector x = round_to_integer(first * inverse), y = round_to_integer(second * inverse);
    first -= x * scale;
    second -= y * scale;
    // Of each half, in one vector: sums of such integers are exact in any order.
    const Vector pairs = LANE_NUMBERS < LANES / 2 ? x + __builtin_shuffle(x, LANE_NUMBERS ^ 8)
                                                  : y + __builtin_shuffle(y, LANE_NUMBERS ^ 8);
    const Vector fours = pairs + __builtin_shuffle(pairs, LANE_NUMBERS ^ 4);
    const Vector eights = fours + __builtin_shuffle(fours, LANE_NUMBERS ^ 2);
    const Vector sums = eights + __builtin_shuffle(eights, LANE_NUMBERS ^ 1);
    const float totals[2] = {sums[0], sums[LANES / 2]};
    to->scale = scale;
    to->sum = (totals[0] + totals[1]) * scale;
    // A row with a NaN or an infinity has no integer sum; its scale makes its products NaN.
    for (int half = 0; half < 2; half++)
      to->halves[half] = totals[half] == totals[half] ? -(int32_t)totals[half] : 0;
    to->whole = to->halves[0] + to->halves[1];
    uint32_t words[GROUP_WORDS];
    store(words, __builtin_convertvector(__builtin_convertvector(x, Integers), Bytes));
    store(words + GROUP_WORDS / 2,
          __builtin_convertvector(__builtin_convertvector(y, Integers), Bytes));
    for (int64_t word = 0; word < GROUP_WORDS; word++) {
      if constexpr (Dot::FACTORS == 1) {
        to->factors[word][0] = words[word];
      } else {
        int8_t bytes[4];
        std::memcpy(bytes, words + word, sizeof bytes);
        for (int i = 0; i < 2; i++)
          to->factors[word][i] = (uint32_t)(uint16_t)bytes[i] | (uint32_t)(uint16_t)bytes[i + 2]
                                                                    << 16;
      }
    }
    scale /= 254.0f;
    inverse *= 254.0f;
  }
}

// The digits of the rows of products, in memory of a step.
template <class Row>
class DigitWriter {
 public:
  // Requests memory for `rows` rows of any of the products.
  template <class Products>
  void lay_out(Workspace& workspace, const Products& products, int64_t rows, int64_t threads) {
    int64_t groups = 0;  // Of a row, for all digits.
    for (const auto& product : products)
      if (product.linear.num_parts > 0)
        groups = std::max(groups, product.linear.inputs / GROUP * product.linear.digits);
    own_stride_ = std::min(rows, OWN_DIGIT_ROWS) * groups;
    if (groups > 0) workspace.add(&groups_, std::max(rows * groups, threads * own_stride_));
  }

  // The digits of `count` rows of the inputs of a layer. All threads must call this.
  DigitRows of(const RoundedRows<Row>& from, int64_t count, const QuireLinear& linear, Team& team,
               int member) const {
    const int64_t groups = linear.inputs / GROUP, digits = linear.digits;
    const bool own = count <= OWN_DIGIT_ROWS;
    DigitGroup* const to = groups_ + (own ? member * own_stride_ : 0);
    const Share mine = own ? Share(0, count) : Share(count, member, team.size());
    for (int64_t r = mine.first; r < mine.last; r++)
      split_row(from.at(r), groups, digits, to + r * digits * groups);
    if (!own) team.barrier();
    return {to, groups, digits, count};
  }

 private:
  static void split_row(const RoundedRow<Row>& row, int64_t groups, int64_t digits,
                        DigitGroup* to) {
    const auto value = [&](int64_t i) {
      const Vector high = Row::widen16(row.values + i);
      return row.low != nullptr ? high + Row::widen16(row.low + i) : high;
    };
    for (int64_t g = 0; g < groups; g++)
      split_group(value(g * GROUP), value(g * GROUP + LANES), digits, groups, to + g);
  }

  int64_t own_stride_ = 0;
  DigitGroup* groups_ = nullptr;
};

}  // namespace quire
