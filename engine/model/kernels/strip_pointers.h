// Pointers to the keys and values of a span, in the order in which they are read. Knows no
// arithmetic.
#pragma once

#include "cache.h"
#include "plan.h"

namespace quire {

// The keys first .. last-1 of one row, for the key heads kv_head .. kv_head + num_heads - 1.
struct KeyRange {
  const AttentionRow* row = nullptr;
  int64_t kv_head = 0, num_heads = 0, first = 0, last = 0;

  // Number of strips of sixteen keys, per head.
  int64_t num_strips() const { return (last - first + LANES - 1) / LANES; }
  // Strips of one head that are read before the strips of the next head, so that consecutive reads
  // are close together in memory.
  int64_t strips_per_head() const { return num_heads > 1 ? STRIPS_PER_HEAD : SPAN / LANES; }

  bool operator==(const KeyRange& other) const {
    return row == other.row && kv_head == other.kv_head && num_heads == other.num_heads &&
           first == other.first && last == other.last;
  }

  static constexpr int64_t STRIPS_PER_HEAD = 4;
};

// The pointers to all strips of a span's keys, then to all strips of its values; a strip here is
// what sixteen slots hold of one head. Blocks are scattered in memory, so prefetching needs the
// addresses early.
class StripPointers {
 public:
  // Lists the strips of `keys`. Empty if blocks do not contain whole strips.
  void list(const CacheShape& cache, const KeyRange& keys, const char* key_cache,
            const char* value_cache) {
    keys_ = keys;
    count_ = 0;
    if (keys.first >= keys.last || cache.strip_width() != LANES) return;
    const int64_t key_bytes = cache.head_dim * cache.element_bytes;
    for (const char* from : {key_cache, value_cache}) {
      const int64_t* block = keys.row->table + keys.first / cache.block_size;
      int64_t slot = keys.first % cache.block_size;
      for (int64_t first = 0; first < keys.num_strips(); first += keys.strips_per_head()) {
        const int64_t count = std::min(keys.strips_per_head(), keys.num_strips() - first);
        for (int64_t strip = 0; strip < count; strip++) {
          const char* at = cache.head_of(from, *block, keys.kv_head) + slot * key_bytes;
          for (int64_t head = 0; head < keys.num_heads; head++)
            pointers_[count_ + head * count + strip] = at + head * cache.head_bytes();
          slot += LANES;
          if (slot < cache.block_size) continue;
          slot = 0;
          block++;
        }
        count_ += count * keys.num_heads;
      }
    }
  }

  // Appends the first pointers of `next`, which is read afterwards, so that prefetching can run
  // past the end.
  void append(const StripPointers& next) {
    for (int64_t i = 0; i < EXTRA && count_ > 0; i++)
      pointers_[count_ + i] = i < next.count_ ? next.pointers_[i] : pointers_[count_ - 1];
  }

  bool lists(const KeyRange& keys) const { return keys_ == keys; }
  int64_t count() const { return count_; }
  // The pointers from index `first` on; EXTRA more than count() exist.
  const char* const* from(int64_t first) const { return pointers_ + first; }

 private:
  static constexpr int64_t EXTRA = 2 * KeyRange::STRIPS_PER_HEAD;

  KeyRange keys_;
  int64_t count_ = 0;
  const char* pointers_[2 * SPAN / LANES * MAX_UNIT_HEADS + EXTRA];
};

}  // namespace quire
