// Rows times packed columns: the one matrix product behind every linear layer and the attention.
// Knows no layer.
//
// The packed side is a sequence of strips of 16 columns; a strip is, word after word along the inner
// dimension, the 16 columns' words next to each other. One row streams the weights at the speed of
// the memory, many rows reuse a strip while it is in the cache: the same loop for both.
//
// A row's result depends on nothing but the row: every sum runs over the inner dimension in the same
// order whatever the number of rows, so a request computed alone and in a batch agree bit for bit.
#pragma once

#include <algorithm>

#include "team.h"
#include "vector.h"

namespace quire {

// Rows and strips of a register tile: 24 sums, 4 strips and one element fit in 32 registers. A tall
// tile has as many sums from half of the strips.
constexpr int TILE_ROWS = 6, TILE_STRIPS = 4;
constexpr int TALL_ROWS = 12, TALL_STRIPS = 2;
// Words of the inner dimension that are multiplied before the next tile: what four strips of it
// take has to stay in the second-level cache while all rows pass by.
constexpr int64_t INNER_BLOCK = 1024;
// Rows that share one pass over the strips: so many stay in the cache beside them.
constexpr int64_t ROW_BLOCK = 256;
// Sums kept between inner blocks, in floats.
constexpr int64_t SUMS_SIZE = ROW_BLOCK * TILE_STRIPS * LANES;

// How the rows of a pass are cut into tiles. So few that they wait for memory are one tile, or two
// tall ones: the fewer strips at once and the fewer tiles, the more evenly memory is read. More rows
// wait for arithmetic, and read themselves less often beside four strips.
struct Cut {
  int64_t rows, strips;
  int64_t lines;  // Fetched ahead with each word: a group's next strips in the time of this one's.

  static constexpr int64_t FEW_ROWS = 18;

  explicit Cut(int64_t num_rows) {
    const bool tall = num_rows > TILE_ROWS && num_rows <= FEW_ROWS;
    rows = tall ? TALL_ROWS : TILE_ROWS;
    strips = tall ? TALL_STRIPS : TILE_STRIPS;
    lines = std::max<int64_t>(1, strips / ((num_rows + rows - 1) / rows));
  }
};

// The columns of a tile and what is fetched while they are multiplied.
struct Strips {
  // Where the strips go on, one after the other, and again after every `inner` words.
  const uint32_t* const* at;
  int64_t count, num_segments, inner;
  // Where what is needed next lies, for every segment; with each word `lines` lines of it are
  // fetched: none, one, two or TILE_STRIPS.
  const char* const* fetch;
  int64_t lines;
};

// Words that will be multiplied next: they are fetched as far as time allows.
struct Ahead {
  const uint32_t* at;
  int64_t words;
  // What lies behind them is of no use: then no more is fetched at a time than it takes.
  bool alone = false;
};

struct Rows {
  const uint32_t* words;
  int64_t stride;  // In words.
  int64_t count;
  // What rounding took from `words`, rounded itself, in the same places; null to leave it out. Its
  // product is added: rows of bfloat16 have twice the bits then, at twice the price.
  const uint32_t* rest = nullptr;
  int64_t number = 0;  // Of the first row.

