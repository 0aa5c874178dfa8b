// Causal attention over paged keys and values, for prompt chunks and decodes alike. Knows no
// layer's weights.
//
// A unit of work is some tokens of one row, with the query heads of one or more key heads. It
// processes the context in spans of SPAN keys: scores, softmax within the span, weighted sum of the
// values; then it merges the span into the partial result of the spans before. Spans begin at
// multiples of SPAN, whatever other requests and chunks the step has, and a masked key adds an
// exact zero: so a token's result depends on its own context alone, bit for bit. If there are too
// few units for the threads, the spans of a row are computed by different threads and merged later,
// in the same order.
#pragma once

#include "multiply.h"
#include "strip_pointers.h"
#include "softmax.h"

namespace quire {

// Per-thread scratch state for one span. `memory` has scratch_size() floats, aligned to 64 bytes.
template <class T>
class SpanWorker {
  typedef typename T::Element Element;
  typedef typename T::Row Row;
  typedef typename T::RowWord RowWord;
  // Words that sixteen slots of one value column take.
  static constexpr int64_t WORDS = LANES / T::PER_WORD;
  // Keys whose weighted values one step of a micro-kernel sums, in an order that the hardware
  // chooses.
  static constexpr int64_t STEP_KEYS = Tiles<T>::WORDS * T::PER_WORD;
  static constexpr int64_t LINE_BYTES = 64;
  static_assert(KeyRange::STRIPS_PER_HEAD == TILE_STRIPS,
                "score() reads strips in the order of StripPointers");

 public:
  SpanWorker(const CacheShape& cache, const void* key_cache, const void* value_cache, int64_t group,
             float scaling, float softcap, float* memory)
      : cache_(cache),
        key_cache_((const char*)key_cache),
        value_cache_((const char*)value_cache),
        group_(group),
        softcap_(softcap),
        factor_(scaling),
        scaling_((softcap > 0.0f ? 1.0f : scaling) * LOG2_E) {
    width_ = padded(cache.head_dim);
    const int64_t rows = max_rows(group);
    scores_ = memory;
    weights_ = (typename Row::Element*)(scores_ + rows * SPAN);
    values_ = (uint32_t*)(scores_ + 2 * rows * SPAN);
    gathered_ = values_ + width_ * SPAN;
    value_scales_ = (float*)(gathered_ + width_ * SPAN);
    part_ = value_scales_ + SPAN;
  }

  static int64_t padded(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }
  static int64_t max_rows(int64_t group) { return std::max(UNIT_ROWS, group); }
  static int64_t scratch_size(const CacheShape& cache, int64_t group) {
    const int64_t rows = max_rows(group), width = padded(cache.head_dim);
    return (rows * 2 + width * 2 + 1) * SPAN +
           (Partial::size(rows, width) + 15) / 16 * 16;
  }

  // Computes the partial result of the unit's spans into `sum`, whose rows are in the order key
  // head, token, query head. `queries` points to the rows of the first key head, in the order
  // token, query head; those of the next key head are `head_stride` elements further. `next` is the
  // unit that this thread computes next, or null if unknown: its first keys are prefetched.
  void attend(const Unit& unit, const AttentionRow* rows, const RoundedRow<Row>& queries,
              int64_t head_stride, int64_t window, const Unit* next, const Partial& sum) {
    const int64_t num_rows = unit.num_rows(group_), rows_of_head = num_rows / unit.num_heads;
    const int64_t first_position = rows[unit.row].start() + unit.first_token;
    const Partial more(part_, num_rows, width_);
    bool has_sum = false;
    for (int64_t span = unit.first_span; span < unit.last_span; span++) {
      const KeyRange keys = keys_of(unit, rows, span, window);
      if (keys.first >= keys.last) continue;
      KeyRange next_keys;
      if (span + 1 < unit.last_span)
        next_keys = keys_of(unit, rows, span + 1, window);
      else if (next != nullptr)
        next_keys = keys_of(*next, rows, next->first_span, window);
      list_strips(keys, next_keys);
      score(rows_of_head, queries, head_stride, keys);
      const int64_t num_keys = keys.last - keys.first;
      if (softcap_ > 0.0f) cap_scores(num_rows, num_keys);
      const auto visible = [&](int64_t r) {
        const int64_t position = first_position + r % rows_of_head / group_;
        return VisibleKeys(window > 0 ? position - window + 1 - keys.first : 0,
                           position + 1 - keys.first, num_keys);
      };
      const Partial& part = has_sum ? more : sum;
      // In two loops, so that the maxima of several rows overlap: each is a chain of dependent
      // steps.
      for (int64_t r = 0; r < num_rows; r++)
        part.highest[r] = highest_of(scores_ + r * SPAN, visible(r), num_keys) * scaling_;
      find_weights(rows_of_head, keys, visible, part);
      weigh(rows_of_head, keys, part);
      if (has_sum) merge(sum, more, num_rows, width_);
      has_sum = true;
    }
    if (!has_sum) clear(sum, num_rows, width_);
  }

