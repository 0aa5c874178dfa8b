// Causal attention through block tables, for chunks and decodes alike. Knows no layer's weights.
//
// A unit of work is some tokens of one row with the query heads of one key head. It walks over the
// context in spans of SPAN keys: scores, softmax within the span, weighted sum of the values, and
// then folds the span into what it has so far. Spans begin at multiples of SPAN whatever the
// request's neighbours and chunks, and a masked key adds an exact zero: a token's result depends on
// its own context alone, bit for bit. When there are fewer units than threads could use, the spans
// of a row are computed apart and folded later, in the same order.
#pragma once

#include "multiply.h"
#include "strip_pointers.h"
#include "softmax.h"

namespace quire {

// One thread's hands: the span it works on. `memory` is scratch_size() floats, aligned to 64 bytes.
template <class T>
class SpanWorker {
  typedef typename T::Element Element;
  typedef typename T::Row Row;
  typedef typename T::RowWord RowWord;
  // Words of sixteen values of a column.
  static constexpr int64_t WORDS = LANES / T::PER_WORD;
  // Keys whose weighted values are summed in one step of a tile, in an order of its own.
  static constexpr int64_t STEP_KEYS = Tiles<T>::WORDS * T::PER_WORD;
  static_assert(Keys::TURN_STRIPS == TILE_STRIPS, "score() and Pieces go the same way");

