// Rows on their way into a product, in the type in which they are multiplied. Knows no layer.
#pragma once

#include "vector.h"

namespace quire {

// Where a row goes that is rounded to a type, if that takes anything.
template <class T>
struct Place {
  typedef typename T::Element Element;

  Element* values;
  Element* rest = nullptr;  // For what the rounding takes; null to lose it.

  Place further(int64_t offset) const {
    return {values + offset, rest != nullptr ? rest + offset : nullptr};
  }
  void vector(int64_t i, Vector value) const {
    T::narrow16(values + i, value);
    if (rest != nullptr) T::narrow16(rest + i, value - T::widen16(values + i));
  }
  void one(int64_t i, float value) const {
    values[i] = T::narrow(value);
    if (rest != nullptr) rest[i] = T::narrow(value - T::widen(values[i]));
  }
};

// Such rows, `stride` elements apart.
template <class T>
struct Rounded {
  typename T::Element* values = nullptr;
  typename T::Element* rest = nullptr;
  int64_t stride = 0;

  Place<T> at(int64_t row, int64_t column = 0) const {
    return Place<T>{values, rest}.further(row * stride + column);
  }
  // The same, with what rounding takes or without it.
  Rounded kept(bool fine) const { return {values, fine ? rest : nullptr, stride}; }
};

template <class T>
inline void narrow_row(const Place<T>& to, const float* from, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) to.vector(i, load<Vector>(from + i));
  for (; i < size; i++) to.one(i, from[i]);
}

}  // namespace quire
