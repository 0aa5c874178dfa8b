// Causal convolutions of each channel, whose state is their last inputs. Knows no layer.
//
// An output is bias + the sum of the last inputs, each times its tap: the oldest first, the bias
// last, in float32. So it depends on the tokens of its row alone, wherever a step begins.
#pragma once

#include "decoder.h"
#include "vector.h"

namespace quire {

// The tokens of one row of a step, and the inputs before them.
struct ConvolvedRow {
  int64_t first, count;  // The row's first token in the step, and how many it has.
  const float* before;   // [taps - 1][channels], the inputs before the first token, oldest first.
  float* after;          // The same after the last token; other memory.
};

// The inputs of a convolution. `input(token, channel, count)` gives those of a token of the step,
// for `count` channels from `channel` on.
template <class Input>
class Convolution {
 public:
  Convolution(const QuireTaps& weights, int64_t channels, const Input& input)
      : weights_(weights), channels_(channels), input_(input) {}

  // The outputs of a row's token `index`, for `count` <= LANES channels.
  Vector operator()(const ConvolvedRow& row, int64_t index, int64_t channel, int64_t count) const {
    const int64_t taps = weights_.num_taps;
    Vector sum = Vector{};
    for (int64_t tap = 0; tap < taps; tap++) {
      const Vector weight = load_lanes(weights_.taps + tap * channels_ + channel, count);
      sum += weight * input_before(row, index + tap + 1 - taps, channel, count);
    }
    return weights_.bias != nullptr ? sum + load_lanes(weights_.bias + channel, count) : sum;
  }

  // Writes the last inputs of a row, for `count` channels.
  void keep(const ConvolvedRow& row, int64_t channel, int64_t count) const {
    const int64_t kept = weights_.num_taps - 1;
    for (int64_t place = 0; place < kept; place++)
      store_lanes(row.after + place * channels_ + channel,
                  input_before(row, row.count - kept + place, channel, count), count);
  }

 private:
  // The input of a row's token `index`; a negative one is before the step.
  Vector input_before(const ConvolvedRow& row, int64_t index, int64_t channel,
                      int64_t count) const {
    if (index >= 0) return input_(row.first + index, channel, count);
    return load_lanes(row.before + (weights_.num_taps - 1 + index) * channels_ + channel, count);
  }

  const QuireTaps& weights_;
  const int64_t channels_;
  const Input& input_;
};

}  // namespace quire
