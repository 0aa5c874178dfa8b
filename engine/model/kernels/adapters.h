// Low-rank adapters (LoRA) for the rows of a matrix product. Knows no layer and no request.
//
// First, every row with an adapter is multiplied by the adapter's `down` matrix (shrink). Then the
// epilogue of the product adds `up` times the shrunk row to each strip of outputs (expand). The
// order of both sums depends on the row and its adapter alone.
#pragma once

#include <vector>

#include "product.h"
#include "rounded_rows.h"
#include "workspace.h"

namespace quire {

// The rows of a step that have an adapter, grouped by adapter.
struct AdaptedRows {
  // Adapted rows first .. first + count - 1 have this adapter.
  struct Group {
    int64_t adapter, first, count;
  };

  std::vector<Group> groups;
  std::vector<int64_t> rows;      // The step's row of each adapted row, in the order of the groups.
  std::vector<int64_t> adapters;  // The adapter of each adapted row.
  std::vector<int64_t> indices;   // For each row of the step: its index among `rows`, or -1.

  // Row i is token tokens[i], or token i if `tokens` is null. `adapter_of` has one adapter per
  // token, negative for none.
  void plan(const int64_t* adapter_of, const int64_t* tokens, int64_t count, int64_t num_adapters) {
    const auto adapter_at = [&](int64_t i) { return adapter_of[tokens ? tokens[i] : i]; };
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
    indices.assign((size_t)count, -1);
    for (int64_t i = 0; i < count; i++) {
      if (adapter_at(i) < 0) continue;
      const int64_t index = starts_[adapter_at(i)]++;
      rows[index] = i;
      adapters[index] = adapter_at(i);
      indices[i] = index;
    }
  }

 private:
  std::vector<int64_t> starts_;
};

// to[s] = values[s] + (row from word ups[s].first on) . ups[s], for S strips of `words` words each.
template <class T, int S>
inline void add_strips(const typename T::RowWord* row, const QuireUp* ups, int64_t words,
                       const float* values, float* to) {
  // With enough registers, words alternate between two accumulators: with one, each addition would
  // wait for the one before.
  constexpr int WIDTH = S * PARTS, SUMS = PARTS == 1 ? 2 : 1;
  const typename T::RowWord* rows[S];
  const uint32_t* packed[S];
  for (int s = 0; s < S; s++) {
    rows[s] = row + ups[s].first;
    packed[s] = (const uint32_t*)ups[s].packed;
  }
  PartVector total[SUMS][WIDTH] = {};
  const auto add_word = [&](int64_t k, int sum_index) {
#pragma GCC unroll 16
    for (int p = 0; p < WIDTH; p++) {
      const uint32_t* const from = packed[p / PARTS] + k * LANES + p % PARTS * PART_LANES;
      const PartWords words = load<PartWords>(from);
#pragma GCC unroll 2
      for (int i = 0; i < T::FACTORS; i++)
        total[sum_index][p] = T::multiply(total[sum_index][p], T::factor(rows[p / PARTS][k], i),
                                          T::columns(words, i));
    }
  };
  int64_t k = 0;
  for (; k + SUMS <= words; k += SUMS)
#pragma GCC unroll 2
    for (int sum_index = 0; sum_index < SUMS; sum_index++) add_word(k + sum_index, sum_index);
  if (k < words) add_word(k, 0);
#pragma GCC unroll 16
  for (int p = 0; p < WIDTH; p++) {
    const PartVector sum = load<PartVector>(values + p * PART_LANES) + total[0][p];
    store(to + p * PART_LANES, SUMS > 1 ? sum + total[SUMS - 1][p] : sum);
  }
}

// The additions of a step's adapters to one product.
template <class T>
class Additions {
  typedef typename T::Row Row;
  typedef typename Row::Element Element;

 public:
  // Rows of one adapter per work item of shrink(): at most ITEM_ROWS, at least MIN_ITEM_ROWS if the
  // adapter has as many, and about ITEMS_PER_THREAD items per thread.
  static constexpr int64_t ITEM_ROWS = 24, MIN_ITEM_ROWS = 4, ITEMS_PER_THREAD = 4;
  // A row's `up` strips are prefetched this many rows ahead.
  static constexpr int64_t PREFETCH_ROWS = 8;

