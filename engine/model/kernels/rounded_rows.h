// Activation rows, rounded to the type in which they are multiplied. Knows no layer.
#pragma once

#include "vector.h"

namespace quire {

// Where a rounded row is written. With low parts (split precision), a value is the sum of its
// rounded value and its low part.
template <class T>
struct RoundedRow {
  typedef typename T::Element Element;

  Element* values;
  Element* low = nullptr;  // The rounding errors, rounded themselves; null to drop them.

  RoundedRow offset_by(int64_t offset) const {
    return {values + offset, low != nullptr ? low + offset : nullptr};
  }
  void vector(int64_t i, Vector value) const {
    T::narrow16(values + i, value);
    if (low != nullptr) T::narrow16(low + i, value - T::widen16(values + i));
  }
  void scalar(int64_t i, float value) const {
    values[i] = T::narrow(value);
    if (low != nullptr) low[i] = T::narrow(value - T::widen(values[i]));
  }
};

// Rounded rows, `stride` elements apart.
template <class T>
struct RoundedRows {
  typename T::Element* values = nullptr;
  typename T::Element* low = nullptr;
  int64_t stride = 0;

  RoundedRow<T> at(int64_t row, int64_t column = 0) const {
    return RoundedRow<T>{values, low}.offset_by(row * stride + column);
  }
  // The same rows, with or without their low parts.
  RoundedRows with_low(bool keep) const { return {values, keep ? low : nullptr, stride}; }
};

template <class T>
inline void narrow_row(const RoundedRow<T>& to, const float* from, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) to.vector(i, load<Vector>(from + i));
  for (; i < size; i++) to.scalar(i, from[i]);
}

}  // namespace quire
