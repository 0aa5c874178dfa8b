// The mixers of a step whose state is a matrix for each head: from the outputs of one product to the
// inputs of the next. Knows no product.
//
// A convolution with SiLU gives the queries, keys and values of a token. Each head has a step size
//
//   size = softplus(its output + bias)        decay = exp(rate size)
//
// and the strength of a change is that size, or the sigmoid of another output. What the recurrence
// reads from the states is normed in groups of values, with a SiLU gate before or after the norm.
// Dao and Gu, "Transformers are SSMs", 2024; Yang, Kautz and Hatamizadeh, "Gated Delta Networks",
// 2024.
#pragma once

#include <algorithm>
#include <vector>

#include "activated_convolution.h"
#include "layers.h"
#include "recurrence.h"
#include "workspace.h"

namespace quire {

// log(1 + exp(x)). Since log(1 + y) = 2 artanh(y / (2 + y)) and y = exp(-|x|) is at most 1, the
// series of artanh is accurate after its seventh term.
inline Vector softplus(Vector x) {
  const Vector y = exponential(-absolute(x)), z = y / (y + 2.0f), square = z * z;
  Vector sum = broadcast(1.0f / 13);
  for (const float term : {1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f})
    sum = sum * square + term;
  return (x > 0.0f ? x : Vector{}) + 2.0f * z * sum;
}

class RecurrentMixers {
 public:
  explicit RecurrentMixers(const QuireModel& model) : norm_epsilon_(model.epsilon) {
    for (int64_t i = 0; i < model.num_layers; i++) {
      const QuireRecurrentMixer* const of = model.layers[i].recurrence;
      if (of == nullptr) continue;
      const int64_t outputs = of->num_heads * of->value_dim;
      channels_ = std::max(channels_, of->channels);
      num_heads_ = std::max(num_heads_, of->num_heads);
      outputs_size_ = std::max(outputs_size_, outputs);
      scratch_size_ =
          std::max({scratch_size_, outputs, RecurrenceScratch::size(of->key_dim)});
    }
  }

  // Finds the rows of a step, and requests its memory.
  void lay_out(const QuireStep& step, Workspace& workspace) {
    if (num_heads_ == 0) return;
    offsets_.clear();
    for (int64_t r = 0, first = 0; r < step.num_rows; first += step.query_lens[r++])
      offsets_.push_back(first);
    rows_ = {step.num_rows, step.query_lens, offsets_.data(), step.state_reads, step.state_writes};
    num_tokens_ = step.num_tokens;
    workspace.add(&convolved_, num_tokens_ * channels_);
    workspace.add(&decays_, num_tokens_ * num_heads_);
    workspace.add(&strengths_, num_tokens_ * num_heads_);
    workspace.add(&outputs_, num_tokens_ * outputs_size_);
    workspace.add(&scratch_, step.num_threads * scratch_size_);
  }

  // One thread's part of a layer: updates the states of all rows, and writes the outputs of `count`
  // tokens, of token tokens[i] or of token i if `tokens` is null. `states` has the inputs before a
  // row, then the matrices.
  template <class T>
  void mix(const QuireRecurrentMixer& of, float* const* states, const float* projected,
           int64_t stride, const int64_t* tokens, int64_t count, const RoundedRows<T>& to,
           Team& team, int member) const {
    const QuireConvolution convolution{of.convolution, projected + of.inputs, states[0],
                                       convolved_,     of.channels,           stride,
                                       true,           false};
    float* const scratch = scratch_ + member * scratch_size_;
    convolve(rows_, convolution, team, member);
    weigh(of, projected, stride, Share(num_tokens_, member, team.size()));
    team.barrier();
    recur(rows_, recurrence_of(of, states[1]), team, member, scratch);
    team.barrier();
    const Share mine(count, member, team.size());
    for (int64_t i = mine.first; i < mine.last; i++) {
      const int64_t token = tokens != nullptr ? tokens[i] : i;
      finish(of, token, projected + token * stride + of.gates, scratch);
      narrow_row(to.at(i), scratch, of.num_heads * of.value_dim);
    }
    team.barrier();
  }

 private:
  // The decays and strengths of some tokens.
  void weigh(const QuireRecurrentMixer& of, const float* projected, int64_t stride,
             const Share& tokens) const {
    for (int64_t t = tokens.first; t < tokens.last; t++)
      for (int64_t h = 0; h < of.num_heads; h += LANES) {
        const int64_t count = std::min<int64_t>(LANES, of.num_heads - h);
        const auto output = [&](int64_t first) {
          return load_lanes(projected + t * stride + first + h, count);
        };
        const Vector size = softplus(output(of.sizes) + load_lanes(of.size_biases + h, count));
        const Vector decay = exponential(size * load_lanes(of.rates + h, count));
        const Vector strength =
            of.strengths < 0 ? size : times_sigmoid(broadcast(1.0f), output(of.strengths));
        store_lanes(decays_ + t * of.num_heads + h, decay, count);
        store_lanes(strengths_ + t * of.num_heads + h, strength, count);
      }
  }

  QuireRecurrence recurrence_of(const QuireRecurrentMixer& of, float* states) const {
    return {convolved_ + of.queries, convolved_ + of.keys, convolved_ + of.values,
            decays_, strengths_, of.skips, states, outputs_,
            of.num_heads, of.num_key_heads, of.key_dim, of.value_dim,
            {of.channels, of.key_dim}, {of.channels, of.key_dim}, {of.channels, of.value_dim},
            {of.num_heads, 1, 0}, of.corrects, of.query_factor, of.epsilon};
  }

  // The gated and normed outputs of a token. They are written elsewhere: a token may come twice.
  void finish(const QuireRecurrentMixer& of, int64_t token, const float* gates, float* to) const {
    const int64_t size = of.num_heads * of.value_dim;
    std::copy_n(outputs_ + token * size, size, to);
    if (!of.gates_after_norm) activate(to, gates, size);
    for (int64_t first = 0; first < size; first += of.norm_size)
      norm_in_place(to + first, of.norm + first, of.norm_size, norm_epsilon_);
    if (of.gates_after_norm) activate(to, gates, size);
  }

  static void activate(float* values, const float* gates, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
      const int64_t count = std::min<int64_t>(LANES, size - i);
      const Vector gate = load_lanes(gates + i, count);
      store_lanes(values + i, times_sigmoid(load_lanes(values + i, count) * gate, gate), count);
    }
  }

  const float norm_epsilon_;
  int64_t channels_ = 0, num_heads_ = 0, outputs_size_ = 0, scratch_size_ = 0;
  int64_t num_tokens_ = 0;
  std::vector<int64_t> offsets_;
  QuireRows rows_;
  float *convolved_ = nullptr, *decays_ = nullptr, *strengths_ = nullptr, *outputs_ = nullptr;
  float* scratch_ = nullptr;
};

}  // namespace quire