  // Adds nothing.
  Additions() {}
  // `additions` points to the first adapter's addition, and those of the next adapters are `stride`
  // apart. `shrunk` has memory for all adapted rows, `shrunk_stride` elements apart.
  Additions(const AdaptedRows& rows, const QuireAddition* additions, int64_t stride,
            Element* shrunk, int64_t shrunk_stride)
      : rows_(&rows),
        additions_(additions),
        stride_(stride),
        shrunk_(shrunk),
        shrunk_stride_(shrunk_stride),
        scattered_(rows.rows.size() < PREFETCH_ROWS * rows.groups.size()) {}

  // Whether any adapter with rows in the step adds to this product.
  bool any() const {
    if (rows_ == nullptr) return false;
    return std::any_of(rows_->groups.begin(), rows_->groups.end(),
                       [&](const auto& group) { return of(group.adapter).down != nullptr; });
  }

  // Computes one thread's part of the rows times `down`. Rows that are not adjacent are first
  // copied to `gathered`, which has memory for ITEM_ROWS rows.
  void shrink(const RoundedRows<Row>& from, int64_t inputs, Team& team, int member,
              Element* gathered, float* sums) const {
    const int64_t each = (int64_t)rows_->rows.size() / (ITEMS_PER_THREAD * team.size());
    const int64_t height = std::clamp(each, MIN_ITEM_ROWS, ITEM_ROWS);
    const int64_t words = inputs / T::PER_WORD * LANES;
    size_t group = 0;
    int64_t first_item = 0;
    Item item = find(member, height, &group, &first_item), next_item;
    for (; item.addition != nullptr; item = next_item) {
      next_item = find(team.take(), height, &group, &first_item);
      PrefetchRange next{nullptr, 0, true};
      if (next_item.addition != nullptr)
        next = {(const uint32_t*)next_item.addition->down + next_item.strip * words,
                (next_item.last - next_item.strip) * words, true};
      shrink_item(item, from, inputs, next, gathered, sums);
    }
  }

  // Adds up . shrunk to `values`, which are `count` strips of a row, from strip `strip` on. Returns
  // `sums` with the results, or `values` if nothing is added to the row.
  const float* expand(int64_t row, int64_t strip, const float* values, int64_t count,
                      float* sums) const {
    if (rows_ == nullptr || rows_->indices[row] < 0) return values;
    const int64_t index = rows_->indices[row];
    const QuireAddition& addition = of(rows_->adapters[index]);
    if (addition.down == nullptr) return values;
    const auto* const shrunk = (const typename T::RowWord*)(shrunk_ + index * shrunk_stride_);
    const QuireUp* const ups = addition.ups + strip;
    prefetch(row + PREFETCH_ROWS, strip, count);
    if (addition.words >= 0 && count == TILE_STRIPS)
      add_strips<T, TILE_STRIPS>(shrunk, ups, addition.words, values, sums);
    else if (addition.words >= 0 && count == TALL_STRIPS)
      add_strips<T, TALL_STRIPS>(shrunk, ups, addition.words, values, sums);
    else
      for (int64_t s = 0; s < count; s++)
        add_strips<T, 1>(shrunk, ups + s, ups[s].words, values + s * LANES, sums + s * LANES);
    return sums;
  }

 private:
  // A work item of shrink(): `count` adapted rows of one adapter from index `first` on, times the
  // strips strip .. last-1 of its `down`.
  struct Item {
    const QuireAddition* addition = nullptr;  // Null: there is no such item.
    int64_t first = 0, count = 0, strip = 0, last = 0;
  };

  const QuireAddition& of(int64_t adapter) const { return additions_[adapter * stride_]; }

  // The item with index `number`. `group` and `first_item` keep the position of the search, so the
  // numbers of successive calls must ascend.
  Item find(int64_t number, int64_t height, size_t* group, int64_t* first_item) const {
    for (; *group < rows_->groups.size(); (*group)++) {
      const AdaptedRows::Group& rows = rows_->groups[*group];
      const QuireAddition& addition = of(rows.adapter);
      if (addition.down == nullptr) continue;
      const int64_t strips = (addition.rank + LANES - 1) / LANES;
      const int64_t strip_groups = (strips + TILE_STRIPS - 1) / TILE_STRIPS;
      const int64_t items = (rows.count + height - 1) / height * strip_groups;
      if (number < *first_item + items) {
        const int64_t first = (number - *first_item) / strip_groups * height;
        const int64_t strip = (number - *first_item) % strip_groups * TILE_STRIPS;
        return {&addition, rows.first + first, std::min(height, rows.count - first), strip,
                std::min<int64_t>(strip + TILE_STRIPS, strips)};
      }
      *first_item += items;
    }
    return Item();
  }

