// The selective state space of Mamba for the rows of a step. Knows no model.
//
// With the state s [state_size] of a channel, its rates A [state_size] and share D, and of each token
// a step size d and an input x of the channel, and vectors b and c of the channel's group:
//
//   s = exp(d A) s + d x b        output = s . c + D x
//
// Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, algorithm 2.
// Tokens are computed one after the other, and sums run in the order of the state. A unit of work is
// sixteen channels of one row.
#pragma once

#include "convolution.h"
#include "recurrent.h"
#include "team.h"

namespace quire {

// All tokens of a row, for `count` <= LANES channels. `state` is memory for state_size vectors.
inline void select_channels(const QuireRows& rows, const QuireSelection& of, int64_t row,
                            int64_t channel, int64_t count, Vector* state) {
  const int64_t group = channel / (of.channels / of.num_groups);
  const auto place = [&](int64_t buffer, int64_t n) {
    return of.states + (buffer * of.state_size + n) * of.channels + channel;
  };
  for (int64_t n = 0; n < of.state_size; n++)
    state[n] = load_lanes(place(rows.reads[row], n), count);
  const Vector skip = load_lanes(of.skips + channel, count);
  const int64_t first = rows.offsets[row];
  for (int64_t t = first; t < first + rows.query_lens[row]; t++) {
    const Vector size = load_lanes(of.sizes + t * of.channels + channel, count);
    const Vector input = load_lanes(of.inputs + t * of.channels + channel, count);
    const int64_t vectors = (t * of.num_groups + group) * of.state_size;
    const Vector change = size * input;
    Vector output = skip * input;
    for (int64_t n = 0; n < of.state_size; n++) {
      const Vector decay = exponential(size * load_lanes(of.rates + n * of.channels + channel, count));
      state[n] = decay * state[n] + change * of.into[vectors + n];
      output += state[n] * of.out_of[vectors + n];
    }
    store_lanes(of.outputs + t * of.channels + channel, output, count);
  }
  for (int64_t n = 0; n < of.state_size; n++)
    store_lanes(place(rows.writes[row], n), state[n], count);
}

// One thread's part of a selection; all threads of a team call it, with a barrier before and after.
// `scratch` has LANES * state_size numbers, aligned to a vector.
inline void select(const QuireRows& rows, const QuireSelection& of, Team& team, int member,
                   float* scratch) {
  // The channels of a unit have one group.
  const int64_t size = of.channels / of.num_groups, strips = (size + LANES - 1) / LANES;
  const int64_t units = of.num_groups * strips;
  for (int64_t i = member; i < rows.num_rows * units; i = team.take()) {
    const int64_t unit = i % units, first = unit % strips * LANES;
    select_channels(rows, of, i / units, unit / strips * size + first,
                    std::min<int64_t>(LANES, size - first), (Vector*)scratch);
  }
}

}  // namespace quire
