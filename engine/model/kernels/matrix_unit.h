// The processor's unit for small matrices (AMX), which multiplies bfloat16 many times as fast as
// vectors do. Knows no product.
//
// A strip is what the unit takes as its second matrix: sixteen words of it fill a register. The
// first matrix is sixteen rows, sixteen words of each. A step adds to each of their 256 sums the
// products of the words' first elements, summed in order, and those of their second elements, all in
// float32 and without denormals. So a row's sums do not depend on the rows beside it, nor on where
// they are in a register.
#pragma once

#include <algorithm>
#include <type_traits>

#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define QUIRE_MATRIX_UNIT
#endif

namespace quire {

// Rows of a register. So many are read even where there are fewer, and what comes of the others is
// thrown away: behind the rows of a product there has to be memory for them, whatever it holds.
constexpr int64_t UNIT_HEIGHT = 16;

#if !defined(QUIRE_MATRIX_UNIT)

struct MatrixUnit {
  ~MatrixUnit() {}  // So that nobody takes one for a variable without use.
};

#else

// While one lives its thread has the unit. Registers 0 to 3 are sums; 4 holds sixteen words of
// sixteen rows and 6 as many of a strip, 5 and 7 hold eight words of them.
class MatrixUnit {
 public:
  MatrixUnit() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 32, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 8};
    } const shapes;
    asm volatile("ldtilecfg (%0)" ::"r"(&shapes) : "memory");
  }
  ~MatrixUnit() { asm volatile("tilerelease"); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
};

// Strides are in bytes. What the compiler has for these does not tell it which memory is read.
template <int REGISTER>
inline void load_register(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(REGISTER) : "memory");
}
template <int REGISTER>
inline void store_register(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(REGISTER) : "memory");
}
template <int REGISTER>
inline void clear_register() {
  asm volatile("tilezero %%tmm%c0" ::"i"(REGISTER));
}
template <int SUMS, int ROWS, int STRIP>
inline void add_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(STRIP));
}

// A register of sums from its place and back, where `count` rows are or more.
template <int REGISTER>
inline void load_sums(const float* from, int64_t stride, int64_t count) {
  if (count >= UNIT_HEIGHT) return load_register<REGISTER>(from, stride * 4);
  alignas(64) float all[UNIT_HEIGHT * LANES];
  for (int64_t r = 0; r < count; r++) store(all + r * LANES, load<Vector>(from + r * stride));
  load_register<REGISTER>(all, LANES * 4);
}
template <int REGISTER>
inline void store_sums(float* to, int64_t stride, int64_t count) {
  if (count >= UNIT_HEIGHT) return store_register<REGISTER>(to, stride * 4);
  alignas(64) float all[UNIT_HEIGHT * LANES];
  store_register<REGISTER>(all, LANES * 4);
  for (int64_t r = 0; r < count; r++) store(to + r * stride, load<Vector>(all + r * LANES));
}

// Calls body with each of the numbers 0 .. COUNT-1, as a constant.
template <int COUNT, int NUMBER = 0, class Body>
inline void for_each_number(const Body& body) {
  if constexpr (NUMBER < COUNT) {
    body(std::integral_constant<int, NUMBER>());
    for_each_number<COUNT, NUMBER + 1>(body);
  }
}

// What is fetched during a step: so many lines from there on.
struct Fetch {
  const char* at;
  int64_t lines;

