// From scores to weights, and sums of several spans into one. Knows no keys and no cache.
#pragma once

#include <algorithm>
#include <limits>

#include "vector.h"

namespace quire {

// What attention over some keys amounts to: unnormalised sums, their weights' total, and the largest
// score, as an exponent of two. The last two come in whole vectors.
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

// Adds the keys of `part` to `sum`, sixteen rows at a time.
inline void fold(const Partial& sum, const Partial& part, int64_t rows, int64_t width) {
  for (int64_t first = 0; first < rows; first += LANES) {
    const int64_t count = std::min<int64_t>(LANES, rows - first);
    const Vector total = load<Vector>(sum.total + first), more = load<Vector>(part.total + first);
    const Vector before = load<Vector>(sum.highest + first);
    const Vector found = load<Vector>(part.highest + first), highest = larger(before, found);
    // Nothing is added where every key of the part was masked.
    const Integers any = (more != Vector{}) & (NUMBERS < (int32_t)count);
    const Vector old = power_of_two(before - highest), young = power_of_two(found - highest);
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

// Which of a span's scores count for a row: low .. high-1. Those from `whole` to `rest` are in
// vectors without any that does not, which is nearly everywhere.
struct Visible {
  int64_t low, high, whole, rest;

  Visible(int64_t first, int64_t behind, int64_t num_keys)
      : low(std::max<int64_t>(first, 0)),
        high(std::min(behind, num_keys)),
        whole(std::min((low + LANES - 1) / LANES * LANES, num_keys)),
        rest(std::max(whole, high / LANES * LANES)) {}

  Integers at(int64_t key) const {
    return (NUMBERS >= (int32_t)(low - key)) & (NUMBERS < (int32_t)(high - key));
  }
};

// The largest of a row's visible scores.
inline float highest_of(const float* scores, const Visible& visible, int64_t num_keys) {
  const Vector nothing = broadcast(-std::numeric_limits<float>::infinity());
  Vector best = nothing, other = nothing;
  const auto masked = [&](int64_t key) {
    return visible.at(key) ? load<Vector>(scores + key) : nothing;
  };
  int64_t key = 0;
  for (; key < visible.whole; key += LANES) best = larger(best, masked(key));
  for (; key + LANES < visible.rest; key += 2 * LANES) {
    best = larger(best, load<Vector>(scores + key));
    other = larger(other, load<Vector>(scores + key + LANES));
  }
  for (; key < num_keys; key += LANES) best = larger(best, masked(key));
  return largest_of(larger(best, other));
}

// A row's weights, 2^(score * scaling - highest), and their total: zero for keys that do not count.
template <class Row>
float soften(const float* scores, const Visible& visible, int64_t num_keys, float scaling,
             float highest, typename Row::Element* weights) {
  Vector total = Vector{};
  const auto weight_at = [&](int64_t key) {
    return Row::power(load<Vector>(scores + key) * scaling - highest);
  };
  const auto masked = [&](int64_t key) {
    const Vector weight = visible.at(key) ? weight_at(key) : Vector{};
    total += weight;
    Row::narrow16(weights + key, weight);
  };
  int64_t key = 0;
  for (; key < visible.whole; key += LANES) masked(key);
  for (; key + LANES < visible.rest; key += 2 * LANES) {
    const Vector weight = weight_at(key), next = weight_at(key + LANES);
    total += weight;
    total += next;
    Row::narrow32(weights + key, weight, next);
  }
  for (; key < num_keys; key += LANES) masked(key);
  return sum_of(total);
}

}  // namespace quire
