// Tiles of a product that lie in registers: some rows times some strips. Knows no product.
#pragma once

#include <algorithm>
#include <cstdint>

#include "deferred_work.h"
#include "vector.h"

namespace quire {

// Rows and strips of a register tile: 24 sums, 4 strips and one element fit in 32 registers. A tall
// tile has as many sums from half of the strips.
constexpr int TILE_ROWS = 6, TILE_STRIPS = 4;
constexpr int TALL_ROWS = 12, TALL_STRIPS = 2;

// The cache that what is needed later is fetched into: QUIRE_FETCH_LEVEL says the first or the second
// (docs/performance.md). The first where it is large, even for more than it holds.
inline void fetch_line(const void* at) {
  __builtin_prefetch(at, 0, QUIRE_FETCH_LEVEL == 1 ? 3 : 2);
}

// What is fetched while a tile is multiplied. Lines fetched together lie in several places, so that
// the processor's own fetching gets ahead in all of them.
struct Fetch {
  // Where what is needed later lies; with each word one line of each of `places` places is fetched:
  // none, one, two or TILE_STRIPS. It is the same places for so many segments as there are strips
  // in a tile, and the following ones for the next segments.
  const char* const* later = nullptr;
  int64_t places = 0;
  int64_t begin = 0;  // Of the first line, in bytes from each place.
  // Where the tile's first strip goes on, and the others as far from it as they are here. Not null
  // where the strips come from memory for this tile: they are fetched NEAR words before their turn.
  const uint32_t* on = nullptr;
};

// So many words take as long as memory takes to answer, and fit in the first-level cache.
constexpr int64_t NEAR = 32;

// The columns of a tile and what is fetched while they are multiplied.
struct Strips {
  // Where the strips go on, one after the other, and again after every `inner` words.
  const uint32_t* const* at;
  int64_t count, num_segments, inner;
  Fetch fetch;
  // Taken in steps where something else than vectors multiplies; nobody else looks at it.
  Meanwhile* meanwhile = nullptr;
};

// The places for a segment's words.
inline const char* const* places_of(const Fetch& fetch, int64_t segment) {
  return fetch.later + segment / TILE_STRIPS * TILE_STRIPS;
}

// Lines of each place that the segments before fetch.
inline int64_t lines_before(const Strips& strips, int64_t segment) {
  return segment % TILE_STRIPS * strips.inner;
}

// total[r][p] += row r's word * words(p): what there are fewer of is kept, the others come and go.
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
        for (int p = 0; p < WIDTH; p++)
          total[r][p] = T::multiply(total[r][p], factor, columns[p]);
      }
    }
  }
}

