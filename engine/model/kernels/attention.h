// Causal attention through block tables, for chunks and decodes alike. Knows no layer's weights.
//
// A unit of work is some tokens of one row with the query heads of one key head. It walks over the
// context in spans of SPAN keys: scores, softmax within the span, weighted sum of the values, and
// then folds the span into what it has so far. Spans begin at multiples of SPAN whatever the
// request's neighbours and chunks, and a masked key adds an exact zero: a token's result depends on
// its own context alone, bit for bit. When there are fewer units than threads could use, the spans
// of a row are computed apart and folded later, in the same order.
#pragma once

#include <cmath>
#include <limits>

#include "cache.h"
#include "multiply.h"
#include "plan.h"

namespace quire {

// The keys first .. last-1 of one key head of one row.
struct Keys {
  const AttentionRow* row;
  int64_t kv_head, first, last;
};

// What attention over some keys amounts to: unnormalised sums, their weights' total, the maximum.
struct Partial {
  float *sums, *total, *highest;

  static int64_t size(int64_t rows, int64_t width) { return rows * (width + 2); }
  Partial(float* memory, int64_t rows, int64_t width)
      : sums(memory), total(memory + rows * width), highest(total + rows) {}
};

inline void clear(const Partial& partial, int64_t rows, int64_t width) {
  std::fill(partial.sums, partial.sums + rows * width, 0.0f);
  std::fill(partial.total, partial.total + rows, 0.0f);
  std::fill(partial.highest, partial.highest + rows, -std::numeric_limits<float>::infinity());
}

// Adds the keys of `part` to `sum`.
inline void fold(const Partial& sum, const Partial& part, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r++) {
    if (part.total[r] == 0.0f) continue;  // Every key of the part was masked.
    const float highest = std::max(sum.highest[r], part.highest[r]);
    const float old = std::exp(sum.highest[r] - highest), young = std::exp(part.highest[r] - highest);
    sum.total[r] = sum.total[r] * old + part.total[r] * young;
    sum.highest[r] = highest;
    float* to = sum.sums + r * width;
    const float* from = part.sums + r * width;
    for (int64_t i = 0; i < width; i += LANES)
      store(to + i, load<Vector>(to + i) * old + load<Vector>(from + i) * young);
  }
}

// One thread's hands: the span it works on. `memory` is scratch_size() floats, aligned to 64 bytes.
template <class T>
class SpanWorker {
  typedef typename T::Element Element;

 public:
  SpanWorker(const CacheShape& cache, int64_t group, float scaling, float* memory)
      : cache_(cache), group_(group), scaling_(scaling) {
    width_ = padded(cache.head_dim);
    const int64_t rows = max_rows(group);
    scores_ = memory;
    weights_ = (Element*)(scores_ + rows * SPAN);
    values_ = (uint32_t*)(scores_ + 2 * rows * SPAN);
    gathered_ = values_ + width_ * SPAN;
    part_ = (float*)(gathered_ + width_ * SPAN);
  }

  static int64_t padded(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }
  static int64_t max_rows(int64_t group) { return std::max(UNIT_ROWS, group); }
  static int64_t scratch_size(const CacheShape& cache, int64_t group) {
    const int64_t rows = max_rows(group), width = padded(cache.head_dim);
    return rows * SPAN * 2 + width * SPAN * 2 + (Partial::size(rows, width) + 15) / 16 * 16;
  }

  // Folds the unit's spans into `sum`; at `queries` are its rows, one token's heads after the other.
  // `next` is what this thread will do afterwards, if it is known: its first span is fetched.
  void attend(const Unit& unit, const AttentionRow* rows, const Place<T>& queries,
              const Element* key_cache, const Element* value_cache, int64_t window,
              const Unit* next, const Partial& sum) {
    const AttentionRow& row = rows[unit.row];
    const int64_t num_rows = (unit.last_token - unit.first_token) * group_;
    const int64_t first_position = row.start() + unit.first_token;
    const Partial part(part_, num_rows, width_);
    keys_at_ = key_cache;
    values_at_ = value_cache;
    for (int64_t span = unit.first_span; span < unit.last_span; span++) {
      const Keys keys = keys_of(unit, rows, span, window);
      if (keys.first >= keys.last) continue;
      if (span + 1 < unit.last_span)
        next_ = keys_of(unit, rows, span + 1, window);
      else
        next_ = next ? keys_of(*next, rows, next->first_span, window) : Keys{nullptr, 0, 0, 0};
      score(num_rows, queries, keys);
      for (int64_t r = 0; r < num_rows; r++) {
        const int64_t position = first_position + r / group_;
        soften(r, window > 0 ? position - window + 1 - keys.first : 0, position + 1 - keys.first,
               keys.last - keys.first, part);
      }
      pack_values(keys);
      weigh(num_rows, keys.last - keys.first, part);
      fold(sum, part, num_rows, width_);
    }
  }

