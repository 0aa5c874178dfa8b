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

#include "matrix_unit.h"
#include "team.h"

namespace quire {

// Words of the inner dimension that are multiplied before the next tile: what four strips of it
// take has to stay in the second-level cache while all rows pass by.
constexpr int64_t INNER_BLOCK = 1024;
// Rows that share one pass over the strips: so many stay in the cache beside them.
constexpr int64_t ROW_BLOCK = 256;
// Sums kept between inner blocks, in floats.
constexpr int64_t SUMS_SIZE = ROW_BLOCK * TILE_STRIPS * LANES;

// Words that will be multiplied next: they are fetched as far as time allows.
struct Ahead {
  const uint32_t* at;
  int64_t words;
  // What lies behind them is of no use: then no more is fetched at a time than it takes.
  bool alone = false;
  // They are of the same product.
  bool same = false;
};

template <class T>
struct Rows {
  const typename T::RowWord* words;
  int64_t stride;  // In words.
  int64_t count;
  // What rounding took from `words`, rounded itself, in the same places; null to leave it out. Its
  // product is added: rows of bfloat16 have twice the bits then, at twice the price.
  const typename T::RowWord* rest = nullptr;
  int64_t number = 0;  // Of the first row.

  Rows part(const Share& share) const {
    const int64_t offset = share.first * stride;
    return {words + offset, stride, share.last - share.first,
            rest != nullptr ? rest + offset : nullptr, number + share.first};
  }
};

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

// How many lines of what comes next are fetched with each word, of so many that all tiles of a group
// multiply. None of the same product where strips are fetched near their turn; but before another
// product everyone is waited for, and that is time to fetch in.
inline int64_t lines_of(const Ahead& ahead, const Cut& cut, int64_t words) {
  int64_t lines = cut.near && ahead.same ? 0 : cut.lines;
  while (ahead.alone && lines > 0 && words * (lines / 2) * LANES >= ahead.words) lines /= 2;
  return lines;
}

// What is done with `count` strips of a tile's sums, row by row.
template <class Done>
struct Outcome {
  const Done* done;
  int64_t row, strip, count;
  const float* sums;

  void operator()(int64_t i) const {
    (*done)(row + i, strip, sums + i * TILE_STRIPS * LANES, count);
  }
};

// Every row times the strips first .. last-1, where each strip takes inner * 16 words of `packed`.
// done(row, strip, values, count): `values` are count vectors of sums, for strips strip, strip+1...
// The cuts are at multiples of four strips from `first`, so an even range never cuts a pair.
// While the last strips are multiplied `next` is fetched.
template <class T, class Done>
void multiply(const Rows<T>& rows, const uint32_t* packed, int64_t inner, int64_t first,
              int64_t last, const Ahead& next, float* sums, const Done& done) {
  constexpr int64_t WIDTH = TILE_STRIPS * LANES;
  // Sums that go on later have a place for every row; others share the nearest lines.
  const bool go_on = rows.rest != nullptr || inner > INNER_BLOCK;
  // What comes of one tile waits for the next one's product, where it is in nobody's way.
  Outcome<Done> outcome;
  Meanwhile waiting;
  int64_t place = 0;
  for (int64_t row = 0; row < rows.count; row += ROW_BLOCK) {
    const int64_t num_rows = std::min(ROW_BLOCK, rows.count - row);
    const Cut cut = Tiles<T>::cut(num_rows);
    for (int64_t strip = first; strip < last; strip += TILE_STRIPS) {
      const int64_t count = std::min<int64_t>(TILE_STRIPS, last - strip);
      if (go_on) waiting.finish();  // Its place is taken again.
      const uint32_t* base = packed + strip * inner * LANES;
      // The next strips are fetched line by line while these are computed.
      const int64_t size = count * inner * LANES;
      const Ahead ahead = strip + count < last ? Ahead{base + size, size, false, true} : next;
      const int64_t passes = (num_rows + cut.rows - 1) / cut.rows *
                             ((count + cut.strips - 1) / cut.strips);
      const int64_t lines = lines_of(ahead, cut, passes * inner);
      const char* fetch = (const char*)ahead.at;
      const char* const fetched = (const char*)(ahead.at + ahead.words);
      for (const auto* words : {rows.words, rows.rest}) {
        if (words == nullptr) continue;
        const bool first_part = words == rows.words;
        const bool last_part = !first_part || rows.rest == nullptr;
        for (int64_t k = 0; k < inner; k += INNER_BLOCK) {
          const int64_t length = std::min(INNER_BLOCK, inner - k);
          const uint32_t* strips[TILE_STRIPS];
          for (int64_t s = 0; s < count; s++) strips[s] = base + (s * inner + k) * LANES;
          const bool near = cut.near && first_part && length > NEAR;
          const uint32_t* const then = k + length < inner ? strips[0] + length * LANES : ahead.at;
          for (int64_t s = 0; s < count; s += cut.strips) {
            const int64_t width = std::min(cut.strips, count - s);
            const uint32_t* const on = s + width < count ? strips[s + width] : then;
            for_each_tile(num_rows, cut.rows, [&](int64_t r, int64_t n) {
              place = Tiles<T>::ROWS - place;
              float* const to = sums + (go_on ? r * WIDTH + s * LANES : place * WIDTH);
              const char* later[TILE_STRIPS];
              for (int64_t i = 0; i < lines; i++) later[i] = fetch + i * length * 64;
              Tiles<T>::multiply(n, words + (row + r) * rows.stride + k, rows.stride,
                                 {strips + s, width, 1, length,
                                  {later, lines, 0, near ? on : nullptr}, &waiting},
                                 to, WIDTH, k > 0 || !first_part);
              fetch += length * lines * 64;
              if (fetch >= fetched) fetch = (const char*)base;
              if (!last_part || k + length < inner) return;
              waiting.finish();
              outcome = {&done, rows.number + row + r, strip + s, width, to};
              if constexpr (Tiles<T>::LEAVES_VECTORS) {
                waiting = Meanwhile(0, n, outcome);
              } else {
                for (int64_t i = 0; i < n; i++) outcome(i);
              }
            });
          }
        }
      }
    }
  }
  waiting.finish();
}

}  // namespace quire