 public:
  SpanWorker(const CacheShape& cache, const Element* key_cache, const Element* value_cache,
             int64_t group, float scaling, float* memory)
      : cache_(cache),
        keys_at_(key_cache),
        values_at_(value_cache),
        group_(group),
        scaling_(scaling * LOG2_E) {
    width_ = padded(cache.head_dim);
    const int64_t rows = max_rows(group);
    scores_ = memory;
    weights_ = (typename Row::Element*)(scores_ + rows * SPAN);
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

  // What the unit's spans amount to, in `sum`, whose rows are one head's after the other. At
  // `queries` are the first head's, one token's query heads after the other, and `head_stride`
  // elements further the next head's. `next` is what this thread will do afterwards, if it is known:
  // the first of its keys are fetched.
  void attend(const Unit& unit, const AttentionRow* rows, const Place<Row>& queries,
              int64_t head_stride, int64_t window, const Unit* next, const Partial& sum) {
    const int64_t num_rows = unit.num_rows(group_), rows_of_head = num_rows / unit.num_heads;
    const int64_t first_position = rows[unit.row].start() + unit.first_token;
    const Partial more(part_, num_rows, width_);
    bool begun = false;
    for (int64_t span = unit.first_span; span < unit.last_span; span++) {
      const Keys keys = keys_of(unit, rows, span, window);
      if (keys.first >= keys.last) continue;
      Keys then;
      if (span + 1 < unit.last_span)
        then = keys_of(unit, rows, span + 1, window);
      else if (next != nullptr)
        then = keys_of(*next, rows, next->first_span, window);
      list_pieces(keys, then);
      score(rows_of_head, queries, head_stride, keys);
      const int64_t num_keys = keys.last - keys.first;
      const auto visible = [&](int64_t r) {
        const int64_t position = first_position + r % rows_of_head / group_;
        return Visible(window > 0 ? position - window + 1 - keys.first : 0,
                       position + 1 - keys.first, num_keys);
      };
      const Partial& part = begun ? more : sum;
      // One after the other, the steps of a row's maximum would be waited for.
      for (int64_t r = 0; r < num_rows; r++)
        part.highest[r] = highest_of(scores_ + r * SPAN, visible(r), num_keys) * scaling_;
      for (int64_t r = 0; r < num_rows; r++)
        part.total[r] = soften<Row>(scores_ + r * SPAN, visible(r), num_keys, scaling_,
                                    part.highest[r], weights_ + r * SPAN);
      weigh(rows_of_head, keys, part);
      if (begun) fold(sum, more, num_rows, width_);
      begun = true;
    }
    if (!begun) clear(sum, num_rows, width_);
  }

 private:
  // The keys of a span that any token of the unit sees, from a whole step on: what is left out in
  // front of the window would add zeros. Where the steps begin is the same for all units, whatever
  // their first tokens, or some keys' values would be summed in another order. Possibly none.
  static Keys keys_of(const Unit& unit, const AttentionRow* rows, int64_t span, int64_t window) {
    const AttentionRow& row = rows[unit.row];
    const int64_t position = row.start() + unit.first_token, base = span * SPAN;
    const int64_t begin = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
    return {&row, unit.kv_head, unit.num_heads,
            base + std::max<int64_t>(0, begin - base) / STEP_KEYS * STEP_KEYS,
            std::min(base + SPAN, row.start() + unit.last_token)};
  }

  // The pieces of `keys`, which were those to come as a rule, and of `then`.
  void list_pieces(const Keys& keys, const Keys& then) {
    std::swap(pieces_, next_pieces_);
    if (!pieces_->are_of(keys)) pieces_->list(cache_, keys, keys_at_, values_at_);
    next_pieces_->list(cache_, then, keys_at_, values_at_);
    pieces_->go_on_with(*next_pieces_);
  }

  // What is fetched beside piece number `piece` and its neighbours: those that come next, a line of
  // each of them at a time.
  Fetch beside(int64_t piece, int64_t begin = 0) const {
    if (pieces_->count() == 0) return {};
    return {pieces_->places(piece + TILE_STRIPS), TILE_STRIPS, begin};
  }

  void score(int64_t rows, const Place<Row>& queries, int64_t head_stride, const Keys& keys) {
    for (int64_t first = 0; first < keys.num_strips(); first += TILE_STRIPS) {
      const int64_t count = std::min<int64_t>(TILE_STRIPS, keys.num_strips() - first);
      for (int64_t head = 0; head < keys.num_heads; head++)
        score_strips(rows, queries.further(head * head_stride), keys, head, first, count);
    }
  }

  void score_strips(int64_t rows, const Place<Row>& queries, const Keys& keys, int64_t head,
                    int64_t first, int64_t count) {
    const int64_t inner = cache_.head_dim / T::PER_WORD;
    const int64_t number = first * keys.num_heads + head * count;
    const uint32_t* at[TILE_STRIPS];
    for (int64_t s = 0; s < count; s++) at[s] = key_strip(keys, head, first + s, number + s, s);
    float* const scores = scores_ + head * rows * SPAN + first * LANES;
    for (const auto* part : {queries.values, queries.rest}) {
      if (part == nullptr) continue;
      for_each_tile(rows, Tiles<T>::ROWS, [&](int64_t r, int64_t n) {
        const bool first_tile = r == 0 && part == queries.values;
        Tiles<T>::multiply(n, (const RowWord*)part + r * inner, inner,
                           {at, count, 1, inner, first_tile ? beside(number) : Fetch()},
                           scores + r * SPAN, SPAN, part != queries.values);
      });
    }
  }

  const uint32_t* block_of(const Keys& keys, int64_t head, const Element* cache,
                           int64_t position) const {
    const int64_t block = keys.row->table[position / cache_.block_size];
    return (const uint32_t*)cache_.head_of(cache, block, keys.kv_head + head);
  }

  // Strip number `strip` of a head's keys: the piece it is, or gathered where blocks hold other
  // widths.
  const uint32_t* key_strip(const Keys& keys, int64_t head, int64_t strip, int64_t piece,
                            int64_t place) {
    const int64_t inner = cache_.head_dim / T::PER_WORD;
    if (pieces_->count() > 0) return (const uint32_t*)*pieces_->places(piece);
    const int64_t position = keys.first + strip * LANES;
    uint32_t* to = gathered_ + place * LANES * inner;
    for (int64_t lane = 0; lane < LANES && position + lane < keys.last; lane++) {
      const uint32_t* from = block_of(keys, head, keys_at_, position + lane) +
                             (position + lane) % cache_.block_size;
      for (int64_t k = 0; k < inner; k++) to[k * LANES + lane] = from[k * cache_.block_size];
    }
    return to;
  }

  void weigh(int64_t rows, const Keys& keys, const Partial& part) {
    for (int64_t first = 0; first < keys.num_strips(); first += keys.turn()) {
      const int64_t count = std::min(keys.turn(), keys.num_strips() - first);
      for (int64_t head = 0; head < keys.num_heads; head++)
        weigh_strips(rows, keys, head, first, count, part);
    }
  }

  // Strips of `words` words, those of one segment behind each other; `piece` is the first segment's
  // number, if others are to be fetched meanwhile.
  struct Segments {
    const uint32_t* const* at;
    int64_t count, words, piece = -1;
  };

  // Adds what `count` times sixteen keys' values weigh; the first ones begin the sum.
  void weigh_strips(int64_t rows, const Keys& keys, int64_t head, int64_t first, int64_t count,
                    const Partial& part) {
    const int64_t number = (keys.num_strips() + first) * keys.num_heads + head * count;
    const uint32_t* values[SPAN / LANES];
    for (int64_t i = 0; i < count; i++)
      values[i] = value_strips(keys, head, first + i, number + i, i);
    if constexpr (Tiles<T>::WORDS == WORDS) {
      weigh_segments(rows, head, first, {values, count, WORDS, number}, part);
    } else {
      const uint32_t* pairs[SPAN / LANES / 2];
      join(values, count, number, pairs);
      if (count > 1) weigh_segments(rows, head, first, {pairs, count / 2, 2 * WORDS}, part);
      if (count % 2 == 1)
        weigh_segments(rows, head, first + count - 1, {values + count - 1, 1, WORDS}, part);
    }
  }

  void weigh_segments(int64_t rows, int64_t head, int64_t first, const Segments& segments,
                      const Partial& part) {
    const int64_t stride = SPAN / T::PER_WORD, num_strips = width_ / LANES;
    const uint32_t* at[SPAN / LANES * TILE_STRIPS];
    const RowWord* const weights =
        (const RowWord*)weights_ + head * rows * stride + first * WORDS;
    for (int64_t strip = 0; strip < num_strips; strip += TILE_STRIPS) {
      const int64_t width = std::min<int64_t>(TILE_STRIPS, num_strips - strip);
      for (int64_t i = 0; i < segments.count; i++)
        for (int64_t s = 0; s < width; s++)
          at[i * width + s] = segments.at[i] + (strip + s) * segments.words * LANES;
      const Fetch fetch = segments.piece < 0 ? Fetch() : beside(segments.piece, strip * WORDS * 64);
      float* const sums = part.sums + head * rows * width_ + strip * LANES;
      for_each_tile(rows, Tiles<T>::ROWS, [&](int64_t r, int64_t n) {
        Tiles<T>::multiply(n, weights + r * stride, stride,
                           {at, width, segments.count, segments.words, r == 0 ? fetch : Fetch()},
                           sums + r * width_, width_, first > 0);
      });
    }
  }

  // Copies pieces, each two next to each other, strip by strip: the matrix unit is done with half of
  // a register no sooner than with a whole one.
  void join(const uint32_t* const* values, int64_t count, int64_t number, const uint32_t** pairs) {
    constexpr int64_t STRIP = WORDS * LANES;
    const int64_t size = width_ * WORDS;
    for (int64_t i = 0; i < count; i++) {
      uint32_t* to = gathered_ + i / 2 * 2 * size + i % 2 * STRIP;
      if (i % 2 == 0) pairs[i / 2] = to;
      const char* const next = pieces_->count() > 0 ? *pieces_->places(number + i + TILE_STRIPS)
                                                    : (const char*)values[i];
      for (int64_t k = 0; k < size; k += STRIP, to += 2 * STRIP)
        for (int64_t j = 0; j < STRIP; j += LANES) {
          __builtin_prefetch(next + (k + j) * (int64_t)sizeof(uint32_t), 0, 2);
          store(to + j, load<Words>(values[i] + k + j));
        }
    }
  }

  // The strips of sixteen keys' values: the piece they are, or a copy in which there are zeros for
  // keys that do not count.
  const uint32_t* value_strips(const Keys& keys, int64_t head, int64_t strip, int64_t piece,
                               int64_t place) {
    const int64_t num_keys = std::min<int64_t>(keys.last - keys.first - strip * LANES, LANES);
    uint32_t* const to = values_ + place * width_ * WORDS;
    if (!cache_.packs_values()) {
      pack_values(keys, head, keys.first + strip * LANES, num_keys, to);
      return to;
    }
    const uint32_t* from = (const uint32_t*)*pieces_->places(piece);
    if (num_keys == LANES) return from;
    for (int64_t i = 0; i < width_ * WORDS; i += LANES) {
      const int64_t left = num_keys - i / LANES % WORDS * T::PER_WORD;
      Words words = left > 0 ? load<Words>(from + i) : Words{};
      if (left == 1) words = T::first_of(words);
      store(to + i, words);
    }
    return to;
  }

  // Values that lie slot after slot become strips.
  void pack_values(const Keys& keys, int64_t head, int64_t position, int64_t num_keys,
                   uint32_t* to) {
    const int64_t size = cache_.block_size, dim = cache_.head_dim;
    const Element* slots[LANES];
    for (int64_t i = 0; i < num_keys; i++)
      slots[i] = (const Element*)block_of(keys, head, values_at_, position + i) +
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
              whole ? T::across_rows(slots + key, column, left) : T::across_rows(tails, 0, left));
      }
  }

  const CacheShape cache_;
  const Element *const keys_at_, *const values_at_;  // The layer's caches.
  const int64_t group_;
  const float scaling_;
  int64_t width_;
  float* scores_;
  typename Row::Element* weights_;
  uint32_t *values_, *gathered_;
  float* part_;
  Pieces<T> listed_[2], *pieces_ = &listed_[0], *next_pieces_ = &listed_[1];
};

}  // namespace quire
