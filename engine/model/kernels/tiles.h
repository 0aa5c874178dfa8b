// The micro-kernels: a register tile is a few rows times a few strips, its accumulators stay in
// registers. Knows nothing of the matrix product around it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "deferred_work.h"
#include "vector.h"

namespace quire {

// Rows and strips of a register tile: 24 accumulators, 4 strips and one broadcast element fit in 32
// registers. A tall tile has as many accumulators with half the strips.
constexpr int TILE_ROWS = 6, TILE_STRIPS = 4;
constexpr int TALL_ROWS = 12, TALL_STRIPS = 2;

// Prefetches one cache line into the cache level QUIRE_FETCH_LEVEL, 1 or 2
// (docs/explanation/performance.md). Where L1 is large, L1 is better even if more is prefetched
// than it holds.
inline void prefetch_line(const void* at) {
  __builtin_prefetch(at, 0, QUIRE_FETCH_LEVEL == 1 ? 3 : 2);
}

// What is prefetched while a tile is multiplied. There are several streams (ranges of memory), so
// that the hardware prefetcher runs ahead in each of them.
struct Prefetch {
  // Far prefetch, for later tiles: with each word of the inner dimension, one cache line of each of
  // `num_streams` streams is prefetched (none, one, two or TILE_STRIPS). TILE_STRIPS consecutive
  // segments use the same streams, the next TILE_STRIPS segments the streams after them.
  const char* const* streams = nullptr;
  int64_t num_streams = 0;
  int64_t offset = 0;  // Bytes from the start of each stream to its first line.
  // Near prefetch, for strips that are read from memory for this tile alone: each word is
  // prefetched NEAR_WORDS before it is multiplied. At the tile's end the prefetch continues here,
  // where the next tile's first strip begins; its other strips are at the same distances as in this
  // tile. Null: no near prefetch.
  const uint32_t* next_strips = nullptr;
};

// The distance of the near prefetch: multiplying this many words takes as long as one access to
// memory, and the lines fit in L1.
constexpr int64_t NEAR_WORDS = 32;

// The packed operand of a tile, and what is prefetched while it is multiplied.
struct Strips {
  // num_segments times `count` pointers: each segment is `inner` words of each of `count` strips,
  // and the segments follow each other along the inner dimension.
  const uint32_t* const* at;
  int64_t count, num_segments, inner;
  Prefetch prefetch;
  // Runs step by step beside AMX instructions; the vector micro-kernels ignore it.
  DeferredWork* deferred = nullptr;
};

// The streams that a segment prefetches.
inline const char* const* streams_of(const Prefetch& prefetch, int64_t segment) {
  return prefetch.streams + segment / TILE_STRIPS * TILE_STRIPS;
}

// Lines of each stream that earlier segments with the same streams have prefetched, one per word.
inline int64_t lines_before(const Strips& strips, int64_t segment) {
  return segment % TILE_STRIPS * strips.inner;
}

// total[r][p] += row r's word * words(p). Keeps the smaller operand in registers and streams the
// larger one.
template <class T, int R, int WIDTH, class Words>
inline void multiply_word(PartVector (&total)[R][WIDTH], const typename T::RowWord* row,
                          int64_t stride, const Words& words) {
#pragma GCC unroll 2
  for (int i = 0; i < T::FACTORS; i++) {
    if constexpr (PARTS > 1 && R > 1 && R < WIDTH) {
      uint32_t factors[R];
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) factors[r] = T::factor(row[r * stride], i);
#pragma GCC unroll 8
      for (int p = 0; p < WIDTH; p++) {
        const PartWords columns = T::columns(words(p), i);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) total[r][p] = T::multiply(total[r][p], factors[r], columns);
      }
    } else {
      PartWords columns[WIDTH];
#pragma GCC unroll 8
      for (int p = 0; p < WIDTH; p++) columns[p] = T::columns(words(p), i);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const uint32_t factor = T::factor(row[r * stride], i);
#pragma GCC unroll 8
        for (int p = 0; p < WIDTH; p++) total[r][p] = T::multiply(total[r][p], factor, columns[p]);
      }
    }
  }
}