  // Prefetches the `up` strips of a row, if neighbouring rows mostly have different adapters.
  void prefetch(int64_t row, int64_t strip, int64_t count) const {
    if (!scattered_ || row >= (int64_t)rows_->indices.size() || rows_->indices[row] < 0) return;
    const QuireAddition& addition = of(rows_->adapters[rows_->indices[row]]);
    if (addition.down == nullptr) return;
    for (int64_t s = strip; s < strip + count; s++)
      for (int64_t k = 0; k < addition.ups[s].words; k++)
        __builtin_prefetch((const uint32_t*)addition.ups[s].packed + k * LANES);
  }

  void shrink_item(const Item& item, const RoundedRows<Row>& from, int64_t inputs,
                   const PrefetchRange& next, Element* gathered, float* sums) const {
    const int64_t* const rows = rows_->rows.data() + item.first;
    const Element* at = from.values + rows[0] * from.stride;
    if (rows[item.count - 1] - rows[0] != item.count - 1) {
      at = gathered;
      for (int64_t i = 0; i < item.count; i++)
        std::copy_n(from.values + rows[i] * from.stride, inputs, gathered + i * from.stride);
    }
    const float* const scales = item.addition->scales;
    const auto epilogue = [&](int64_t row, int64_t strip, const float* values, int64_t num_strips) {
      const int64_t column = strip * LANES;
      Element* const to = shrunk_ + (item.first + row) * shrunk_stride_ + column;
      for (int64_t i = 0; i < num_strips * LANES; i += LANES)
        Row::narrow16(to + i, load<Vector>(values + i) * load<Vector>(scales + column + i));
    };
    multiply<T>(Rows<T>{(const typename T::RowWord*)at, from.stride / T::PER_WORD, item.count},
                (const uint32_t*)item.addition->down, inputs / T::PER_WORD, item.strip, item.last,
                next, sums, epilogue);
  }

  const AdaptedRows* rows_ = nullptr;
  const QuireAddition* additions_ = nullptr;
  int64_t stride_ = 0;
  Element* shrunk_ = nullptr;
  int64_t shrunk_stride_ = 0;
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
    logit_rows_.plan(step.adapters, step.logit_rows, step.num_logit_rows, model_.num_adapters);
  }

  // Requests the scratch buffers of the step; the arguments are the strides of the products' input
  // rows.
  void lay_out(Workspace& workspace, int64_t first, int64_t second, int64_t third) {
    if (step_->adapters == nullptr) return;
    gathered_stride_ = Additions<T>::ITEM_ROWS * std::max(first, std::max(second, third));
    workspace.add(&shrunk_, (int64_t)std::max(all_.rows.size(), logit_rows_.rows.size()) * stride_);
    workspace.add(&gathered_, step_->num_threads * gathered_stride_);
  }

  // One thread's part of rows times a product, with the adapters' additions. `number` is the index
  // of the product in the order of the products; epilogue(row, strip, values, count) as in
  // quire::multiply(). `rows` are what the product multiplies of the rows `from`.
  template <class Operand, class Epilogue>
  void multiply(const Product& product, int64_t number, const RoundedRows<Row>& from,
                const Operand& rows, Team& team, int member, float* sums,
                const Epilogue& epilogue) const {
    const Additions<T> additions = of(number);
    if (additions.any()) {
      additions.shrink(from, product.linear.inputs, team, member,
                       gathered_ + member * gathered_stride_, sums);
      team.barrier();
    }
    const auto added = [&](int64_t row, int64_t strip, const float* values, int64_t num_strips) {
      float with[TILE_STRIPS * LANES];
      epilogue(row, strip, additions.expand(row, strip, values, num_strips, with), num_strips);
    };
    multiply_part<T>(product, rows, team, member, sums, added);
  }

 private:
  // Adapters add nothing to the head and the routers, which are the last products. After the first
  // product of the last layer, only the tokens whose logits are needed are computed.
  Additions<T> of(int64_t product) const {
    if (step_->adapters == nullptr || product >= num_products_) return Additions<T>();
    const AdaptedRows& rows = product > num_products_ - PRODUCTS ? logit_rows_ : all_;
    return {rows, model_.additions + product, num_products_, shrunk_, stride_};
  }

  static constexpr int64_t PRODUCTS = 4;  // Per layer.

  const QuireModel model_;
  const int64_t num_products_;
  const QuireStep* step_ = nullptr;
  AdaptedRows all_, logit_rows_;
  int64_t stride_ = 0, gathered_stride_ = 0;
  Element *shrunk_ = nullptr, *gathered_ = nullptr;
};

}  // namespace quire
