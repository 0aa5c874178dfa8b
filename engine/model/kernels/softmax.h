// Softmax weights of a span's scores, and merging of the partial results of spans. Knows no keys
// and no cache.
#pragma once

#include <algorithm>
#include <limits>

#include "vector.h"

namespace quire {

// The partial result of attention over some keys, for each query row: the unnormalised weighted sum
// of the values, the sum of the weights (`total`), and the largest score as an exponent of two
// (`highest`). The last two are padded to whole vectors.
struct Partial {
  float *sums, *total, *highest;

  static int64_t padded(int64_t rows) { return (rows + LANES - 1) / LANES * LANES; }
  static int64_t size(int64_t rows, int64_t width) { return rows * width + 2 * padded(rows); }
  Partial(float* memory, int64_t rows, int64_t width)
      : sums(memory), total(memory + rows * width), highest(total + padded(rows)) {}
};

inline void clear(const Partial& partial, int64_t rows, int64_t width) {
  std::fill(partial.sums, partial.sums + rows * width, 0.0f);
  std::fill(partial.total, partial.total + Partial::padded(rows), 0.0f);
  std::fill(partial.highest, partial.highest + Partial::padded(rows),
            -std::numeric_limits<float>::infinity());
}

// Merges `part` into `sum`, sixteen rows at a time (online softmax).
inline void merge(const Partial& sum, const Partial& part, int64_t rows, int64_t width) {
  for (int64_t first = 0; first < rows; first += LANES) {
    const int64_t count = std::min<int64_t>(LANES, rows - first);
    const Vector total = load<Vector>(sum.total + first), more = load<Vector>(part.total + first);
    const Vector before = load<Vector>(sum.highest + first);
    const Vector found = load<Vector>(part.highest + first), highest = maximum(before, found);
    // A row stays as it is if all keys of the part were masked.
    const Integers any = (more != Vector{}) & (LANE_NUMBERS < (int32_t)count);
    const Vector old = exp2(before - highest), young = exp2(found - highest);
    store(sum.total + first, any ? total * old + more * young : total);
    store(sum.highest + first, any ? highest : before);
    for (int64_t r = 0; r < count; r++) {
      if (!any[r]) continue;
      float* to = sum.sums + (first + r) * width;
      const float* from = part.sums + (first + r) * width;
      const float factor = old[r], other = young[r];
      for (int64_t i = 0; i < width; i += LANES)
        store(to + i, load<Vector>(to + i) * factor + load<Vector>(from + i) * other);
    }
  }
}

// The keys of a span that a query row sees: low .. high-1. The vectors of the keys from
// unmasked_begin to unmasked_end need no mask; these are nearly all of them.
struct VisibleKeys {
  int64_t low, high, unmasked_begin, unmasked_end;

  VisibleKeys(int64_t first, int64_t end, int64_t num_keys)
      : low(std::max<int64_t>(first, 0)),
        high(std::min(end, num_keys)),
        unmasked_begin(std::min((low + LANES - 1) / LANES * LANES, num_keys)),
        unmasked_end(std::max(unmasked_begin, high / LANES * LANES)) {}

  Integers at(int64_t key) const {
    return (LANE_NUMBERS >= (int32_t)(low - key)) & (LANE_NUMBERS < (int32_t)(high - key));
  }
};

// The largest of a row's visible scores.
inline float highest_of(const float* scores, const VisibleKeys& visible, int64_t num_keys) {
  const Vector nothing = broadcast(-std::numeric_limits<float>::infinity());
  Vector best = nothing, other = nothing;
  const auto masked = [&](int64_t key) {
    return visible.at(key) ? load<Vector>(scores + key) : nothing;
  };
  int64_t key = 0;
  for (; key < visible.unmasked_begin; key += LANES) best = maximum(best, masked(key));
  for (; key + LANES < visible.unmasked_end; key += 2 * LANES) {
    best = maximum(best, load<Vector>(scores + key));
    other = maximum(other, load<Vector>(scores + key + LANES));
  }
  for (; key < num_keys; key += LANES) best = maximum(best, masked(key));
  return largest_of(maximum(best, other));
}

// Writes a row's softmax weights 2^(score * scaling - highest), 0 for masked keys, each times the
// factor of its key, and returns the sum of the weights without factors. `scaled(key, weights)`
// multiplies the weights of the keys key .. key+15; factors of masked keys may be NaN.
template <class Row, class Scaled>
float softmax_weights(const float* scores, const VisibleKeys& visible, int64_t num_keys,
                      float scaling, float highest, const Scaled& scaled,
                      typename Row::Element* weights) {
  Vector total = Vector{};
  const auto weight_at = [&](int64_t key) {
    return Row::exp2_rounded(load<Vector>(scores + key) * scaling - highest);
  };
  const auto masked = [&](int64_t key) {
    const Integers seen = visible.at(key);
    const Vector weight = weight_at(key);
    total += seen ? weight : Vector{};
    Row::narrow16(weights + key, seen ? scaled(key, weight) : Vector{});
  };
  int64_t key = 0;
  for (; key < visible.unmasked_begin; key += LANES) masked(key);
  for (; key + LANES < visible.unmasked_end; key += 2 * LANES) {
    const Vector weight = weight_at(key), next = weight_at(key + LANES);
    total += weight;
    total += next;
    Row::narrow32(weights + key, scaled(key, weight), scaled(key + LANES, next));
  }
  for (; key < num_keys; key += LANES) masked(key);
  return sum_of(total);
}

}  // namespace quire
