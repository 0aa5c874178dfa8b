// The layout of keys and values in the blocks of a KV cache. Knows no attention.
//
// A block holds one key head after the other. Keys of a head are transposed: strips of 16 slots,
// packed along the head dimension, so that the micro-kernel computes 16 scores at once and sums no
// lanes. Values are packed for the weighted sum: for each 16 slots, strips of 16 columns, packed
// along the slots. If the block size (for values, also the head dimension) is not a multiple of 16,
// a key strip has all slots of the block, and values are stored slot by slot.
//
// A quantized cache has 8-bit integers, and one float32 scale per slot after the integers of a
// head. Its strips have the elements of a word in different vectors: the first elements of sixteen
// words, then the second ones. Its block size and head dimension are multiples of 16.
#pragma once

#include "rounded_rows.h"

namespace quire {

constexpr int64_t MAX_HEAD_DIM = 512;
// The largest magnitude of an integer of a quantized cache; heads below SMALLEST become zeros, since
// 127 / magnitude must be finite.
constexpr float LARGEST_INTEGER = 127.0f, SMALLEST_MAGNITUDE = 1e-30f;

struct CacheShape {
  int64_t kv_heads, block_size, head_dim;
  int64_t element_bytes;  // 1 for a quantized cache.

  bool is_quantized() const { return element_bytes == 1; }

  // Slots of a strip of keys: 16, or all slots of the block if its size is not a multiple of 16.
  int64_t strip_width() const { return block_size % LANES == 0 ? LANES : block_size; }

  bool packs_values() const { return block_size % LANES == 0 && head_dim % LANES == 0; }

  // Bytes of one key or value, with its scale.
  int64_t slot_bytes() const {
    return head_dim * element_bytes + (is_quantized() ? (int64_t)sizeof(float) : 0);
  }
  int64_t head_bytes() const { return block_size * slot_bytes(); }

  // The part of one head in a block; Byte is char or const char.
  template <class Byte>
  Byte* head_of(Byte* cache, int64_t block, int64_t kv_head) const {
    return cache + (block * kv_heads + kv_head) * head_bytes();
  }

  // Where the scale of a slot is in the part of a head.
  int64_t scale_offset(int64_t slot) const {
    return block_size * head_dim + slot * (int64_t)sizeof(float);
  }
};

// Rounds to integers from -127 to 127, and returns their scale: the value of an integer is the
// integer times the scale. `size` is a multiple of 16. If a number is not finite, the scale is NaN.
inline float quantize(const float* from, int64_t size, int8_t* to) {
  Vector largest{}, zero{};
  for (int64_t i = 0; i < size; i += LANES) {
    const Vector value = load<Vector>(from + i);
    largest = maximum(largest, absolute(value));
    zero += value * 0.0f;
  }
  const float magnitude = largest_of(largest);
  const float factor = magnitude > SMALLEST_MAGNITUDE ? LARGEST_INTEGER / magnitude : 0.0f;
  for (int64_t i = 0; i < size; i += LANES) {
    const Vector rounded = round_to_integer(load<Vector>(from + i) * factor);
    const Vector finite = rounded == rounded ? rounded : Vector{};
    store(to + i, __builtin_convertvector(__builtin_convertvector(finite, Integers), Bytes));
  }
  return magnitude / LARGEST_INTEGER + sum_of(zero);
}

// Writes a key to slot `offset` of one head in a block.
template <class T>
void store_key(const CacheShape& cache, char* head, int64_t offset, const float* key) {
  if (cache.is_quantized()) {
    int8_t integers[MAX_HEAD_DIM];
    const float scale = quantize(key, cache.head_dim, integers);
    std::memcpy(head + cache.scale_offset(offset), &scale, sizeof scale);
    const int64_t lane = offset % LANES;
    char* const to = head + (offset - lane) * cache.head_dim + lane;
    for (int64_t i = 0; i < cache.head_dim; i++) to[i * LANES] = integers[i];
    return;
  }
  const int64_t width = cache.strip_width(), inner = cache.head_dim / T::PER_WORD;
  typename T::Element narrowed[MAX_HEAD_DIM];
  narrow_row(RoundedRow<T>{narrowed}, key, cache.head_dim);
  uint32_t* to = (uint32_t*)head + offset / width * width * inner + offset % width;
  for (int64_t k = 0; k < inner; k++)
    std::memcpy(to + k * width, narrowed + k * T::PER_WORD, sizeof(uint32_t));
}

// Writes a value to slot `offset` of one head in a block.
template <class T>
void store_value(const CacheShape& cache, char* head, int64_t offset, const float* value) {
  constexpr int64_t WIDTH = LANES * T::PER_WORD;
  typename T::Element* const elements = (typename T::Element*)head;
  const int64_t lane = offset % LANES;
  if (cache.is_quantized()) {
    int8_t integers[MAX_HEAD_DIM];
    const float scale = quantize(value, cache.head_dim, integers);
    std::memcpy(head + cache.scale_offset(offset), &scale, sizeof scale);
    char* const to = head + (offset - lane) * cache.head_dim + lane * LANES;
    for (int64_t i = 0; i < cache.head_dim; i += LANES)
      std::memcpy(to + i * LANES, integers + i, LANES);
    return;
  }
  if (!cache.packs_values()) {
    narrow_row(RoundedRow<T>{elements + offset * cache.head_dim}, value, cache.head_dim);
    return;
  }
  typename T::Element* to = elements + (offset - lane) * cache.head_dim + lane / T::PER_WORD * WIDTH;
  for (int64_t i = 0; i < cache.head_dim; i += LANES, to += LANES * LANES) {
    typename T::Element narrowed[LANES];
    T::narrow16(narrowed, load<Vector>(value + i));
    for (int64_t c = 0; c < LANES; c++) to[c * T::PER_WORD + lane % T::PER_WORD] = narrowed[c];
  }
}

}  // namespace quire
