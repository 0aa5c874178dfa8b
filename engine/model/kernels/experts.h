// The experts of a layer (mixture of experts): each token is multiplied by the matrices of the few
// experts that its router scores highest. Knows no attention.
//
// The rows of all tokens are grouped by expert, so that each expert's matrices are read once. A
// row's products do not depend on the rows beside it, and a token adds up its experts' outputs in
// ascending order of the experts: so its result depends on the token alone, bit for bit.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "layers.h"
#include "product.h"
#include "workspace.h"

namespace quire {

// Which experts each token uses, and the rows of each expert: a row is one token of one expert.
struct Routing {
  std::vector<int64_t> experts;  // [tokens][choices], ascending.
  std::vector<float> weights;    // [tokens][choices].
  std::vector<int64_t> rows;     // [tokens][choices]: the row of each choice.
  std::vector<int64_t> tokens;   // The token of each row.
  std::vector<float> factors;    // The weight of each row.
  std::vector<int64_t> experts_of_rows;
  std::vector<int64_t> starts;   // The first row of each expert, and the number of rows.
  std::vector<int64_t> used;     // The experts that have rows.

  void reserve(int64_t num_tokens, int64_t choices, int64_t num_experts) {
    const size_t size = (size_t)(num_tokens * choices);
    experts.resize(size);
    weights.resize(size);
    rows.resize(size);
    tokens.resize(size);
    factors.resize(size);
    experts_of_rows.resize(size);
    starts.resize((size_t)num_experts + 1);
    next_.reserve(starts.size());
    used.reserve((size_t)num_experts);
  }

  // Chooses the experts of a token from its router's outputs, which are overwritten; memory for
  // whole vectors of them is required. The weights are the softmax over all experts; divided by
  // their sum over the chosen ones if `normalizes`. Of equal outputs, the first is chosen.
  void choose(int64_t token, float* outputs, int64_t num_experts, int64_t choices,
              bool normalizes) {
    int64_t* const chosen = experts.data() + token * choices;
    float* const chosen_weights = weights.data() + token * choices;
    const float total = weigh(outputs, num_experts);
    float sum = 0.0f;
    for (int64_t c = 0; c < choices; c++) {
      int64_t best = -1;
      for (int64_t e = 0; e < num_experts; e++)
        if (outputs[e] != TAKEN && (best < 0 || outputs[e] > outputs[best])) best = e;
      sum += outputs[best];
      insert(chosen, chosen_weights, c, best, outputs[best]);
      outputs[best] = TAKEN;
    }
    const float factor = 1.0f / (normalizes ? sum : total);
    for (int64_t c = 0; c < choices; c++) chosen_weights[c] *= factor;
  }

  // Groups the choices of all tokens by expert.
  void group(int64_t num_tokens, int64_t choices) {
    const int64_t size = num_tokens * choices, num_experts = (int64_t)starts.size() - 1;
    std::fill(starts.begin(), starts.end(), 0);
    for (int64_t i = 0; i < size; i++) starts[experts[i] + 1]++;
    used.clear();
    for (int64_t e = 0; e < num_experts; e++) {
      if (starts[e + 1] > 0) used.push_back(e);
      starts[e + 1] += starts[e];
    }
    next_.assign(starts.begin(), starts.end());
    for (int64_t i = 0; i < size; i++) {
      const int64_t row = next_[experts[i]]++;
      rows[i] = row;
      tokens[row] = i / choices;
      factors[row] = weights[i];
      experts_of_rows[row] = experts[i];
    }
  }

 private:
  // No softmax weight is negative.
  static constexpr float TAKEN = -1.0f;

  // Replaces the outputs by their exponentials, relative to the largest, and returns their sum.
  static float weigh(float* outputs, int64_t count) {
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    std::fill(outputs + count, outputs + padded, -std::numeric_limits<float>::infinity());
    float highest = outputs[0];
    for (int64_t e = 1; e < count; e++) highest = std::max(highest, outputs[e]);
    Vector total = Vector{};
    for (int64_t e = 0; e < padded; e += LANES) {
      const Vector weight = exponential(load<Vector>(outputs + e) - highest);
      store(outputs + e, weight);
      total += weight;
    }
    return sum_of(total);
  }

  // Inserts an expert into the first `count` chosen ones, which are ascending.
  static void insert(int64_t* chosen, float* chosen_weights, int64_t count, int64_t expert,
                     float weight) {
    int64_t at = count;
    for (; at > 0 && chosen[at - 1] > expert; at--) {
      chosen[at] = chosen[at - 1];
      chosen_weights[at] = chosen_weights[at - 1];
    }
    chosen[at] = expert;
    chosen_weights[at] = weight;
  }

  std::vector<int64_t> next_;  // The next row of each expert, while rows are grouped.
};

template <class T>
class Experts {
  typedef typename T::Row Row;
  typedef RoundedRows<Row> Inputs;

 public:
  explicit Experts(const QuireModel& model)
      : model_(model), gate_(model) {}

  bool any() const { return model_.num_experts > 0; }

  // Requests the scratch buffers of a step. `longest` grows to the longest stride.
  void lay_out(Workspace& workspace, int64_t tokens, int64_t choices, int64_t padding,
               int64_t* longest) {
    if (!any()) return;
    choices_ = choices;
    const int64_t rows = tokens * choices;
    routing_.reserve(tokens, choices, model_.num_experts);
    gathered_.stride = model_.hidden_size + padding;
    activated_.stride = (model_.expert_size + LANES - 1) / LANES * LANES + padding;
    *longest = std::max({*longest, gathered_.stride, activated_.stride});
    workspace.add(&gathered_.values, rows * gathered_.stride);
    workspace.add(&activated_.values, rows * activated_.stride);
    workspace.add(&outputs_, rows * model_.hidden_size);
  }

