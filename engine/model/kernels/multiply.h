// Rows times packed columns: the one matrix product behind every linear layer and the attention.
//
// The packed side is a sequence of strips of 16 columns; a strip is, word after word along the inner
// dimension, the 16 columns' words next to each other. One row streams the weights at the speed of
// the memory, many rows reuse a strip while it is in the cache: the same loop for both.
//
// A row's result depends on nothing but the row: every sum runs over the inner dimension in the same
// order whatever the number of rows, so a request computed alone and in a batch agree bit for bit.
#pragma once

#include <algorithm>

#include "vector.h"

namespace quire {

// Rows and strips of one register tile: 24 sums, 4 strips and one element fit in 32 registers.
constexpr int TILE_ROWS = 6;
constexpr int TILE_STRIPS = 4;
// Words of the inner dimension that are multiplied before the next tile: what four strips of it
// take has to stay in the second-level cache while all rows pass by.
constexpr int64_t INNER_BLOCK = 1024;
// Rows that share one pass over the strips: so many stay in the cache beside them.
constexpr int64_t ROW_BLOCK = 192;

struct Rows {
  const uint32_t* words;
  int64_t stride;  // In words.
  int64_t count;

  const uint32_t* row(int64_t index) const { return words + index * stride; }
};

template <class T, int R, int S>
inline void multiply_tile(const uint32_t* __restrict rows, int64_t stride,
                          const uint32_t* const* __restrict strips, int64_t inner,
                          Vector (&sums)[R][S], const char* prefetch) {
  for (int64_t k = 0; k < inner; k++) {
    Words columns[S];
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) columns[s] = load<Words>(strips[s] + k * LANES);
    if (prefetch != nullptr) __builtin_prefetch(prefetch + k * 64, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const uint32_t word = rows[r * stride + k];
#pragma GCC unroll 4
      for (int s = 0; s < S; s++) sums[r][s] = T::dot(sums[r][s], word, columns[s]);
    }
  }
}

}  // namespace quire
