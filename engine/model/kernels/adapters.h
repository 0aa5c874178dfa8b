// Low-rank adapters: what they add to the rows of a product. Knows no layer and no request.
//
// First every row with an adapter is multiplied by the adapter's few columns `down`; then, wherever
// sixteen outputs of such a row are complete, what `up` makes of that is added to them. Both run in
// an order that depends on the row and its adapter alone.
#pragma once

#include <vector>

#include "product.h"
#include "rounded_rows.h"
#include "workspace.h"

namespace quire {

// The rows of a step that are computed with an adapter, those of one adapter after the other.
struct AdaptedRows {
  struct Group {
    int64_t adapter, first, count;
  };

  std::vector<Group> groups;
  std::vector<int64_t> rows;      // Of the step; in the order of the groups.
  std::vector<int64_t> adapters;  // One for each of them.
  std::vector<int64_t> places;    // Of every row of the step, its place among them; or -1.

  // Row i is token indices[i], or token i where that is null; `adapter_of` has one per token.
  void plan(const int64_t* adapter_of, const int64_t* indices, int64_t count,
            int64_t num_adapters) {
    const auto adapter_at = [&](int64_t i) { return adapter_of[indices ? indices[i] : i]; };
    starts_.assign((size_t)num_adapters + 1, 0);
    for (int64_t i = 0; i < count; i++)
      if (adapter_at(i) >= 0) starts_[(size_t)adapter_at(i) + 1]++;
    groups.clear();
    for (int64_t a = 0; a < num_adapters; a++) {
      if (starts_[a + 1] > 0) groups.push_back({a, starts_[a], starts_[a + 1]});
      starts_[a + 1] += starts_[a];
    }
    rows.resize((size_t)starts_[num_adapters]);
    adapters.resize(rows.size());
    places.assign((size_t)count, -1);
    for (int64_t i = 0; i < count; i++) {
      if (adapter_at(i) < 0) continue;
      const int64_t place = starts_[adapter_at(i)]++;
      rows[place] = i;
      adapters[place] = adapter_at(i);
      places[i] = place;
    }
  }

 private:
  std::vector<int64_t> starts_;
};

// to[s] = values[s] + row[first of up s] . up s, for S strips of as many words.
template <class T, int S>
inline void add_strips(const typename T::RowWord* row, const QuireUp* ups, int64_t words,
                       const float* values, float* to) {
  // Words in turns for two sums, where there are registers enough: one would wait for itself.
  constexpr int WIDTH = S * PARTS, TURNS = PARTS == 1 ? 2 : 1;
  const typename T::RowWord* rows[S];
  const uint32_t* packed[S];
  for (int s = 0; s < S; s++) {
    rows[s] = row + ups[s].first;
    packed[s] = (const uint32_t*)ups[s].packed;
  }
  PartVector total[TURNS][WIDTH] = {};
  const auto add_word = [&](int64_t k, int turn) {
#pragma GCC unroll 16
    for (int p = 0; p < WIDTH; p++) {
      const uint32_t* const from = packed[p / PARTS] + k * LANES + p % PARTS * PART_LANES;
      const PartWords words = load<PartWords>(from);
#pragma GCC unroll 2
      for (int i = 0; i < T::FACTORS; i++)
        total[turn][p] = T::multiply(total[turn][p], T::factor(rows[p / PARTS][k], i),
                                     T::columns(words, i));
    }
  };
  int64_t k = 0;
  for (; k + TURNS <= words; k += TURNS)
#pragma GCC unroll 2
    for (int turn = 0; turn < TURNS; turn++) add_word(k + turn, turn);
  if (k < words) add_word(k, 0);
#pragma GCC unroll 16
  for (int p = 0; p < WIDTH; p++) {
    const PartVector sum = load<PartVector>(values + p * PART_LANES) + total[0][p];
    store(to + p * PART_LANES, TURNS > 1 ? sum + total[TURNS - 1][p] : sum);
  }
}

// What the adapters of a step add to one product.
template <class T>
class Additions {
  typedef typename T::Row Row;
  typedef typename Row::Element Element;

 public:
  // The most rows of one adapter that are multiplied by `down` at once, and the fewest where there
  // are more; and into how many such pieces of work rows are cut for each thread.
  static constexpr int64_t UNIT_ROWS = 24, FEW_ROWS = 4, UNITS_EACH = 4;
  // What a row is added is fetched while so many rows before it are computed.
  static constexpr int64_t AHEAD_ROWS = 8;