  // One thread's part of a layer's experts. Adds their outputs for `normed` to the residual stream.
  // `scores` has the router's outputs of each token, `stride` floats apart, with room for whole
  // vectors; all threads have written them. `after` is what this thread multiplies next.
  void mix(const QuireExperts& experts, const Inputs& normed, float* scores, int64_t stride,
           const ResidualStream& to, const PrefetchRange& after, float* sums, Team& team,
           int member) {
    const Share mine(to.count, member, team.size());
    for (int64_t t = mine.first; t < mine.last; t++)
      routing_.choose(t, scores + t * stride, model_.num_experts, choices_,
                      model_.normalizes_chosen);
    team.barrier();
    if (member == 0) routing_.group(to.count, choices_);
    team.barrier();
    const Share rows(to.count * choices_, member, team.size());
    for (int64_t r = rows.first; r < rows.last; r++)
      std::copy_n(normed.values + routing_.tokens[r] * normed.stride, model_.hidden_size,
                  gathered_.values + r * gathered_.stride);
    team.barrier();
    const auto activate = [&](int64_t row, int64_t strip, const float* values, int64_t count) {
      const float* bias = experts.gate_up[routing_.experts_of_rows[row]].bias;
      const RoundedRow<Row> at = activated_.at(row, strip / 2 * LANES);
      for (int64_t s = 0; s < count; s += 2, values += 2 * LANES) {
        Vector gate = load<Vector>(values), up = load<Vector>(values + LANES);
        if (bias != nullptr) {
          gate += load<Vector>(bias + (strip + s) * LANES);
          up += load<Vector>(bias + (strip + s + 1) * LANES);
        }
        at.vector(s / 2 * LANES, gate_(gate, up));
      }
    };
    multiply_rows(experts.gate_up, gathered_, first_item(experts.down, member), sums, team, member,
                  activate);
    team.barrier();
    const auto weigh = [&](int64_t row, int64_t strip, const float* values, int64_t count) {
      const float factor = routing_.factors[row];
      const float* bias = experts.down[routing_.experts_of_rows[row]].bias;
      const int64_t first = strip * LANES;
      const int64_t last = std::min(first + count * LANES, model_.hidden_size);
      float* const at = outputs_ + row * model_.hidden_size;
      for (int64_t i = first; i < last; i++)
        at[i] = (values[i - first] + (bias != nullptr ? bias[i] : 0.0f)) * factor;
    };
    multiply_rows(experts.down, activated_, after, sums, team, member, weigh);
    team.barrier();
    for (int64_t t = mine.first; t < mine.last; t++)
      add_outputs(t, to.rows + t * model_.hidden_size);
    team.barrier();
  }

 private:
  // The work items of a product: each has TILE_STRIPS strips of one expert.
  static int64_t groups_of(const QuireLinear* products) {
    return Product{products[0]}.num_groups();
  }

  PrefetchRange strips_of_item(const QuireLinear* products, int64_t item) const {
    const int64_t groups = groups_of(products), first = item % groups * TILE_STRIPS;
    const Product product{products[routing_.used[item / groups]]};
    return strips_of<T>(product, first, first + TILE_STRIPS, true);
  }

  PrefetchRange first_item(const QuireLinear* products, int member) const {
    const int64_t count = (int64_t)routing_.used.size() * groups_of(products);
    return member < count ? strips_of_item(products, member) : PrefetchRange{nullptr, 0, true};
  }

  // One thread's part of all rows, each times the matrix of its expert.
  template <class Epilogue>
  void multiply_rows(const QuireLinear* products, const Inputs& from, const PrefetchRange& after,
                     float* sums, Team& team, int member, const Epilogue& epilogue) const {
    const int64_t groups = groups_of(products), count = (int64_t)routing_.used.size() * groups;
    for (int64_t i = member, next; i < count; i = next) {
      next = team.take();
      const int64_t expert = routing_.used[i / groups], first = i % groups * TILE_STRIPS;
      const Product product{products[expert]};
      const Share own(routing_.starts[expert], routing_.starts[expert + 1]);
      const Rows<T> rows = rows_of<T>(from, own.last).part(own);
      multiply<T>(rows, product.packed(), product.linear.inputs / T::PER_WORD, first,
                  std::min<int64_t>(first + TILE_STRIPS, product.num_strips()),
                  next < count ? strips_of_item(products, next) : after, sums, epilogue);
    }
  }

  void add_outputs(int64_t token, float* to) const {
    const int64_t size = model_.hidden_size;
    const int64_t* const rows = routing_.rows.data() + token * choices_;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      Vector sum = Vector{};
      for (int64_t c = 0; c < choices_; c++) sum += load<Vector>(outputs_ + rows[c] * size + i);
      store(to + i, load<Vector>(to + i) + sum * model_.residual_multiplier);
    }
    for (; i < size; i++) {
      float sum = 0.0f;
      for (int64_t c = 0; c < choices_; c++) sum += outputs_[rows[c] * size + i];
      to[i] += sum * model_.residual_multiplier;
    }
  }

  const QuireModel model_;
  const Gate gate_;
  int64_t choices_ = 0;  // Experts of a token.
  Routing routing_;
  Inputs gathered_, activated_;
  float* outputs_ = nullptr;
};

}  // namespace quire
