// The C interface of the recurrences: plain structs, mirrored field by field in recurrent.py.
//
// The decoder's step may call the functions of recurrence.h and convolution.h with them, too.
#pragma once

#include "decoder.h"

extern "C" {

// The rows of a step. A layer's states are in buffers: each row reads one and writes another one,
// so that it can be computed again.
struct QuireRows {
  int64_t num_rows;
  const int64_t *query_lens, *offsets;  // Of each row: its tokens (at least 1), and the first one.
  const int64_t *reads, *writes;        // Of each row: the indices of its buffers.
};

// A causal convolution of each channel, and what follows it.
struct QuireConvolution {
  QuireTaps weights;
  const float* inputs;  // `channels` numbers for each token, `input_stride` numbers apart.
  float* history;       // [buffers][num_taps - 1][channels], the inputs before, oldest first.
  float* outputs;       // [tokens][channels]
  int64_t channels, input_stride;
  int64_t has_silu;            // Whether outputs go through SiLU.
  int64_t rounds_to_bfloat16;  // Whether they are rounded to bfloat16 after that.
};

// A recurrence whose state is a matrix S [key_dim][value_dim] for each head; see recurrence.h.
struct QuireRecurrence {
  const float *queries, *keys, *values;  // The numbers of a head are adjacent.
  const float *decays, *strengths;       // `strengths` is [tokens][num_heads], or null for 1.
  const float* skips;                    // [num_heads], or null for 0.
  float* states;                         // [buffers][num_heads][key_dim][value_dim]
  float* outputs;                        // [tokens][num_heads][value_dim]
  int64_t num_heads, num_key_heads, key_dim, value_dim;
  // Numbers from token to token, from head to head, and from key to key; 0 where they share one.
  int64_t query_strides[2], key_strides[2], value_strides[2], decay_strides[3];
  int64_t corrects;    // Whether it is a delta rule.
  float query_factor;  // Of every query.
  float epsilon;       // Of the norms of queries and keys; negative: they are not normalized.
};

// The selective state space of Mamba; see selection.h.
struct QuireSelection {
  const float *inputs, *sizes;  // [tokens][channels]
  const float *into, *out_of;   // [tokens][num_groups][state_size]
  const float* rates;           // [state_size][channels], negative.
  const float* skips;           // [channels]
  float* states;                // [buffers][state_size][channels]
  float* outputs;               // [tokens][channels]
  int64_t channels, num_groups, state_size;
};

// They return 0, or 1 if there is not enough memory; nothing is computed then.
int64_t quire_convolve(const QuireRows* rows, const QuireConvolution* of, int64_t num_threads);
int64_t quire_recur(const QuireRows* rows, const QuireRecurrence* of, int64_t num_threads);
int64_t quire_select(const QuireRows* rows, const QuireSelection* of, int64_t num_threads);
}
