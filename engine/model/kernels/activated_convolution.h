// The convolutions of a step's rows and the activation that follows them. Knows no model.
//
// A unit of work is some channels of a few tokens of one row.
#pragma once

#include "convolution.h"
#include "recurrent.h"
#include "team.h"

namespace quire {

constexpr int64_t TOKENS_OF_UNIT = 16;
// So few that inputs are read from the first-level cache for every tap but one.
constexpr int64_t CHANNELS_OF_UNIT = 256;

inline Vector rounded_to_bfloat16(Vector value) {
  BFloat16::Element narrow[LANES];
  BFloat16::narrow16(narrow, value);
  return BFloat16::widen16(narrow);
}

// One thread's part of a convolution; all threads of a team call it, with a barrier before and
// after.
inline void convolve(const QuireRows& rows, const QuireConvolution& of, Team& team, int member) {
  const auto input = [&](int64_t token, int64_t channel, int64_t count) {
    return load_lanes(of.inputs + token * of.input_stride + channel, count);
  };
  const Convolution<decltype(input)> convolution(of.weights, of.channels, input);
  const auto output = [&](const ConvolvedRow& row, int64_t index, int64_t channel, int64_t count) {
    Vector value = convolution(row, index, channel, count);
    if (of.has_silu) value = times_sigmoid(value, value);
    if (of.rounds_to_bfloat16) value = rounded_to_bfloat16(value);
    store_lanes(of.outputs + (row.first + index) * of.channels + channel, value, count);
  };
  // body(channel, count) for some channels.
  const auto for_each_strip = [](int64_t channel, int64_t end, const auto& body) {
    for (; channel < end; channel += LANES) body(channel, std::min<int64_t>(LANES, end - channel));
  };
  const int64_t size = (of.weights.num_taps - 1) * of.channels;
  const int64_t parts = (of.channels + CHANNELS_OF_UNIT - 1) / CHANNELS_OF_UNIT;
  int64_t unit = member, units_before = 0;
  for (int64_t r = 0; r < rows.num_rows; r++) {
    const ConvolvedRow row{rows.offsets[r], rows.query_lens[r], of.history + rows.reads[r] * size,
                           of.history + rows.writes[r] * size};
    const int64_t units = (row.count + TOKENS_OF_UNIT - 1) / TOKENS_OF_UNIT * parts;
    for (; unit < units_before + units; unit = team.take()) {
      const int64_t first = (unit - units_before) / parts * TOKENS_OF_UNIT;
      const int64_t last = std::min(first + TOKENS_OF_UNIT, row.count);
      const int64_t begin = (unit - units_before) % parts * CHANNELS_OF_UNIT;
      const int64_t end = std::min(begin + CHANNELS_OF_UNIT, of.channels);
      for (int64_t t = first; t < last; t++)
        for_each_strip(begin, end,
                       [&](int64_t channel, int64_t count) { output(row, t, channel, count); });
      if (last == row.count)
        for_each_strip(begin, end, [&](int64_t channel, int64_t count) {
          convolution.keep(row, channel, count);
        });
    }
    units_before += units;
  }
}

}  // namespace quire
