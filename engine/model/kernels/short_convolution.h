// The gated short convolutions of a step, whose states are in buffers. Knows no product.
#pragma once

#include <vector>

#include "convolution.h"
#include "rounded_rows.h"
#include "team.h"

namespace quire {

// The gated short convolutions of a step: C * conv(B * x), where B, C and x of a token are beside
// each other in a row of `projected`. Liquid AI, LFM2 Technical Report, 2025.
class GatedConvolutions {
 public:
  explicit GatedConvolutions(const QuireModel& model) : channels_(model.hidden_size) {}

  // Finds the row of each token, for a model that has convolutions.
  void plan(const QuireStep& step) {
    rows_.clear();
    row_of_.clear();
    if (step.states == nullptr) return;
    for (int64_t r = 0, first = 0; r < step.num_rows; first += step.query_lens[r++]) {
      rows_.push_back({first, step.query_lens[r], step.state_reads[r], step.state_writes[r]});
      row_of_.insert(row_of_.end(), (size_t)step.query_lens[r], r);
    }
  }

  // One thread's part of a layer: writes the outputs of `count` tokens, of token tokens[i] or of
  // token i if `tokens` is null; and the states of all rows.
  template <class T>
  void mix(const QuireTaps& weights, float* states, const float* projected, int64_t stride,
           const int64_t* tokens, int64_t count, const RoundedRows<T>& to, Team& team,
           int member) const {
    const auto input = [&](int64_t token, int64_t channel, int64_t lanes) {
      const float* const row = projected + token * stride + channel;
      return load_lanes(row, lanes) * load_lanes(row + 2 * channels_, lanes);
    };
    const Convolution<decltype(input)> convolution(weights, channels_, input);
    const int64_t size = (weights.num_taps - 1) * channels_;
    for_each_strip(count, team, member, [&](int64_t i, int64_t channel, int64_t lanes) {
      const int64_t token = tokens != nullptr ? tokens[i] : i;
      const Row& row = rows_[row_of_[token]];
      const Vector gate = load_lanes(projected + token * stride + channels_ + channel, lanes);
      const Vector value =
          gate * convolution(row.at(states, size), token - row.first, channel, lanes);
      const RoundedRow<T> output = to.at(i, channel);
      if (lanes == LANES) return output.vector(0, value);
      for (int64_t lane = 0; lane < lanes; lane++) output.scalar(lane, value[lane]);
    });
    for_each_strip((int64_t)rows_.size(), team, member,
                   [&](int64_t r, int64_t channel, int64_t lanes) {
                     convolution.keep(rows_[r].at(states, size), channel, lanes);
                   });
    team.barrier();
  }

 private:
  struct Row {
    int64_t first, count, reads, writes;

    ConvolvedRow at(float* states, int64_t size) const {
      return {first, count, states + reads * size, states + writes * size};
    }
  };

  // body(item, channel, count) for one thread's share of the strips of `items` rows.
  template <class Body>
  void for_each_strip(int64_t items, Team& team, int member, const Body& body) const {
    const int64_t strips = (channels_ + LANES - 1) / LANES;
    const Share mine(items * strips, member, team.size());
    for (int64_t i = mine.first; i < mine.last; i++) {
      const int64_t channel = i % strips * LANES;
      body(i / strips, channel, std::min<int64_t>(LANES, channels_ - channel));
    }
  }

  const int64_t channels_;
  std::vector<Row> rows_;
  std::vector<int64_t> row_of_;
};

}  // namespace quire