  // Adds nothing.
  Additions() {}
  // `additions` are those of the first adapter, and `stride` further those of the next. `reduced`
  // has room for all adapted rows, `reduced_stride` elements apart.
  Additions(const AdaptedRows& rows, const QuireAddition* additions, int64_t stride,
            Element* reduced, int64_t reduced_stride)
      : rows_(&rows),
        additions_(additions),
        stride_(stride),
        reduced_(reduced),
        reduced_stride_(reduced_stride),
        scattered_(rows.rows.size() < AHEAD_ROWS * rows.groups.size()) {}

  // Of an adapter with rows in the step, for this product.
  bool any() const {
    if (rows_ == nullptr) return false;
    return std::any_of(rows_->groups.begin(), rows_->groups.end(),
                       [&](const auto& group) { return of(group.adapter).down != nullptr; });
  }

  // One thread's part of the rows times `down`. Rows that do not lie together are gathered first,
  // in `gathered`, which has room for UNIT_ROWS of them.
  void reduce(const Rounded<Row>& from, int64_t inputs, Team& team, int member, Element* gathered,
              float* sums) const {
    const int64_t each = (int64_t)rows_->rows.size() / (UNITS_EACH * team.size());
    const int64_t height = std::clamp(each, FEW_ROWS, UNIT_ROWS);
    const int64_t words = inputs / T::PER_WORD * LANES;
    size_t group = 0;
    int64_t first_unit = 0;
    Unit unit = find(member, height, &group, &first_unit), later;
    for (; unit.addition != nullptr; unit = later) {
      later = find(team.take(), height, &group, &first_unit);
      Ahead next{nullptr, 0, true};
      if (later.addition != nullptr)
        next = {(const uint32_t*)later.addition->down + later.strip * words,
                (later.last - later.strip) * words, true};
      reduce_unit(unit, from, inputs, next, gathered, sums);
    }
  }

  // `values`, the sums of `count` strips of a row from `strip` on; or `sums`, with what is added.
  const float* add(int64_t row, int64_t strip, const float* values, int64_t count,
                   float* sums) const {
    if (rows_ == nullptr || rows_->places[row] < 0) return values;
    const int64_t place = rows_->places[row];
    const QuireAddition& addition = of(rows_->adapters[place]);
    if (addition.down == nullptr) return values;
    const auto* const reduced = (const typename T::RowWord*)(reduced_ + place * reduced_stride_);
    const QuireUp* const ups = addition.ups + strip;
    fetch(row + AHEAD_ROWS, strip, count);
    if (addition.words >= 0 && count == TILE_STRIPS)
      add_strips<T, TILE_STRIPS>(reduced, ups, addition.words, values, sums);
    else if (addition.words >= 0 && count == TALL_STRIPS)
      add_strips<T, TALL_STRIPS>(reduced, ups, addition.words, values, sums);
    else
      for (int64_t s = 0; s < count; s++)
        add_strips<T, 1>(reduced, ups + s, ups[s].words, values + s * LANES, sums + s * LANES);
    return sums;
  }

 private:
  // Some rows of one adapter, times some strips of its `down`.
  struct Unit {
    const QuireAddition* addition = nullptr;  // Null: there is no such unit.
    int64_t place = 0, count = 0, strip = 0, last = 0;
  };

  const QuireAddition& of(int64_t adapter) const { return additions_[adapter * stride_]; }

  // The unit of a number, which is not below that of the last call; `group` and `first_unit` are
  // where that one was found.
  Unit find(int64_t number, int64_t height, size_t* group, int64_t* first_unit) const {
    for (; *group < rows_->groups.size(); (*group)++) {
      const AdaptedRows::Group& rows = rows_->groups[*group];
      const QuireAddition& addition = of(rows.adapter);
      if (addition.down == nullptr) continue;
      const int64_t strips = (addition.rank + LANES - 1) / LANES;
      const int64_t turns = (strips + TILE_STRIPS - 1) / TILE_STRIPS;
      const int64_t units = (rows.count + height - 1) / height * turns;
      if (number < *first_unit + units) {
        const int64_t first = (number - *first_unit) / turns * height;
        const int64_t strip = (number - *first_unit) % turns * TILE_STRIPS;
        return {&addition, rows.first + first, std::min(height, rows.count - first), strip,
                std::min<int64_t>(strip + TILE_STRIPS, strips)};
      }
      *first_unit += units;
    }
    return Unit();
  }

  // Where neighbours have other adapters, the strips of a row are fetched some rows before its turn.
  void fetch(int64_t row, int64_t strip, int64_t count) const {
    if (!scattered_ || row >= (int64_t)rows_->places.size() || rows_->places[row] < 0) return;
    const QuireAddition& addition = of(rows_->adapters[rows_->places[row]]);
    if (addition.down == nullptr) return;
    for (int64_t s = strip; s < strip + count; s++)
      for (int64_t k = 0; k < addition.ups[s].words; k++)
        __builtin_prefetch((const uint32_t*)addition.ups[s].packed + k * LANES);
  }