 private:
  // The keys of a span that at least one token of the unit sees; possibly none. Steps in front of
  // the window are left out, since they would add zeros. The first key is rounded down to a
  // multiple of STEP_KEYS, so that steps begin at the same keys in every unit: otherwise the order
  // in which values are summed would depend on the unit's first token.
  static KeyRange keys_of(const Unit& unit, const AttentionRow* rows, int64_t span,
                          int64_t window) {
    const AttentionRow& row = rows[unit.row];
    const int64_t position = row.start() + unit.first_token, base = span * SPAN;
    const int64_t begin = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
    return {&row, unit.kv_head, unit.num_heads,
            base + std::max<int64_t>(0, begin - base) / STEP_KEYS * STEP_KEYS,
            std::min(base + SPAN, row.start() + unit.last_token)};
  }

  // Lists the strips of `keys`, usually already listed by the previous call, and those of `next`.
  void list_strips(const KeyRange& keys, const KeyRange& next) {
    std::swap(strips_, next_strips_);
    if (!strips_->lists(keys)) strips_->list(cache_, keys, key_cache_, value_cache_);
    next_strips_->list(cache_, next, key_cache_, value_cache_);
    strips_->append(*next_strips_);
  }

  // The prefetch for a tile that reads the strips from `index` on: the TILE_STRIPS strips after
  // them, one line of each at a time, from byte `offset` on.
  Prefetch prefetch_after(int64_t index, int64_t offset = 0) const {
    if (strips_->count() == 0) return {};
    return {strips_->from(index + TILE_STRIPS), TILE_STRIPS, offset};
  }

  void score(int64_t rows, const RoundedRow<Row>& queries, int64_t head_stride,
             const KeyRange& keys) {
    for (int64_t first = 0; first < keys.num_strips(); first += TILE_STRIPS) {
      const int64_t count = std::min<int64_t>(TILE_STRIPS, keys.num_strips() - first);
      for (int64_t head = 0; head < keys.num_heads; head++)
        score_strips(rows, queries.offset_by(head * head_stride), keys, head, first, count);
    }
  }

  // Multiplies the scores of some strips by the scales of their keys. Those of masked keys may be
  // anything.
  void scale_scores(float* scores, int64_t rows, const KeyRange& keys, int64_t head, int64_t first,
                    int64_t count) {
    for (int64_t s = 0; s < count; s++) {
      const Vector scales = load<Vector>(scales_of(keys, head, key_cache_, first + s));
      for (int64_t r = 0; r < rows; r++) {
        float* const score = scores + r * SPAN + s * LANES;
        store(score, load<Vector>(score) * scales);
      }
    }
  }