// The micro-kernel: sums[r][s] (+)= rows[r] . strips[first + s], with all R * S accumulators in
// registers.
template <class T, int R, int S>
void micro_kernel(const typename T::RowWord* rows, int64_t stride, const Strips& strips,
                  int64_t first, const Prefetch& prefetch, float* sums, int64_t sums_stride,
                  bool add) {
  constexpr int WIDTH = S * PARTS;
  const int64_t inner = strips.inner, num_streams = prefetch.num_streams;
  PartVector total[R][WIDTH];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < WIDTH; p++)
      total[r][p] = add ? load<PartVector>(sums + r * sums_stride + p * PART_LANES) : PartVector{};
  for (int64_t segment = 0; segment < strips.num_segments; segment++, rows += inner) {
    const uint32_t* const* const at = strips.at + segment * strips.count + first;
    // Copied to local variables, which stay in registers: loading the pointers again for each word
    // made steps of one row take 1.06 times as long.
    const char* streams[TILE_STRIPS] = {};
    for (int64_t i = 0; i < num_streams; i++)
      streams[i] =
          streams_of(prefetch, segment)[i] + prefetch.offset + lines_before(strips, segment) * 64;
    const uint32_t* next = at[0] + NEAR_WORDS * LANES;
    const auto prefetch_lines = [&](int64_t k) {
      if (prefetch.next_strips != nullptr) {
        if (k + NEAR_WORDS == inner) next = prefetch.next_strips + (at[0] - strips.at[0]);
#pragma GCC unroll 4
        for (int s = 0; s < S; s++) prefetch_line(next + (at[s] - at[0]));
        next += LANES;
      }
      if (num_streams > 0) prefetch_line(streams[0] + k * 64);
      if (num_streams > 1) prefetch_line(streams[1] + k * 64);
      if (num_streams == TILE_STRIPS) {
        prefetch_line(streams[2] + k * 64);
        prefetch_line(streams[3] + k * 64);
      }
    };
    for (int64_t k = 0; k < inner; k++) {
      const auto words = [&](int p) {
        return load<PartWords>(at[p / PARTS] + k * LANES + p % PARTS * PART_LANES);
      };
      // With this order the compiler spills neither accumulators nor pointers.
      if constexpr (PARTS == 1) {
        PartWords loaded[WIDTH];
#pragma GCC unroll 8
        for (int p = 0; p < WIDTH; p++) loaded[p] = words(p);
        prefetch_lines(k);
        multiply_word<T>(total, rows + k, stride, [&](int p) { return loaded[p]; });
      } else {
        multiply_word<T>(total, rows + k, stride, words);
        prefetch_lines(k);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < WIDTH; p++) store(sums + r * sums_stride + p * PART_LANES, total[r][p]);
}

// A tile of any size: where the target has too few registers, the strips are halved, and then the
// rows divided, until each part fits one micro-kernel.
template <class T, int R, int S>
void split_tile(const typename T::RowWord* rows, int64_t stride, const Strips& strips,
                int64_t first, const Prefetch& prefetch, float* sums, int64_t sums_stride,
                bool add) {
  constexpr int WIDTH = S * PARTS, HALF = (S + 1) / 2, HEIGHT = REGISTERS / 4 * 3 / PARTS;
  constexpr int NEEDED = R * WIDTH + std::min(R, WIDTH) + T::FACTORS;
  if constexpr (NEEDED <= REGISTERS || (S == 1 && R <= HEIGHT)) {
    micro_kernel<T, R, S>(rows, stride, strips, first, prefetch, sums, sums_stride, add);
  } else if constexpr (S > 1) {
    split_tile<T, R, HALF>(rows, stride, strips, first, prefetch, sums, sums_stride, add);
    Prefetch own;  // The first half has done the far prefetch.
    own.next_strips = prefetch.next_strips;
    split_tile<T, R, S - HALF>(rows, stride, strips, first + HALF, own, sums + HALF * LANES,
                               sums_stride, add);
  } else {
    micro_kernel<T, HEIGHT, 1>(rows, stride, strips, first, prefetch, sums, sums_stride, add);
    split_tile<T, R - HEIGHT, 1>(rows + HEIGHT * stride, stride, strips, first, Prefetch(),
                                 sums + HEIGHT * sums_stride, sums_stride, add);
  }
}

template <class T, int R, int S>
void multiply_tile(const typename T::RowWord* rows, int64_t stride, const Strips& strips,
                   float* sums, int64_t sums_stride, bool add) {
  split_tile<T, R, S>(rows, stride, strips, 0, strips.prefetch, sums, sums_stride, add);
}

template <class T>
using Tile = void (*)(const typename T::RowWord*, int64_t, const Strips&, float*, int64_t, bool);

// Null for tiles with more accumulators than registers, which are not instantiated.
template <class T, int R, int S>
constexpr Tile<T> tile() {
  if constexpr (R * S <= TILE_ROWS * TILE_STRIPS) return multiply_tile<T, R, S>;
  return nullptr;
}

template <class T>
inline Tile<T> tile_of(int64_t rows, int64_t strips) {
#define QUIRE_TILES(R)                                                 \
  {                                                                    \
    tile<T, R, 1>(), tile<T, R, 2>(), tile<T, R, 3>(), tile<T, R, 4>() \
  }
  static constexpr Tile<T> tiles[TALL_ROWS][TILE_STRIPS] = {
      QUIRE_TILES(1), QUIRE_TILES(2),  QUIRE_TILES(3),  QUIRE_TILES(4),
      QUIRE_TILES(5), QUIRE_TILES(6),  QUIRE_TILES(7),  QUIRE_TILES(8),
      QUIRE_TILES(9), QUIRE_TILES(10), QUIRE_TILES(11), QUIRE_TILES(12)};
#undef QUIRE_TILES
  return tiles[rows - 1][strips - 1];
}

// The tile shape for a number of rows, and its prefetch. `lines`: how many cache lines of the next
// strips each word of a tile prefetches, so that all of them arrive while the current strips are
// multiplied. `near`: whether a tile prefetches its own strips instead (see Prefetch::next_strips),
// which is possible where each strip is used by one tile only.
struct TileShape {
  int64_t rows, strips, lines;
  bool near;
};

// The vector micro-kernels of one element type; matrix_unit.h specialises this for AMX.
template <class T>
struct Tiles {
  // Most rows of a tile with TILE_STRIPS strips; fewest words of a segment for which tiles are
  // efficient.
  static constexpr int64_t ROWS = TILE_ROWS, WORDS = LANES / T::PER_WORD;
  // Whether the vector units are idle while a tile is multiplied.
  static constexpr bool VECTORS_IDLE = false;
  // Up to this many rows, a product waits for memory.
  static constexpr int64_t FEW_ROWS = QUIRE_FETCH_LEVEL == 1 ? 18 : 16;
  // From this many rows per thread on, each thread multiplies rows of its own; 0 for never.
  static constexpr int64_t OWN_ROWS = QUIRE_FETCH_LEVEL == 1 ? 24 : FEW_ROWS + 1;

  // Up to FEW_ROWS rows, the product waits for memory: the rows are one tile, or two tall ones,
  // because memory is read more evenly with fewer strips at a time and fewer tiles. More rows wait
  // for arithmetic: four strips per tile then read each row fewer times.
  static TileShape shape(int64_t num_rows) {
    const bool tall = num_rows > TILE_ROWS && num_rows <= FEW_ROWS;
    const int64_t rows = tall ? TALL_ROWS : TILE_ROWS, strips = tall ? TALL_STRIPS : TILE_STRIPS;
    const int64_t tiles = (num_rows + rows - 1) / rows, lines = (strips + tiles - 1) / tiles;
    // The near prefetch makes tall tiles of bfloat16 pairs slower
    // (docs/explanation/performance.md).
    const bool near = num_rows <= rows && (!tall || T::PER_WORD == 1);
    return {rows, strips, lines, near};
  }

  // sums[r][s] (+)= rows[r] . strips[s] for `count` rows and all strips.
  static void multiply(int64_t count, const typename T::RowWord* rows, int64_t stride,
                       const Strips& strips, float* sums, int64_t sums_stride, bool add) {
    tile_of<T>(count, strips.count)(rows, stride, strips, sums, sums_stride, add);
  }
};

}  // namespace quire
