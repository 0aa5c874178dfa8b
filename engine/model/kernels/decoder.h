// The C interface of the kernels: plain structs, mirrored field by field in library.py.
#pragma once

#include <cstdint>

extern "C" {

// Quantized weights of one form, in panels (see panels.h): the number of strips, the bits of a
// number, whether groups have minima, and whether scales and minima are nested.
struct QuirePanels {
  const void* packed;
  int64_t num_strips, bits, has_minima, is_nested;
};

// outputs = inputs . packed + bias. `packed` holds strips of the element type (see multiply.h),
// padded to whole strips of outputs. Quantized weights have parts instead, one after the other:
// every part but the last has whole panels of outputs.
struct QuireLinear {
  const void* packed;
  const float* bias;  // May be null, like every norm below.
  int64_t inputs, outputs;
  const QuirePanels* parts;
  int64_t num_parts;  // 0 for weights of the element type.
  int64_t digits;     // Of the inputs, if there are parts (see digit_rows.h).
};

// The experts of a layer: a router with one output per expert, and the matrices of each expert.
struct QuireExperts {
  QuireLinear router;
  const QuireLinear *gate_up, *down;
};

// The weights of a causal convolution of each channel, see convolution.h.
struct QuireTaps {
  const float* taps;  // [num_taps][channels]; the last tap is that of the token itself.
  const float* bias;  // [channels], or null.
  int64_t num_taps;
};

// A mixer whose state is a matrix for each head, see recurrent_mixer.h. All places are those of the
// first of several adjacent numbers of a token.
struct QuireRecurrentMixer {
  QuireTaps convolution;
  int64_t channels;              // Of the convolution.
  // Places among the outputs of `projection`: of the inputs of the convolution, of a gate for each
  // value, and of a step size for each head and a strength for each head. Without own strengths, a
  // negative place: the step sizes are the strengths.
  int64_t inputs, gates, sizes, strengths;
  int64_t queries, keys, values;  // Places among the channels.
  int64_t num_heads, num_key_heads, key_dim, value_dim;
  const float *size_biases, *rates, *skips;  // [num_heads]; no skips if null.
  int64_t corrects;                          // As the next two in QuireRecurrence.
  float query_factor, epsilon;
  const float* norm;  // [num_heads][value_dim]
  int64_t norm_size;  // Adjacent outputs that have a norm together.
  int64_t gates_after_norm;
};

struct QuireLayer {
  const float *attention_norm, *query_norm, *key_norm, *attention_post_norm;
  const float* sinks;  // One per query head: a score without a value. Null for none.
  const float *mlp_norm, *mlp_post_norm;
  // The outputs of `projection` are queries, keys and values, or what another mixer needs. The
  // strips of gate_up alternate: a strip of gates, a strip of ups.
  QuireLinear projection, output, gate_up, down;
  const QuireTaps* convolution;           // Instead of attention, or null.
  const QuireRecurrentMixer* recurrence;  // The same.
  const QuireExperts* experts;            // Instead of gate_up and down, or beside them, or null.
  int64_t place;   // The index of its keys and values, or of the first part of its state.
  int64_t window;  // Keys a token sees, itself included; 0 for all.
  int64_t rotary;  // The index of its rotary embedding; negative: nothing is rotated.
};

// A rotary embedding: rotary_dim / 2 frequencies, and a factor of the cosines and sines.
struct QuireRotary {
  const float* inverse_frequencies;
  float scaling;
};

// Sixteen outputs of an adapter's `up` matrix: a strip of `words` words. It is multiplied with the
// row of `down`'s outputs, from word `first` of that row on.
struct QuireUp {
  const void* packed;
  int64_t first, words;
};

// The addition of an adapter to a product: outputs += up . (scales * (down . inputs)).
struct QuireAddition {
  const void* down;     // Strips of `rank` outputs; null: adds nothing.
  const float* scales;  // One per output of `down`, padded to whole strips.
  const QuireUp* ups;   // One per strip of the product.
  int64_t rank;
  int64_t words;  // Words of each strip of `up`; negative if they differ.
};

struct QuireModel {
  int64_t is_bfloat16, num_layers, hidden_size, num_heads, num_kv_heads, head_dim, rotary_dim;
  int64_t intermediate_size, vocab_size, num_rotaries;
  // All experts of a layer, the inputs of `down`, and whether the weights of a token's experts are
  // divided by their sum.
  int64_t num_experts, expert_size, normalizes_chosen;
  int64_t norms_whole_projections;  // Whether query_norm and key_norm are over all heads together.
  // Whether a projection has a gate after each query head: its sigmoid multiplies the head's output.
  int64_t gates_attention;
  float epsilon, scaling;
  float softcap;                  // Cap of the attention scores; 0 for none.
  float gate_linear, gate_cubic, gate_limit, up_offset;  // Gate in layers.h.
  float embedding_multiplier, residual_multiplier, logits_divisor;
  float logits_softcap;  // 0 for none.
  // One output per token. Rows of the element type are not packed. Neither rows nor parts: the
  // weights of the head, which are in memory only once.
  QuireLinear embedding;
  const QuireRotary* rotaries;
  const float* final_norm;
  QuireLinear head;
  const QuireLayer* layers;
  int64_t num_adapters;
  const QuireAddition* additions;  // [num_adapters][num_layers][projection, output, gate_up, down].
};

struct QuireStep {
  int64_t num_tokens, num_rows, num_logit_rows, table_stride, block_size, num_threads;
  int64_t num_chosen;       // The experts that each token uses.
  int64_t quantizes_cache;  // Whether keys and values are 8-bit integers with scales (cache.h).
  const int64_t *token_ids, *positions, *slot_blocks, *slot_offsets;  // One per token.
  const int64_t *query_lens, *context_lens, *tables;                  // One per row.
  const int64_t* logit_rows;
  const int64_t* adapters;  // One per token, negative for none; null if no token has one.
  void* const* key_caches;  // One per layer with attention.
  void* const* value_caches;
  // The parts of the state after some token, of each layer that has one. The last inputs of its
  // convolution, oldest first: [buffers][num_taps - 1][channels]. Then the matrices of a
  // recurrence: [buffers][num_heads][key_dim][value_dim]. Null, like the next two, without states.
  float* const* states;
  const int64_t *state_reads, *state_writes;  // One buffer per row. No row writes what a row reads.
  // Per logit row, the head's outputs; not written if `argmax` is given.
  float* logits;
  // Per logit row, the token of the largest logit, or BROKEN; may be null.
  int64_t* argmax;
};

// The version of the structs above; must change with them.
int64_t quire_abi(void);
// Requests huge pages for memory that has not been touched yet: blocks are scattered, and with
// small pages, the first access to each of them would miss the TLB and walk the page table.
void quire_advise_huge_pages(void* memory, int64_t size);
// Null if there is not enough memory. The model's arrays must outlive the decoder.
void* quire_create(const QuireModel* model);
void quire_destroy(void* decoder);
// Returns 0, or 1 if there is not enough memory; nothing is computed then.
int64_t quire_step(void* decoder, const QuireStep* step);
}
