// Keys and values of a span in the order in which they are worked on. Knows no arithmetic.
#pragma once

#include "cache.h"
#include "plan.h"

namespace quire {

// The keys first .. last-1 of one row, of `num_heads` key heads from `kv_head` on.
struct Keys {
  const AttentionRow* row = nullptr;
  int64_t kv_head = 0, num_heads = 0, first = 0, last = 0;

  // Strips of sixteen keys of one head.
  int64_t num_strips() const { return (last - first + LANES - 1) / LANES; }
  // So many strips of a head are worked on before it is the next head's turn: what is read then
  // lies together in memory.
  int64_t turn() const { return num_heads > 1 ? TURN_STRIPS : SPAN / LANES; }

  bool operator==(const Keys& other) const {
    return row == other.row && kv_head == other.kv_head && num_heads == other.num_heads &&
           first == other.first && last == other.last;
  }

  static constexpr int64_t TURN_STRIPS = 4;
};

// The places of the keys, then of the values, of a span: what sixteen slots hold of one head is a
// piece. Blocks are scattered, and who reads them has to know early where the next one lies.
template <class T>
class Pieces {
  typedef typename T::Element Element;

 public:
  // None where blocks do not hold whole strips.
  void list(const CacheShape& cache, const Keys& keys, const Element* key_cache,
            const Element* value_cache) {
    keys_ = keys;
    count_ = 0;
    if (keys.first >= keys.last || cache.strip_width() != LANES) return;
    const int64_t head_size = cache.block_size * cache.head_dim;
    for (const Element* from : {key_cache, value_cache}) {
      const int64_t* block = keys.row->table + keys.first / cache.block_size;
      int64_t slot = keys.first % cache.block_size;
      for (int64_t first = 0; first < keys.num_strips(); first += keys.turn()) {
        const int64_t count = std::min(keys.turn(), keys.num_strips() - first);
        for (int64_t strip = 0; strip < count; strip++) {
          const Element* at = cache.head_of(from, *block, keys.kv_head) + slot * cache.head_dim;
          for (int64_t head = 0; head < keys.num_heads; head++)
            at_[count_ + head * count + strip] = (const char*)(at + head * head_size);
          slot += LANES;
          if (slot < cache.block_size) continue;
          slot = 0;
          block++;
        }
        count_ += count * keys.num_heads;
      }
    }
  }

  // What will be read afterwards: its first pieces stand behind the last ones here.
  void go_on_with(const Pieces& next) {
    for (int64_t i = 0; i < BEHIND && count_ > 0; i++)
      at_[count_ + i] = i < next.count_ ? next.at_[i] : at_[count_ - 1];
  }

  bool are_of(const Keys& keys) const { return keys_ == keys; }
  int64_t count() const { return count_; }
  // From number `first` on, BEHIND more than there are.
  const char* const* places(int64_t first) const { return at_ + first; }

 private:
  static constexpr int64_t BEHIND = 2 * Keys::TURN_STRIPS;

  Keys keys_;
  int64_t count_ = 0;
  const char* at_[2 * SPAN / LANES * MAX_TOGETHER + BEHIND];
};

}  // namespace quire
