// Rows times a packed matrix: the loop around the micro-kernels, for one thread. Knows no layer.
//
// The packed matrix is a sequence of strips of 16 columns (the B panels of a GEMM): for each word
// of the inner dimension, a strip holds that word of its 16 columns next to each other. The same
// loop serves few rows, which read each strip once at memory bandwidth, and many rows, which reuse
// a strip while it is in the cache.
//
// A row's result depends on that row alone: every sum runs over the inner dimension in the same
// order, whatever the number of rows. So a request computed alone and in a batch agrees bit for
// bit.
#pragma once

#include <algorithm>

#include "matrix_unit.h"
#include "team.h"

namespace quire {

// Block of the inner dimension, in words: four strips of this length must stay in L2 while all rows
// of a row block are multiplied with them.
constexpr int64_t INNER_BLOCK = 1024;
// Block of rows that share one pass over the strips: this many rows fit in the cache beside the
// strips.
constexpr int64_t ROW_BLOCK = 256;
// Size of the accumulators that are kept between two inner blocks, in floats.
constexpr int64_t SUMS_SIZE = ROW_BLOCK * TILE_STRIPS * LANES;

// The packed words that this thread multiplies next. As many of them as time allows are prefetched.
struct PrefetchRange {
  const uint32_t* start;
  int64_t num_words;
  // The memory after the range will not be used: the number of lines per word is reduced so that
  // not much more than the range is prefetched.
  bool bounded = false;
  // The range belongs to the product that is being computed.
  bool same_product = false;
};

template <class T>
struct Rows {
  const typename T::RowWord* words;
  int64_t stride;  // In words.
  int64_t count;
  // The low parts: the errors of rounding to `words`, themselves rounded, in the same layout. Null
  // for none. Their product is added, so that bfloat16 rows have twice the bits at twice the cost.
  const typename T::RowWord* low = nullptr;
  int64_t first_row = 0;  // Index of the first of these rows in the product.

  Rows part(const Share& share) const {
    const int64_t offset = share.first * stride;
    return {words + offset, stride, share.last - share.first,
            low != nullptr ? low + offset : nullptr, first_row + share.first};
  }
};

// Calls body(first, count) for each tile: `total` rows are divided into tiles of at most `height`
// rows, whose heights differ by at most one row.
template <class Body>
inline void for_each_tile(int64_t total, int64_t height, const Body& body) {
  const int64_t tiles = (total + height - 1) / height;
  for (int64_t i = 0, first = 0; i < tiles; i++) {
    const int64_t last = total * (i + 1) / tiles;
    body(first, last - first);
    first = last;
  }
}

// How many cache lines of `range` are prefetched with each word, where all tiles of a group of
// strips multiply `words` words. With the near prefetch, 0 for strips of the same product. Strips
// of the next product are prefetched in any case: the barrier before it leaves time for that.
inline int64_t prefetch_lines(const PrefetchRange& range, const TileShape& shape, int64_t words) {
  int64_t lines = shape.near && range.same_product ? 0 : shape.lines;
  while (range.bounded && lines > 0 && words * (lines / 2) * LANES >= range.num_words) lines /= 2;
  return lines;
}

// The epilogue of a tile with `count` strips, applied row by row.
template <class Epilogue>
struct TileEpilogue {
  const Epilogue* epilogue;
  int64_t row, strip, count;
  const float* sums;

