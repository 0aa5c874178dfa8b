// The argmax of each row of logits, computed in the epilogue of the head's product. For many rows,
// writing the logits and reading them again would take longer than reading the head's weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "layers.h"

namespace quire {

// Returned instead of a token if the largest logit is not finite; as in causal_model.py.
constexpr int64_t BROKEN = -2;

// One thread's maximum of each row so far, lane by lane; a writer of outputs, as in layers.h. A
// thread gets the strips of a row in ascending order, so the first of equal values is kept. A NaN
// counts as the largest value.
class RowArgmax {
 public:
  static constexpr int64_t ROW_SIZE = 2 * LANES;  // In floats.

  // `memory` has ROW_SIZE floats for each row; columns from `limit` on are padding and ignored.
  RowArgmax(float* memory, int64_t limit, const LogitScale& scale)
      : best_(memory), limit_(limit), scale_(scale) {}

  void clear(int64_t rows) const {
    for (int64_t r = 0; r < rows; r++) {
      store(best_ + r * ROW_SIZE, broadcast(-std::numeric_limits<float>::infinity()));
      store(best_ + r * ROW_SIZE + LANES, Integers{});
    }
  }

  void vector(int64_t row, int64_t column, Vector value) const {
    if (column + LANES > limit_) {
      for (int64_t lane = 0; lane < LANES; lane++) scalar(row, column + lane, value[lane]);
      return;
    }
    float* const best = best_ + row * ROW_SIZE;
    value = scale_(value);
    const Vector values = load<Vector>(best);
    const Integers strips = load<Integers>(best + LANES);
    const Integers better = (value > values) | (value != value);
    store(best, better ? value : values);
    store(best + LANES, better ? (int32_t)(column / LANES) - Integers{} : strips);
  }

  void scalar(int64_t row, int64_t column, float value) const {
    if (column >= limit_) return;
    float* const best = best_ + row * ROW_SIZE + column % LANES;
    value = scale_(value);
    if (!(value > *best) && !std::isnan(value)) return;
    const int32_t strip = (int32_t)(column / LANES);
    *best = value;
    std::memcpy(best + LANES, &strip, sizeof strip);
  }

  // The column of a row's largest logit over all threads; BROKEN if that logit is not finite. The
  // threads' memories are `stride` floats apart.
  static int64_t merge(const float* memory, int64_t stride, int threads, int64_t row) {
    float largest = -std::numeric_limits<float>::infinity();
    int64_t column = BROKEN;
    for (int thread = 0; thread < threads; thread++) {
      const float* const best = memory + thread * stride + row * ROW_SIZE;
      const Integers strips = load<Integers>(best + LANES);
      for (int64_t lane = 0; lane < LANES; lane++) {
        const int64_t found = strips[lane] * LANES + lane;
        if (std::isnan(best[lane])) return BROKEN;
        if (best[lane] < largest || (best[lane] == largest && found > column)) continue;
        largest = best[lane];
        column = found;
      }
    }
    return std::isfinite(largest) ? column : BROKEN;
  }

 private:
  float* const best_;
  const int64_t limit_;
  const LogitScale scale_;
};

}  // namespace quire