  // Applies the factor and the cap to the scores. Those of masked keys may be anything, before and after.
  void cap_scores(int64_t rows, int64_t num_keys) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t key = 0; key < num_keys; key += LANES) {
        float* const score = scores_ + r * SPAN + key;
        store(score, capped(load<Vector>(score) * factor_, softcap_));
      }
  }

  // Writes the softmax weights of each row and their sum. The weights are multiplied by the scales
  // of the values, if these have any.
  template <class Visible>
  void find_weights(int64_t rows, const KeyRange& keys, const Visible& visible,
                    const Partial& part) {
    const int64_t num_keys = keys.last - keys.first;
    const auto find = [&](int64_t r, const auto& scaled) {
      part.total[r] = softmax_weights<Row>(scores_ + r * SPAN, visible(r), num_keys, scaling_,
                                           part.highest[r], scaled, weights_ + r * SPAN);
    };
    const auto alone = [](int64_t, Vector weight) { return weight; };
    const auto scaled = [&](int64_t key, Vector weight) {
      return weight * load<Vector>(value_scales_ + key);
    };
    for (int64_t head = 0, r = 0; head < keys.num_heads; head++) {
      if (!cache_.is_quantized()) {
        for (const int64_t end = r + rows; r < end; r++) find(r, alone);
        continue;
      }
      for (int64_t strip = 0; strip < keys.num_strips(); strip++)
        std::copy_n(scales_of(keys, head, value_cache_, strip), LANES,
                    value_scales_ + strip * LANES);
      for (const int64_t end = r + rows; r < end; r++) find(r, scaled);
    }
  }

  void score_strips(int64_t rows, const RoundedRow<Row>& queries, const KeyRange& keys,
                    int64_t head, int64_t first, int64_t count) {
    const int64_t inner = cache_.head_dim / T::PER_WORD;
    const int64_t index = first * keys.num_heads + head * count;
    const uint32_t* at[TILE_STRIPS];
    for (int64_t s = 0; s < count; s++) at[s] = key_strip(keys, head, first + s, index + s, s);
    float* const scores = scores_ + head * rows * SPAN + first * LANES;
    for (const auto* part : {queries.values, queries.low}) {
      if (part == nullptr) continue;
      for_each_tile(rows, Tiles<T>::ROWS, [&](int64_t r, int64_t n) {
        const bool first_tile = r == 0 && part == queries.values && !cache_.is_quantized();
        Tiles<T>::multiply(n, (const RowWord*)part + r * inner, inner,
                           {at, count, 1, inner, first_tile ? prefetch_after(index) : Prefetch()},
                           scores + r * SPAN, SPAN, part != queries.values);
      });
    }
    if (cache_.is_quantized()) scale_scores(scores, rows, keys, head, first, count);
  }

  const char* block_of(const KeyRange& keys, int64_t head, const char* cache,
                       int64_t position) const {
    const int64_t block = keys.row->table[position / cache_.block_size];
    return cache_.head_of(cache, block, keys.kv_head + head);
  }

  // The scales of a strip of a quantized cache.
  const float* scales_of(const KeyRange& keys, int64_t head, const char* cache,
                         int64_t strip) const {
    const int64_t position = keys.first + strip * LANES;
    return (const float*)(block_of(keys, head, cache, position) +
                          cache_.scale_offset(position % cache_.block_size));
  }

  // Widens the integers that sixteen slots have in the strip with index `index`. Meanwhile it
  // prefetches the strip that is widened TILE_STRIPS strips later, and the scales behind it.
  const uint32_t* widen_strip(int64_t index, uint32_t* to) const {
    const int64_t size = cache_.head_dim * LANES;
    const char* const from = *strips_->from(index);
    const char* const next = *strips_->from(index + TILE_STRIPS);
    uint32_t* words = to;
    for (int64_t line = 0; line < size; line += LINE_BYTES) {
      for (int64_t i = line; i < line + LINE_BYTES; i += LANES * T::PER_WORD, words += LANES)
        store(words, T::widen_words((const int8_t*)from + i));
      prefetch_line(next + line);
    }
    prefetch_line(next + size);
    return to;
  }

  // A pointer to strip number `strip` of a head's keys, which has index `index` among the listed
  // strips. Where blocks do not contain whole strips, it is copied to slot `copy` of the gather
  // buffer.
  const uint32_t* key_strip(const KeyRange& keys, int64_t head, int64_t strip, int64_t index,
                            int64_t copy) {
    const int64_t inner = cache_.head_dim / T::PER_WORD;
    uint32_t* to = gathered_ + copy * LANES * inner;
    if (cache_.is_quantized()) return widen_strip(index, to);
    if (strips_->count() > 0) return (const uint32_t*)*strips_->from(index);
    const int64_t position = keys.first + strip * LANES;
    for (int64_t lane = 0; lane < LANES && position + lane < keys.last; lane++) {
      const uint32_t* from = (const uint32_t*)block_of(keys, head, key_cache_, position + lane) +
                             (position + lane) % cache_.block_size;
      for (int64_t k = 0; k < inner; k++) to[k * LANES + lane] = from[k * cache_.block_size];
    }
    return to;
  }

  void weigh(int64_t rows, const KeyRange& keys, const Partial& part) {
    for (int64_t first = 0; first < keys.num_strips(); first += keys.strips_per_head()) {
      const int64_t count = std::min(keys.strips_per_head(), keys.num_strips() - first);
      for (int64_t head = 0; head < keys.num_heads; head++)
        weigh_strips(rows, keys, head, first, count, part);
    }
  }

  // `count` segments of keys: the value strips of one segment follow each other and have `words`
  // words each. `index` is the first segment's index among the listed strips; -1: prefetch nothing.
  struct Segments {
    const uint32_t* const* at;
    int64_t count, words, index = -1;
  };

  // Adds the weighted values of `count` times sixteen keys; overwrites the sum if `first` is 0.
  void weigh_strips(int64_t rows, const KeyRange& keys, int64_t head, int64_t first, int64_t count,
                    const Partial& part) {
    const int64_t index = (keys.num_strips() + first) * keys.num_heads + head * count;
    const uint32_t* values[SPAN / LANES];
    for (int64_t i = 0; i < count; i++)
      values[i] = value_strips(keys, head, first + i, index + i, i);
    if constexpr (Tiles<T>::WORDS == WORDS) {
      const int64_t prefetched = cache_.is_quantized() ? -1 : index;
      weigh_segments(rows, head, first, {values, count, WORDS, prefetched}, part);
    } else {
      const uint32_t* pairs[SPAN / LANES / 2];
      join(values, count, index, pairs);
      if (count > 1) weigh_segments(rows, head, first, {pairs, count / 2, 2 * WORDS}, part);
      if (count % 2 == 1)
        weigh_segments(rows, head, first + count - 1, {values + count - 1, 1, WORDS}, part);
    }
  }

  void weigh_segments(int64_t rows, int64_t head, int64_t first, const Segments& segments,
                      const Partial& part) {
    const int64_t stride = SPAN / T::PER_WORD, num_strips = width_ / LANES;
    const uint32_t* at[SPAN / LANES * TILE_STRIPS];
    const RowWord* const weights = (const RowWord*)weights_ + head * rows * stride + first * WORDS;
    for (int64_t strip = 0; strip < num_strips; strip += TILE_STRIPS) {
      const int64_t width = std::min<int64_t>(TILE_STRIPS, num_strips - strip);
      for (int64_t i = 0; i < segments.count; i++)
        for (int64_t s = 0; s < width; s++)
          at[i * width + s] = segments.at[i] + (strip + s) * segments.words * LANES;
      const Prefetch prefetch =
          segments.index < 0 ? Prefetch() : prefetch_after(segments.index, strip * WORDS * 64);
      float* const sums = part.sums + head * rows * width_ + strip * LANES;
      for_each_tile(rows, Tiles<T>::ROWS, [&](int64_t r, int64_t n) {
        Tiles<T>::multiply(
            n, weights + r * stride, stride,
            {at, width, segments.count, segments.words, r == 0 ? prefetch : Prefetch()},
            sums + r * width_, width_, first > 0);
      });
    }
  }

  // Copies each two segments of values into one of twice the length, which fills a tile register:
  // the matrix unit takes as long for half a register as for a whole one.
  void join(const uint32_t* const* values, int64_t count, int64_t index, const uint32_t** pairs) {
    constexpr int64_t STRIP = WORDS * LANES;
    const int64_t size = width_ * WORDS;
    for (int64_t i = 0; i < count; i++) {
      uint32_t* to = gathered_ + i / 2 * 2 * size + i % 2 * STRIP;
      if (i % 2 == 0) pairs[i / 2] = to;
      const char* const next =
          strips_->count() > 0 && !cache_.is_quantized() ? *strips_->from(index + i + TILE_STRIPS) : (const char*)values[i];
      for (int64_t k = 0; k < size; k += STRIP, to += 2 * STRIP)
        for (int64_t j = 0; j < STRIP; j += LANES) {
          __builtin_prefetch(next + (k + j) * (int64_t)sizeof(uint32_t), 0, 2);
          store(to + j, load<Words>(values[i] + k + j));
        }
    }
  }

  // A pointer to the values of sixteen keys. Integers are widened to slot `copy` of the value
  // buffer; those of missing keys stay, since their weights are zero. If the cache does not pack
  // values or fewer than sixteen keys are there, they are copied there, with zeros for missing keys.
  const uint32_t* value_strips(const KeyRange& keys, int64_t head, int64_t strip, int64_t index,
                               int64_t copy) {
    const int64_t num_keys = std::min<int64_t>(keys.last - keys.first - strip * LANES, LANES);
    uint32_t* const to = values_ + copy * width_ * WORDS;
    if (cache_.is_quantized()) return widen_strip(index, to);
    if (!cache_.packs_values()) {
      pack_values(keys, head, keys.first + strip * LANES, num_keys, to);
      return to;
    }
    const uint32_t* from = (const uint32_t*)*strips_->from(index);
    if (num_keys == LANES) return from;
    for (int64_t i = 0; i < width_ * WORDS; i += LANES) {
      const int64_t left = num_keys - i / LANES % WORDS * T::PER_WORD;
      Words words = left > 0 ? load<Words>(from + i) : Words{};
      if (left == 1) words = T::first_elements(words);
      store(to + i, words);
    }
    return to;
  }

  // Packs values that are stored slot by slot into strips.
  void pack_values(const KeyRange& keys, int64_t head, int64_t position, int64_t num_keys,
                   uint32_t* to) {
    const int64_t size = cache_.block_size, dim = cache_.head_dim;
    const Element* slots[LANES];
    for (int64_t i = 0; i < num_keys; i++)
      slots[i] = (const Element*)block_of(keys, head, value_cache_, position + i) +
                 (position + i) % size * dim;
    std::fill_n(to, width_ * WORDS, 0);
    for (int64_t column = 0; column < dim; column += LANES, to += WORDS * LANES)
      for (int64_t key = 0; key < num_keys; key += T::PER_WORD) {
        const int64_t left = std::min<int64_t>(num_keys - key, T::PER_WORD);
        Element tail[2][LANES] = {};
        const Element* const tails[2] = {tail[0], tail[1]};
        const bool whole = column + LANES <= dim;
        for (int64_t i = 0; i < left && !whole; i++)
          std::copy(slots[key + i] + column, slots[key + i] + dim, tail[i]);
        store(to + key / T::PER_WORD * LANES,
              whole ? T::pack_rows(slots + key, column, left) : T::pack_rows(tails, 0, left));
      }
  }

  const CacheShape cache_;
  const char *const key_cache_, *const value_cache_;  // The layer's caches.
  const int64_t group_;
  // The cap of the scores, or 0; their factor before the cap; and their factor as exponents of two,
  // after the cap.
  const float softcap_, factor_, scaling_;
  int64_t width_;
  float* scores_;
  typename Row::Element* weights_;
  uint32_t *values_, *gathered_;
  float *value_scales_, *part_;
  StripPointers strip_lists_[2], *strips_ = &strip_lists_[0], *next_strips_ = &strip_lists_[1];
};

}  // namespace quire
