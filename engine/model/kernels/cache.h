// The layout of keys and values in the blocks of a KV cache. Knows no attention.
//
// A block holds one key head after the other. Keys of a head are transposed: strips of 16 slots,
// packed along the head dimension, so that the micro-kernel computes 16 scores at once and sums no
// lanes. Values are packed for the weighted sum: for each 16 slots, strips of 16 columns, packed
// along the slots. If the block size (for values, also the head dimension) is not a multiple of 16,
// a key strip has all slots of the block, and values are stored slot by slot.
#pragma once

#include "rounded_rows.h"

namespace quire {

constexpr int64_t MAX_HEAD_DIM = 512;

struct CacheShape {
  int64_t kv_heads, block_size, head_dim;

  // Slots of a strip of keys: 16, or all slots of the block if its size is not a multiple of 16.
  int64_t strip_width() const { return block_size % LANES == 0 ? LANES : block_size; }

  bool packs_values() const { return block_size % LANES == 0 && head_dim % LANES == 0; }

  template <class E>
  E* head_of(E* cache, int64_t block, int64_t kv_head) const {
    return cache + (block * kv_heads + kv_head) * block_size * head_dim;
  }
};

// Writes a key to slot `offset` of one head in a block.
template <class T>
void store_key(const CacheShape& cache, typename T::Element* head, int64_t offset,
               const float* key) {
  const int64_t width = cache.strip_width(), inner = cache.head_dim / T::PER_WORD;
  typename T::Element narrowed[MAX_HEAD_DIM];
  narrow_row(RoundedRow<T>{narrowed}, key, cache.head_dim);
  uint32_t* to = (uint32_t*)head + offset / width * width * inner + offset % width;
  for (int64_t k = 0; k < inner; k++)
    std::memcpy(to + k * width, narrowed + k * T::PER_WORD, sizeof(uint32_t));
}

// Writes a value to slot `offset` of one head in a block.
template <class T>
void store_value(const CacheShape& cache, typename T::Element* head, int64_t offset,
                 const float* value) {
  constexpr int64_t WIDTH = LANES * T::PER_WORD;
  if (!cache.packs_values()) {
    narrow_row(RoundedRow<T>{head + offset * cache.head_dim}, value, cache.head_dim);
    return;
  }
  const int64_t lane = offset % LANES;
  typename T::Element* to = head + (offset - lane) * cache.head_dim + lane / T::PER_WORD * WIDTH;
  for (int64_t i = 0; i < cache.head_dim; i += LANES, to += LANES * LANES) {
    typename T::Element narrowed[LANES];
    T::narrow16(narrowed, load<Vector>(value + i));
    for (int64_t c = 0; c < LANES; c++) to[c * T::PER_WORD + lane % T::PER_WORD] = narrowed[c];
  }
}

}  // namespace quire