  void reduce_unit(const Unit& unit, const Rounded<Row>& from, int64_t inputs, const Ahead& next,
                   Element* gathered, float* sums) const {
    const int64_t* const rows = rows_->rows.data() + unit.place;
    const Element* at = from.values + rows[0] * from.stride;
    if (rows[unit.count - 1] - rows[0] != unit.count - 1) {
      at = gathered;
      for (int64_t i = 0; i < unit.count; i++)
        std::copy_n(from.values + rows[i] * from.stride, inputs, gathered + i * from.stride);
    }
    const float* const scales = unit.addition->scales;
    const auto done = [&](int64_t row, int64_t strip, const float* values, int64_t num_strips) {
      const int64_t column = strip * LANES;
      Element* const to = reduced_ + (unit.place + row) * reduced_stride_ + column;
      for (int64_t i = 0; i < num_strips * LANES; i += LANES)
        Row::narrow16(to + i, load<Vector>(values + i) * load<Vector>(scales + column + i));
    };
    multiply<T>(Rows<T>{(const typename T::RowWord*)at, from.stride / T::PER_WORD, unit.count},
                (const uint32_t*)unit.addition->down, inputs / T::PER_WORD, unit.strip, unit.last,
                next, sums, done);
  }

  const AdaptedRows* rows_ = nullptr;
  const QuireAddition* additions_ = nullptr;
  int64_t stride_ = 0;
  Element* reduced_ = nullptr;
  int64_t reduced_stride_ = 0;
  bool scattered_ = false;
};

// All adapters of a model, and their rows in one step.
template <class T>
class Adapters {
  typedef typename T::Row Row;
  typedef typename Row::Element Element;

 public:
  explicit Adapters(const QuireModel& model)
      : model_(model), num_products_(PRODUCTS * model.num_layers) {
    for (int64_t i = 0; i < model.num_adapters * num_products_; i++)
      stride_ = std::max(stride_, (model.additions[i].rank + LANES - 1) / LANES * LANES);
  }

  void plan(const QuireStep& step) {
    step_ = &step;
    if (step.adapters == nullptr) return;
    all_.plan(step.adapters, nullptr, step.num_tokens, model_.num_adapters);
    due_.plan(step.adapters, step.logit_rows, step.num_logit_rows, model_.num_adapters);
  }

  // Asks for the memory of the step; the widths are those of the rows before the products.
  void lay_out(Workspace& workspace, int64_t first, int64_t second, int64_t third) {
    if (step_->adapters == nullptr) return;
    gathered_stride_ = Additions<T>::UNIT_ROWS * std::max(first, std::max(second, third));
    workspace.add(&reduced_, (int64_t)std::max(all_.rows.size(), due_.rows.size()) * stride_);
    workspace.add(&gathered_, step_->num_threads * gathered_stride_);
  }

  // One thread's part of rows times a product, and what is added; `number` is its place in the order
  // of the products, and done(row, strip, values, count) as in multiply().
  template <class Done>
  void multiply(const Product& product, int64_t number, const Rounded<Row>& from, int64_t count,
                Team& team, int member, float* sums, const Done& done) const {
    typedef const typename T::RowWord* Words;
    const Rows<T> rows{(Words)from.values, from.stride / T::PER_WORD, count, (Words)from.rest};
    const Additions<T> additions = of(number);
    if (additions.any()) {
      additions.reduce(from, product.linear.inputs, team, member,
                       gathered_ + member * gathered_stride_, sums);
      team.barrier();
    }
    const auto added = [&](int64_t row, int64_t strip, const float* values, int64_t num_strips) {
      float with[TILE_STRIPS * LANES];
      done(row, strip, additions.add(row, strip, values, num_strips, with), num_strips);
    };
    multiply_part<T>(product, rows, team, member, sums, added);
  }

 private:
  // The head is the last product, and adapters add nothing to it. Behind the last layer's first one
  // only tokens that are due logits are left.
  Additions<T> of(int64_t product) const {
    if (step_->adapters == nullptr || product >= num_products_) return Additions<T>();
    const AdaptedRows& rows = product > num_products_ - PRODUCTS ? due_ : all_;
    return {rows, model_.additions + product, num_products_, reduced_, stride_};
  }

  static constexpr int64_t PRODUCTS = 4;  // Of a layer.

  const QuireModel model_;
  const int64_t num_products_;
  const QuireStep* step_ = nullptr;
  AdaptedRows all_, due_;
  int64_t stride_ = 0, gathered_stride_ = 0;
  Element *reduced_ = nullptr, *gathered_ = nullptr;
};

}  // namespace quire
