// The micro-kernels for the matrix unit (AMX), which multiplies bfloat16 many times as fast as the
// vector units. Knows nothing of the matrix product around them.
//
// Sixteen words of a strip fill a tile register and are the second operand. The first operand is
// sixteen words of each of sixteen rows. One instruction adds to each of 256 accumulators the
// products of the words' first elements, summed in order, and those of the second elements, all in
// float32 and with denormals flushed to zero. So a row's sums do not depend on the rows beside it,
// nor on the row's number in the register.
#pragma once

#include <algorithm>
#include <type_traits>

#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define QUIRE_MATRIX_UNIT
#endif

namespace quire {

// Rows of a tile register. The unit always reads this many rows, and the results of missing rows
// are discarded: readable memory for them must follow the rows of a product; its contents do not
// matter.
constexpr int64_t UNIT_HEIGHT = 16;

#if !defined(QUIRE_MATRIX_UNIT)

struct MatrixUnit {
  ~MatrixUnit() {}  // Avoids warnings of unused variables.
};

#else

// Words of a row, or of a strip's column, in a tile register.
constexpr int64_t UNIT_WORDS = 16;

// Configures the unit for the calling thread, for the lifetime of the object. Tile registers 0 to 3
// are accumulators, 4 and 5 hold rows, 6 holds a strip.
class MatrixUnit {
 public:
  MatrixUnit() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const shapes;
    asm volatile("ldtilecfg (%0)" ::"r"(&shapes) : "memory");
  }
  ~MatrixUnit() { asm volatile("tilerelease"); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
};

// The address sanitizer does not see what AMX instructions access. For it, this reads the first and
// the last byte of each of the sixteen lines.
inline void touch_lines(const void* at, int64_t stride) {
#if defined(__SANITIZE_ADDRESS__)
  for (int64_t r = 0; r < UNIT_HEIGHT; r++) {
    const volatile char* const line = (const char*)at + r * stride;
    (void)line[0], (void)line[63];
  }
#else
  (void)at, (void)stride;
#endif
}

// Strides are in bytes. Written as assembly, because the compiler's intrinsics do not say that
// memory is accessed.
template <int REGISTER>
inline void load_register(const void* from, int64_t stride) {
  touch_lines(from, stride);
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(REGISTER) : "memory");
}
template <int REGISTER>
inline void store_register(void* to, int64_t stride) {
  touch_lines(to, stride);
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

// Loads and stores a tile register of accumulators, of which `count` rows are in memory (16 if
// more).
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

// Steps of deferred work that run beside one step of the unit.
constexpr int64_t DEFERRED_STEPS = 2;

// Cache lines to be prefetched into cache level LEVEL during a step: `count` of each of STREAMS
// streams.
template <int LEVEL, int STREAMS>
struct Lines {
  const char* at[std::max(STREAMS, 1)] = {};
  int64_t count = 0;

  void prefetch(int64_t number) {
    for (int64_t i = 0; i < number; i++)
#pragma GCC unroll 4
      for (int stream = 0; stream < STREAMS; stream++) {
        __builtin_prefetch(at[stream], 0, LEVEL == 1 ? 3 : 2);
        at[stream] += 64;
      }
  }
};

// The cache lines that a step of H times W tile products prefetches. Only tiles of one tile
// register of rows (H = 1) use the near prefetch.
template <int H, int W>
struct StepLines {
  Lines<2, TILE_STRIPS> far;
  Lines<1, H == 1 ? W : 0> near;

  // Prefetches one of `parts` equal parts.
  void prefetch_part(int64_t parts) {
    far.prefetch((far.count + parts - 1) / parts);
    if constexpr (H == 1) near.prefetch((near.count + parts - 1) / parts);
  }
};

// Adds the products of sixteen words of H times sixteen rows with W strips, from word k on. Each
// operand is loaded once. A tile register is cleared after its last use: with fewer registers in
// use, loads are faster at times when another process seems to run on the core's other hardware
// thread.
template <int H, int W>
inline void add_words(const uint32_t* rows, int64_t stride, const uint32_t* const* strips,
                      int64_t k, StepLines<H, W> lines) {
  for_each_number<W>([&](auto w) {
    load_register<6>(strips[w] + k * LANES, LANES * 4);
    for_each_number<H>([&](auto h) {
      if constexpr (w == 0) load_register<4 + h>(rows + h * UNIT_HEIGHT * stride, stride * 4);
      add_products<h * W + w, 4 + h, 6>();
      if constexpr (w == W - 1) clear_register<4 + h>();
      lines.prefetch_part(H * W);
    });
    clear_register<6>();
  });
}

// Adds the last words, too few for a tile register: they are copied and padded with zeros.
template <int H, int W>
inline void add_tail(const uint32_t* rows, int64_t stride, const uint32_t* const* strips, int64_t k,
                     int64_t left) {
  alignas(64) uint32_t row_words[H * UNIT_HEIGHT * UNIT_WORDS];
  alignas(64) uint32_t strip_words[W][UNIT_WORDS * LANES];
  const uint32_t* copies[W];
  const Integers present = LANE_NUMBERS < (int32_t)left;
  for (int64_t r = 0; r < H * UNIT_HEIGHT; r++) {
    const Words words = load<Words>(rows + r * stride + k);
    store(row_words + r * UNIT_WORDS, present ? words : Words{});
  }
  for (int w = 0; w < W; w++) {
    copies[w] = strip_words[w];
    std::fill_n(strip_words[w], UNIT_WORDS * LANES, 0);
    std::copy_n(strips[w] + k * LANES, left * LANES, strip_words[w]);
  }
  add_words<H, W>(row_words, UNIT_WORDS, copies, 0, {});
}

// sums[r][s] (+)= rows[r] . strips[first + s], for `count` rows, 16 * H at most, and W strips.
template <int H, int W>
void multiply_registers(const uint32_t* rows, int64_t stride, int64_t count, const Strips& strips,
                        int64_t first, const Prefetch& prefetch, float* sums, int64_t sums_stride,
                        bool add) {
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
  const auto at = [&](int64_t segment) { return strips.at + segment * strips.count + first; };
  // The lines are always prefetched from TILE_STRIPS ranges: fewer streams are divided into halves
  // or quarters. Each word prefetches this many bytes of each range.
  const int64_t pace = prefetch.num_streams * 64 / TILE_STRIPS;
  const auto lines = [&](int64_t segment, int64_t k, int64_t words) {
    StepLines<H, W> step;
    if (prefetch.num_streams > 0) {
      const int64_t shares = TILE_STRIPS / prefetch.num_streams;
      const int64_t done = prefetch.offset + (lines_before(strips, segment) + k) * pace;
      for (int64_t i = 0; i < TILE_STRIPS; i++)
        step.far.at[i] =
            streams_of(prefetch, segment)[i / shares] + i % shares * inner * pace + done;
      step.far.count = words * pace / 64;
    }
    if constexpr (H == 1) {
      if (prefetch.next_strips != nullptr) {
        const uint32_t* const next = k + NEAR_WORDS < inner
                                         ? at(segment)[0] + (k + NEAR_WORDS) * LANES
                                         : prefetch.next_strips + (k + NEAR_WORDS - inner) * LANES;
        for (int64_t w = 0; w < W; w++)
          step.near.at[w] = (const char*)(next + (at(segment)[w] - at(segment)[0]));
        step.near.count = words;
      }
    }
    return step;
  };
  const auto run_deferred = [&] {
    if (strips.deferred != nullptr) strips.deferred->run(DEFERRED_STEPS);
  };
  for (int64_t segment = 0; segment < strips.num_segments; segment++, rows += inner) {
    int64_t k = 0;
    for (; k + UNIT_WORDS <= inner; k += UNIT_WORDS) {
      add_words<H, W>(rows + k, stride, at(segment), k, lines(segment, k, UNIT_WORDS));
      run_deferred();
    }
    if (k < inner) {
      lines(segment, k, inner - k).prefetch_part(1);
      add_tail<H, W>(rows, stride, at(segment), k, inner - k);
    }
  }
  for_each_sums([&](auto number, float* to, int64_t left) {
    store_sums<number>(to, sums_stride, left);
    clear_register<number>();
  });
}

// Tiles of 16 rows by four strips, or of 32 rows by two strips, which read each strip less often.
template <>
struct Tiles<BFloat16> {
  static constexpr int64_t ROWS = 2 * UNIT_HEIGHT, WORDS = UNIT_WORDS;
  static constexpr bool VECTORS_IDLE = true;
  // Never: the unit is expected to be faster than memory can bring all strips to each thread. Not
  // measured.
  static constexpr int64_t OWN_ROWS = 0;

  static TileShape shape(int64_t num_rows) {
    if (num_rows <= UNIT_HEIGHT) return {UNIT_HEIGHT, TILE_STRIPS, TILE_STRIPS, true};
    return {ROWS, TILE_STRIPS / 2, num_rows <= ROWS ? 2 : 1, false};
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
      tiles[high][width - 1](rows, stride, count, strips, first,
                             first == 0 ? strips.prefetch : Prefetch(), sums + first * LANES,
                             sums_stride, add);
    }
  }
};

#endif

}  // namespace quire