  Rows part(const Share& share) const {
    const int64_t offset = share.first * stride;
    return {words + offset, stride, share.last - share.first,
            rest != nullptr ? rest + offset : nullptr, number + share.first};
  }
};

// sums[r][s] (+)= rows[r] . strips[first + s], all of them in registers.
template <class T, int R, int S>
void multiply_block(const uint32_t* rows, int64_t stride, const Strips& strips, int64_t first,
                    int64_t lines, float* sums, int64_t sums_stride, bool add) {
  constexpr int WIDTH = S * PARTS;
  const int64_t inner = strips.inner;
  PartVector total[R][WIDTH];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < WIDTH; p++)
      total[r][p] = add ? load<PartVector>(sums + r * sums_stride + p * PART_LANES) : PartVector{};
  for (int64_t segment = 0; segment < strips.num_segments; segment++, rows += inner) {
    const char* fetch = lines > 0 ? strips.fetch[segment] : nullptr;
    const uint32_t* const* const at = strips.at + segment * strips.count + first;
    for (int64_t k = 0; k < inner; k++) {
      PartWords columns[WIDTH];
#pragma GCC unroll 8
      for (int p = 0; p < WIDTH; p++)
        columns[p] = load<PartWords>(at[p / PARTS] + k * LANES + p % PARTS * PART_LANES);
      if (lines > 0) __builtin_prefetch(fetch, 0, 2);
      if (lines > 1) __builtin_prefetch(fetch + 64, 0, 2);
      if (lines == TILE_STRIPS) {
        __builtin_prefetch(fetch + 2 * 64, 0, 2);
        __builtin_prefetch(fetch + 3 * 64, 0, 2);
      }
      fetch += lines * 64;
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const uint32_t word = rows[r * stride + k];
#pragma GCC unroll 8
        for (int p = 0; p < WIDTH; p++) total[r][p] = T::dot(total[r][p], word, columns[p]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < WIDTH; p++)
      store(sums + r * sums_stride + p * PART_LANES, total[r][p]);
}

// The same for any tile: strip by strip where the target has too few registers for all of it.
template <class T, int R, int S>
void multiply_tile(const uint32_t* rows, int64_t stride, const Strips& strips, float* sums,
                   int64_t sums_stride, bool add) {
  constexpr int SUMS = REGISTERS / 4 * 3, HEIGHT = SUMS / PARTS;
  if constexpr (R * S * PARTS <= SUMS) {
    multiply_block<T, R, S>(rows, stride, strips, 0, strips.lines, sums, sums_stride, add);
  } else {
    int64_t lines = strips.lines;  // Fetched once.
    for (int s = 0; s < S; s++) {
      int r = 0;
      for (; r + HEIGHT <= R; r += HEIGHT, lines = 0)
        multiply_block<T, HEIGHT, 1>(rows + r * stride, stride, strips, s, lines,
                                     sums + r * sums_stride + s * LANES, sums_stride, add);
      if constexpr (R % HEIGHT != 0)
        multiply_block<T, R % HEIGHT, 1>(rows + r * stride, stride, strips, s, lines,
                                         sums + r * sums_stride + s * LANES, sums_stride, add);
      lines = 0;
    }
  }
}

typedef void (*Tile)(const uint32_t*, int64_t, const Strips&, float*, int64_t, bool);

// What does not fit in the registers is not made.
template <class T, int R, int S>
constexpr Tile tile() {
  if constexpr (R * S <= TILE_ROWS * TILE_STRIPS) return multiply_tile<T, R, S>;
  return nullptr;
}

template <class T>
inline Tile tile_of(int64_t rows, int64_t strips) {
#define QUIRE_TILES(R) \
  { tile<T, R, 1>(), tile<T, R, 2>(), tile<T, R, 3>(), tile<T, R, 4>() }
  static constexpr Tile tiles[TALL_ROWS][TILE_STRIPS] = {
      QUIRE_TILES(1), QUIRE_TILES(2),  QUIRE_TILES(3),  QUIRE_TILES(4),
      QUIRE_TILES(5), QUIRE_TILES(6),  QUIRE_TILES(7),  QUIRE_TILES(8),
      QUIRE_TILES(9), QUIRE_TILES(10), QUIRE_TILES(11), QUIRE_TILES(12)};
#undef QUIRE_TILES
  return tiles[rows - 1][strips - 1];
}

// Calls body(first, count) for `total` rows cut into tiles of at most `height`, which differ by one
// row at most.
template <class Body>
inline void for_each_tile(int64_t total, int64_t height, const Body& body) {
  const int64_t tiles = (total + height - 1) / height;
  for (int64_t i = 0, first = 0; i < tiles; i++) {
    const int64_t last = total * (i + 1) / tiles;
    body(first, last - first);
    first = last;
  }
}

// Every row times the strips first .. last-1, where each strip takes inner * 16 words of `packed`.
// done(row, strip, values, count): `values` are count vectors of sums, for strips strip, strip+1...
// The cuts are at multiples of four strips from `first`, so an even range never cuts a pair.
// While the last strips are multiplied `next` is fetched.
template <class T, class Done>
void multiply(const Rows& rows, const uint32_t* packed, int64_t inner, int64_t first, int64_t last,
              const Ahead& next, float* sums, const Done& done) {
  constexpr int64_t WIDTH = TILE_STRIPS * LANES;
  // Sums that go on later have a place for every row; others share the nearest lines.
  const bool go_on = rows.rest != nullptr || inner > INNER_BLOCK;
  for (int64_t row = 0; row < rows.count; row += ROW_BLOCK) {
    const int64_t num_rows = std::min(ROW_BLOCK, rows.count - row);
    const Cut cut(num_rows);
    for (int64_t strip = first; strip < last; strip += TILE_STRIPS) {
      const int64_t count = std::min<int64_t>(TILE_STRIPS, last - strip);
      const uint32_t* base = packed + strip * inner * LANES;
      // The next strips are fetched line by line while these are computed.
      const int64_t size = count * inner * LANES;
      const Ahead ahead = strip + count < last ? Ahead{base + size, size} : next;
      const int64_t passes = (num_rows + cut.rows - 1) / cut.rows *
                             ((count + cut.strips - 1) / cut.strips);
      int64_t lines = cut.lines;
      while (ahead.alone && lines > 0 && passes * inner * (lines / 2) * LANES >= ahead.words)
        lines /= 2;
      const char* fetch = (const char*)ahead.at;
      const char* const fetched = (const char*)(ahead.at + ahead.words);
      for (const uint32_t* words : {rows.words, rows.rest}) {
        if (words == nullptr) continue;
        const bool first_part = words == rows.words;
        const bool last_part = !first_part || rows.rest == nullptr;
        for (int64_t k = 0; k < inner; k += INNER_BLOCK) {
          const int64_t length = std::min(INNER_BLOCK, inner - k);
          const uint32_t* strips[TILE_STRIPS];
          for (int64_t s = 0; s < count; s++) strips[s] = base + (s * inner + k) * LANES;
          for (int64_t s = 0; s < count; s += cut.strips) {
            const int64_t width = std::min(cut.strips, count - s);
            for_each_tile(num_rows, cut.rows, [&](int64_t r, int64_t n) {
              float* const to = sums + (go_on ? r * WIDTH + s * LANES : 0);
              tile_of<T>(n, width)(words + (row + r) * rows.stride + k, rows.stride,
                                   {strips + s, width, 1, length, &fetch, lines}, to, WIDTH,
                                   k > 0 || !first_part);
              fetch += length * lines * 64;
              if (fetch >= fetched) fetch = (const char*)base;
              if (!last_part || k + length < inner) return;
              for (int64_t i = 0; i < n; i++)
                done(rows.number + row + r + i, strip + s, to + i * WIDTH, width);
            });
          }
        }
      }
    }
  }
}

}  // namespace quire