  void part(int64_t count) {
    for (int64_t i = 0; i < count; i++, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// Adds WORDS words, sixteen or eight, of H times sixteen rows, and of W strips from word k on.
template <int H, int W, int WORDS>
inline void add_words(const uint32_t* rows, int64_t stride, const uint32_t* const* strips,
                      int64_t k, Fetch fetch) {
  constexpr int ROWS = WORDS == 16 ? 4 : 5, STRIP = WORDS == 16 ? 6 : 7;
  const int64_t each = fetch.lines / (H * W);
  for_each_number<H>([&](auto h) {
    load_register<ROWS>(rows + h * UNIT_HEIGHT * stride, stride * 4);
    for_each_number<W>([&](auto w) {
      // Back and forth: the last strip is the next rows' first.
      constexpr int S = h % 2 == 0 ? w : W - 1 - w;
      if constexpr (h == 0 || w > 0) load_register<STRIP>(strips[S] + k * LANES, LANES * 4);
      add_products<h * W + S, ROWS, STRIP>();
      fetch.part(each);
    });
  });
}

// Adds the last words of every segment, which fill no register.
inline void add_rest(const uint32_t* rows, int64_t stride, int64_t count, const Strips& strips,
                     float* sums, int64_t sums_stride) {
  for (int64_t r = 0; r < count; r++)
    for (int64_t s = 0; s < strips.count; s++) {
      float* const to = sums + r * sums_stride + s * LANES;
      PartVector sum = load<PartVector>(to);
      for (int64_t segment = 0; segment < strips.num_segments; segment++) {
        const uint32_t* const row = rows + r * stride + segment * strips.inner;
        const uint32_t* const at = strips.at[segment * strips.count + s];
        for (int64_t k = strips.inner / 8 * 8; k < strips.inner; k++)
          sum = BFloat16::dot(sum, row[k], load<PartWords>(at + k * LANES));
      }
      store(to, sum);
    }
}

// sums[r][s] (+)= rows[r] . strips[first + s], for `count` rows, 16 * H at most, and W strips.
template <int H, int W>
void multiply_registers(const uint32_t* rows, int64_t stride, int64_t count, const Strips& strips,
                        int64_t first, int64_t lines, float* sums, int64_t sums_stride, bool add) {
  const auto for_each_sums = [&](const auto& body) {
    for_each_number<H * W>([&](auto number) {
      constexpr int64_t ROW = number / W * UNIT_HEIGHT;
      body(number, sums + ROW * sums_stride + number % W * LANES, count - ROW);
    });
  };
  for_each_sums([&](auto number, float* from, int64_t left) {
    if (add)
      load_sums<number>(from, sums_stride, left);
    else
      clear_register<number>();
  });
  const int64_t inner = strips.inner;
  const auto fetch = [&](int64_t segment, int64_t k, int64_t words) {
    return Fetch{lines > 0 ? strips.fetch[segment] + k * lines * 64 : nullptr, words * lines};
  };
  const auto at = [&](int64_t segment) { return strips.at + segment * strips.count + first; };
  int64_t segment = 0;
  // Two at a time: half of a register takes as long as a whole one.
  if (strips.joined && inner == 8)
    for (; segment + 2 <= strips.num_segments; segment += 2, rows += 2 * inner) {
      fetch(segment, 0, 8).part(8 * lines);
      add_words<H, W, 16>(rows, stride, at(segment), 0, fetch(segment + 1, 0, 8));
    }
  for (; segment < strips.num_segments; segment++, rows += inner) {
    int64_t k = 0;
    for (; k + 16 <= inner; k += 16)
      add_words<H, W, 16>(rows + k, stride, at(segment), k, fetch(segment, k, 16));
    if (k + 8 <= inner)
      add_words<H, W, 8>(rows + k, stride, at(segment), k, fetch(segment, k, 8));
  }
  for_each_sums([&](auto number, float* to, int64_t left) {
    store_sums<number>(to, sums_stride, left);
  });
}

// Sixteen rows by four strips at once, or 32 by two, which are read less often.
template <>
struct Tiles<BFloat16> {
  static constexpr int64_t ROWS = 2 * UNIT_HEIGHT, WORDS = 16;

  static Cut cut(int64_t num_rows) {
    if (num_rows <= UNIT_HEIGHT) return {UNIT_HEIGHT, TILE_STRIPS, TILE_STRIPS};
    return {ROWS, TILE_STRIPS / 2, num_rows <= ROWS ? 2 : 1};
  }

  static void multiply(int64_t count, const uint32_t* rows, int64_t stride, const Strips& strips,
                       float* sums, int64_t sums_stride, bool add) {
    static constexpr decltype(&multiply_registers<1, 1>) tiles[2][TILE_STRIPS] = {
        {multiply_registers<1, 1>, multiply_registers<1, 2>, multiply_registers<1, 3>,
         multiply_registers<1, 4>},
        {multiply_registers<2, 1>, multiply_registers<2, 2>}};
    const bool high = count > UNIT_HEIGHT;
    const int64_t most = high ? TILE_STRIPS / 2 : TILE_STRIPS;
    for (int64_t first = 0; first < strips.count; first += most) {
      const int64_t width = std::min(most, strips.count - first);
      tiles[high][width - 1](rows, stride, count, strips, first, first == 0 ? strips.lines : 0,
                             sums + first * LANES, sums_stride, add);
    }
    if (strips.inner % 8 != 0) add_rest(rows, stride, count, strips, sums, sums_stride);
  }
};

#endif

}  // namespace quire