 private:
  // The keys of a span that any token of the unit sees, from a whole strip on: what is left out in
  // front of the window would add zeros. Possibly none.
  static Keys keys_of(const Unit& unit, const AttentionRow* rows, int64_t span, int64_t window) {
    const AttentionRow& row = rows[unit.row];
    const int64_t position = row.start() + unit.first_token, base = span * SPAN;
    const int64_t begin = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
    return {&row, unit.kv_head, base + std::max<int64_t>(0, begin - base) / LANES * LANES,
            std::min(base + SPAN, row.start() + unit.last_token)};
  }

  void score(int64_t rows, const Place<T>& queries, const Keys& keys) {
    const int64_t inner = cache_.head_dim / T::PER_WORD;
    for (int64_t key = keys.first; key < keys.last; key += TILE_STRIPS * LANES) {
      const int64_t count = std::min<int64_t>(TILE_STRIPS, (keys.last - key + LANES - 1) / LANES);
      const uint32_t* strips[TILE_STRIPS];
      for (int64_t s = 0; s < count; s++) strips[s] = key_strip(keys, key + s * LANES, s);
      for (const Element* part : {queries.values, queries.rest}) {
        if (part == nullptr) continue;
        for_each_tile(rows, [&](int64_t r, int64_t n) {
          tile_of<T>(n, count)((const uint32_t*)part + r * inner, inner, strips, inner,
                               scores_ + r * SPAN + (key - keys.first), SPAN,
                               part != queries.values, (const char*)strips[0]);
        });
      }
    }
  }

  // Where the next span's 16 slots from its key number `offset` on lie; null where none do.
  const char* next_slots(const Element* cache, int64_t offset) const {
    const int64_t position = next_.first + offset;
    if (position >= next_.last || cache_.strip_width() != LANES) return nullptr;
    return (const char*)(block_of(next_, cache, position) +
                         position % cache_.block_size / LANES * LANES *
                             (cache_.head_dim / T::PER_WORD));
  }

  const uint32_t* block_of(const Keys& keys, const Element* cache, int64_t position) const {
    const int64_t block = keys.row->table[position / cache_.block_size];
    return (const uint32_t*)cache_.head_of(cache, block, keys.kv_head);
  }

  // The strip of keys from `position` on: where it lies, or gathered where blocks hold other widths.
  const uint32_t* key_strip(const Keys& keys, int64_t position, int64_t index) {
    const int64_t inner = cache_.head_dim / T::PER_WORD;
    if (cache_.strip_width() == LANES)
      return block_of(keys, keys_at_, position) +
             position % cache_.block_size / LANES * LANES * inner;
    uint32_t* to = gathered_ + index * LANES * inner;
    for (int64_t lane = 0; lane < LANES && position + lane < keys.last; lane++) {
      const uint32_t* from = block_of(keys, keys_at_, position + lane) +
                             (position + lane) % cache_.block_size;
      for (int64_t k = 0; k < inner; k++) to[k * LANES + lane] = from[k * cache_.block_size];
    }
    return to;
  }

  // Row r's scores become weights: those of the keys low .. high-1, and zero for the others. Where
  // all lanes count nothing is masked, which is nearly everywhere.
  void soften(int64_t r, int64_t low, int64_t high, int64_t num_keys, const Partial& part) {
    const Integers lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Vector nothing = broadcast(-std::numeric_limits<float>::infinity());
    low = std::max<int64_t>(low, 0);
    high = std::min(high, num_keys);
    const int64_t whole = std::min((low + LANES - 1) / LANES * LANES, num_keys);
    const int64_t rest = std::max(whole, high / LANES * LANES);
    const float* scores = scores_ + r * SPAN;
    Element* weights = weights_ + r * SPAN;
    const auto visible = [&](int64_t key) {
      return (lanes >= (int32_t)(low - key)) & (lanes < (int32_t)(high - key));
    };
    const auto masked = [&](int64_t key) {
      return visible(key) ? load<Vector>(scores + key) : nothing;
    };
    Vector best = nothing;
    for (int64_t key = 0; key < whole; key += LANES) best = larger(best, masked(key));
    for (int64_t key = whole; key < rest; key += LANES)
      best = larger(best, load<Vector>(scores + key));
    for (int64_t key = rest; key < num_keys; key += LANES) best = larger(best, masked(key));
    const float highest = largest_of(best) * scaling_;
    Vector total = Vector{};
    const auto weigh_up = [&](int64_t key, auto&& kept) {
      const Vector weight = kept(exponential(load<Vector>(scores + key) * scaling_ - highest));
      total += weight;
      T::narrow16(weights + key, weight);
    };
    const auto all = [](Vector weight) { return weight; };
    for (int64_t key = 0; key < whole; key += LANES)
      weigh_up(key, [&](Vector weight) { return visible(key) ? weight : Vector{}; });
    for (int64_t key = whole; key < rest; key += LANES) weigh_up(key, all);
    for (int64_t key = rest; key < num_keys; key += LANES)
      weigh_up(key, [&](Vector weight) { return visible(key) ? weight : Vector{}; });
    part.total[r] = sum_of(total);
    part.highest[r] = highest;
  }