  void operator()(int64_t i) const {
    (*epilogue)(row + i, strip, sums + i * TILE_STRIPS * LANES, count);
  }
};

// Every row times the strips first .. last-1, where each strip has inner * 16 words of `packed`.
// Calls epilogue(row, strip, values, count) with `count` vectors of sums, for strips strip, strip +
// 1, ... Strips are taken in groups of four, counted from `first`: a pair that starts at an even
// distance from `first` is passed in one call. While the last strips are multiplied, `next` is
// prefetched. `sums` is a scratch buffer of SUMS_SIZE floats.
template <class T, class Epilogue>
void multiply(const Rows<T>& rows, const uint32_t* packed, int64_t inner, int64_t first,
              int64_t last, const PrefetchRange& next, float* sums, const Epilogue& epilogue) {
  constexpr int64_t WIDTH = TILE_STRIPS * LANES;
  // Sums that need more than one pass have a buffer row for every row of the block. Other tiles
  // alternate between two small buffers, which stay in L1.
  const bool accumulates = rows.low != nullptr || inner > INNER_BLOCK;
  // With AMX, the epilogue of a tile is deferred and runs while the next tile is multiplied.
  TileEpilogue<Epilogue> tile_epilogue;
  DeferredWork deferred;
  int64_t buffer_row = 0;
  for (int64_t row = 0; row < rows.count; row += ROW_BLOCK) {
    const int64_t num_rows = std::min(ROW_BLOCK, rows.count - row);
    const TileShape shape = Tiles<T>::shape(num_rows);
    for (int64_t strip = first; strip < last; strip += TILE_STRIPS) {
      const int64_t count = std::min<int64_t>(TILE_STRIPS, last - strip);
      if (accumulates) deferred.finish();  // It reads buffer rows that are overwritten now.
      const uint32_t* base = packed + strip * inner * LANES;
      // While these strips are multiplied, the next ones are prefetched.
      const int64_t size = count * inner * LANES;
      const PrefetchRange ahead =
          strip + count < last ? PrefetchRange{base + size, size, false, true} : next;
      const int64_t passes =
          (num_rows + shape.rows - 1) / shape.rows * ((count + shape.strips - 1) / shape.strips);
      const int64_t lines = prefetch_lines(ahead, shape, passes * inner);
      const char* prefetched = (const char*)ahead.start;
      const char* const prefetch_end = (const char*)(ahead.start + ahead.num_words);
      for (const auto* words : {rows.words, rows.low}) {
        if (words == nullptr) continue;
        const bool first_part = words == rows.words;
        const bool last_part = !first_part || rows.low == nullptr;
        for (int64_t k = 0; k < inner; k += INNER_BLOCK) {
          const int64_t length = std::min(INNER_BLOCK, inner - k);
          const uint32_t* strips[TILE_STRIPS];
          for (int64_t s = 0; s < count; s++) strips[s] = base + (s * inner + k) * LANES;
          const bool near = shape.near && first_part && length > NEAR_WORDS;
          const uint32_t* const next_group =
              k + length < inner ? strips[0] + length * LANES : ahead.start;
          for (int64_t s = 0; s < count; s += shape.strips) {
            const int64_t width = std::min(shape.strips, count - s);
            const uint32_t* const next_strips = s + width < count ? strips[s + width] : next_group;
            for_each_tile(num_rows, shape.rows, [&](int64_t r, int64_t n) {
              buffer_row = Tiles<T>::ROWS - buffer_row;
              float* const to = sums + (accumulates ? r * WIDTH + s * LANES : buffer_row * WIDTH);
              const char* streams[TILE_STRIPS];
              for (int64_t i = 0; i < lines; i++) streams[i] = prefetched + i * length * 64;
              Tiles<T>::multiply(n, words + (row + r) * rows.stride + k, rows.stride,
                                 {strips + s,
                                  width,
                                  1,
                                  length,
                                  {streams, lines, 0, near ? next_strips : nullptr},
                                  &deferred},
                                 to, WIDTH, k > 0 || !first_part);
              prefetched += length * lines * 64;
              if (prefetched >= prefetch_end) prefetched = (const char*)base;
              if (!last_part || k + length < inner) return;
              deferred.finish();
              tile_epilogue = {&epilogue, rows.first_row + row + r, strip + s, width, to};
              if constexpr (Tiles<T>::VECTORS_IDLE) {
                deferred = DeferredWork(0, n, tile_epilogue);
              } else {
                for (int64_t i = 0; i < n; i++) tile_epilogue(i);
              }
            });
          }
        }
      }
    }
  }
  deferred.finish();
}

}  // namespace quire