// sums[r][s] (+)= rows[r] . strips[first + s], all of them in registers.
template <class T, int R, int S>
void multiply_block(const typename T::RowWord* rows, int64_t stride, const Strips& strips,
                    int64_t first, const Fetch& fetch, float* sums, int64_t sums_stride,
                    bool add) {
  constexpr int WIDTH = S * PARTS;
  const int64_t inner = strips.inner, places = fetch.places;
  PartVector total[R][WIDTH];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < WIDTH; p++)
      total[r][p] = add ? load<PartVector>(sums + r * sums_stride + p * PART_LANES) : PartVector{};
  for (int64_t segment = 0; segment < strips.num_segments; segment++, rows += inner) {
    const uint32_t* const* const at = strips.at + segment * strips.count + first;
    // Kept in registers: to load them again with every word made steps of one row 1.06 times as long.
    const char* later[TILE_STRIPS] = {};
    for (int64_t i = 0; i < places; i++)
      later[i] = places_of(fetch, segment)[i] + fetch.begin + lines_before(strips, segment) * 64;
    const uint32_t* on = at[0] + NEAR * LANES;
    const auto fetch_lines = [&](int64_t k) {
      if (fetch.on != nullptr) {
        if (k + NEAR == inner) on = fetch.on + (at[0] - strips.at[0]);
#pragma GCC unroll 4
        for (int s = 0; s < S; s++) fetch_line(on + (at[s] - at[0]));
        on += LANES;
      }
      if (places > 0) fetch_line(later[0] + k * 64);
      if (places > 1) fetch_line(later[1] + k * 64);
      if (places == TILE_STRIPS) {
        fetch_line(later[2] + k * 64);
        fetch_line(later[3] + k * 64);
      }
    };
    for (int64_t k = 0; k < inner; k++) {
      const auto words = [&](int p) {
        return load<PartWords>(at[p / PARTS] + k * LANES + p % PARTS * PART_LANES);
      };
      // The order in which the compiler has registers left for its pointers, too.
      if constexpr (PARTS == 1) {
        PartWords loaded[WIDTH];
#pragma GCC unroll 8
        for (int p = 0; p < WIDTH; p++) loaded[p] = words(p);
        fetch_lines(k);
        multiply_word<T>(total, rows + k, stride, [&](int p) { return loaded[p]; });
      } else {
        multiply_word<T>(total, rows + k, stride, words);
        fetch_lines(k);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < WIDTH; p++)
      store(sums + r * sums_stride + p * PART_LANES, total[r][p]);
}

// The same for any tile: strips by half, and then rows, where the target has too few registers.
template <class T, int R, int S>
void multiply_blocks(const typename T::RowWord* rows, int64_t stride, const Strips& strips,
                     int64_t first, const Fetch& fetch, float* sums, int64_t sums_stride,
                     bool add) {
  constexpr int WIDTH = S * PARTS, HALF = (S + 1) / 2, HEIGHT = REGISTERS / 4 * 3 / PARTS;
  constexpr int TAKEN = R * WIDTH + std::min(R, WIDTH) + T::FACTORS;
  if constexpr (TAKEN <= REGISTERS || (S == 1 && R <= HEIGHT)) {
    multiply_block<T, R, S>(rows, stride, strips, first, fetch, sums, sums_stride, add);
  } else if constexpr (S > 1) {
    multiply_blocks<T, R, HALF>(rows, stride, strips, first, fetch, sums, sums_stride, add);
    Fetch own;  // What is needed later was fetched beside the first half.
    own.on = fetch.on;
    multiply_blocks<T, R, S - HALF>(rows, stride, strips, first + HALF, own, sums + HALF * LANES,
                                    sums_stride, add);
  } else {
    multiply_block<T, HEIGHT, 1>(rows, stride, strips, first, fetch, sums, sums_stride, add);
    multiply_blocks<T, R - HEIGHT, 1>(rows + HEIGHT * stride, stride, strips, first, Fetch(),
                                      sums + HEIGHT * sums_stride, sums_stride, add);
  }
}

template <class T, int R, int S>
void multiply_tile(const typename T::RowWord* rows, int64_t stride, const Strips& strips,
                   float* sums, int64_t sums_stride, bool add) {
  multiply_blocks<T, R, S>(rows, stride, strips, 0, strips.fetch, sums, sums_stride, add);
}

template <class T>
using Tile = void (*)(const typename T::RowWord*, int64_t, const Strips&, float*, int64_t, bool);

// What does not fit in the registers is not made.
template <class T, int R, int S>
constexpr Tile<T> tile() {
  if constexpr (R * S <= TILE_ROWS * TILE_STRIPS) return multiply_tile<T, R, S>;
  return nullptr;
}

template <class T>
inline Tile<T> tile_of(int64_t rows, int64_t strips) {
#define QUIRE_TILES(R) \
  { tile<T, R, 1>(), tile<T, R, 2>(), tile<T, R, 3>(), tile<T, R, 4>() }
  static constexpr Tile<T> tiles[TALL_ROWS][TILE_STRIPS] = {
      QUIRE_TILES(1), QUIRE_TILES(2),  QUIRE_TILES(3),  QUIRE_TILES(4),
      QUIRE_TILES(5), QUIRE_TILES(6),  QUIRE_TILES(7),  QUIRE_TILES(8),
      QUIRE_TILES(9), QUIRE_TILES(10), QUIRE_TILES(11), QUIRE_TILES(12)};
#undef QUIRE_TILES
  return tiles[rows - 1][strips - 1];
}

// How rows are cut into tiles, and how many lines are fetched with each of a tile's words: the next
// strips in the time that these take. What only one tile needs may be fetched `near` its turn
// instead.
struct Cut {
  int64_t rows, strips, lines;
  bool near;
};

// Tiles of one element type by vectors; matrix_unit.h has others.
template <class T>
struct Tiles {
  // Rows of a tile that may have all strips, and the fewest words that a segment should have.
  static constexpr int64_t ROWS = TILE_ROWS, WORDS = LANES / T::PER_WORD;
  // Whether vectors are free meanwhile.
  static constexpr bool LEAVES_VECTORS = false;
  static constexpr int64_t FEW_ROWS = QUIRE_FETCH_LEVEL == 1 ? 18 : 16;
  // From so many rows for each thread on everyone multiplies its own; never where this is 0.
  static constexpr int64_t OWN_ROWS = QUIRE_FETCH_LEVEL == 1 ? 24 : FEW_ROWS + 1;

  // So few rows that they wait for memory are one tile, or two tall ones: the fewer strips at once
  // and the fewer tiles, the more evenly memory is read. More rows wait for arithmetic, and read
  // themselves less often beside four strips.
  static Cut cut(int64_t num_rows) {
    const bool tall = num_rows > TILE_ROWS && num_rows <= FEW_ROWS;
    const int64_t rows = tall ? TALL_ROWS : TILE_ROWS, strips = tall ? TALL_STRIPS : TILE_STRIPS;
    const int64_t tiles = (num_rows + rows - 1) / rows, lines = (strips + tiles - 1) / tiles;
    // Tall tiles of pairs are slower by it (docs/performance.md).
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