  // Where the keys' values lie; one division per block instead of one per key.
  void locate_values(const Keys& keys) {
    const int64_t size = cache_.block_size, dim = cache_.head_dim;
    int64_t key = keys.first, offset = keys.first % size;
    for (int64_t block = keys.first / size; key < keys.last; block++, offset = 0) {
      const Element* from =
          (const Element*)block_of(keys, values_at_, block * size) + offset * dim;
      for (; offset < size && key < keys.last; offset++, key++, from += dim)
        slots_[key - keys.first] = from;
    }
  }

  // The keys' values become strips over the head, with the keys as inner dimension.
  void pack_values(const Keys& keys) {
    const int64_t dim = cache_.head_dim, num_keys = keys.last - keys.first;
    const int64_t inner = (num_keys + T::PER_WORD - 1) / T::PER_WORD;
    Element tail[2][LANES] = {};
    // The next span comes from memory, a little with every word, while this one is packed.
    const int64_t bytes = dim * T::PER_WORD * (int64_t)sizeof(Element);
    const char *next_keys = nullptr, *next_values = nullptr;
    locate_values(keys);
    for (int64_t k = 0; k < inner; k++) {
      const int64_t key = k * T::PER_WORD, left = std::min<int64_t>(num_keys - key, T::PER_WORD);
      if (key % LANES == 0) {
        next_keys = next_slots(keys_at_, key);
        next_values = next_slots(values_at_, key);
      }
      for (int64_t i = 0; next_keys != nullptr && i < bytes; i += 64) {
        __builtin_prefetch(next_keys + key % LANES / T::PER_WORD * bytes + i, 0, 2);
        __builtin_prefetch(next_values + key % LANES / T::PER_WORD * bytes + i, 0, 2);
      }
      int64_t column = 0;
      for (; column + LANES <= dim; column += LANES)
        store(values_ + (column / LANES * inner + k) * LANES,
              T::across_rows(slots_ + key, column, left));
      if (column == dim) continue;
      for (int64_t i = 0; i < left; i++)
        std::copy(slots_[key + i] + column, slots_[key + i] + dim, tail[i]);
      const Element* const tails[2] = {tail[0], tail[1]};
      store(values_ + (column / LANES * inner + k) * LANES, T::across_rows(tails, 0, left));
    }
  }

  void weigh(int64_t rows, int64_t num_keys, const Partial& part) {
    const int64_t inner = (num_keys + T::PER_WORD - 1) / T::PER_WORD;
    const int64_t stride = SPAN / T::PER_WORD, num_strips = width_ / LANES;
    const uint32_t* words = (const uint32_t*)weights_;
    for (int64_t strip = 0; strip < num_strips; strip += TILE_STRIPS) {
      const int64_t count = std::min<int64_t>(TILE_STRIPS, num_strips - strip);
      const uint32_t* strips[TILE_STRIPS];
      for (int64_t s = 0; s < count; s++) strips[s] = values_ + (strip + s) * inner * LANES;
      for_each_tile(rows, [&](int64_t r, int64_t n) {
        tile_of<T>(n, count)(words + r * stride, stride, strips, inner,
                             part.sums + r * width_ + strip * LANES, width_, false,
                             (const char*)strips[0]);
      });
    }
  }

  const CacheShape cache_;
  const int64_t group_;
  const float scaling_;
  int64_t width_;
  float* scores_;
  Element* weights_;
  uint32_t *values_, *gathered_;
  float* part_;
  const Element *keys_at_, *values_at_;  // The layer's caches.
  Keys next_;
  const Element* slots_[SPAN];
};

}  // namespace quire
