// What crosses the border to Python: plain structs, mirrored field by field in library.py.
#pragma once

#include <cstdint>

extern "C" {

// outputs = inputs . packed + bias. `packed` holds strips, see multiply.h; the number of outputs is
// padded to whole strips there.
struct QuireLinear {
  const void* packed;
  const float* bias;  // May be null, as every norm below.
  int64_t inputs, outputs;
};

struct QuireLayer {
  const float *attention_norm, *query_norm, *key_norm, *attention_post_norm;
  const float *mlp_norm, *mlp_post_norm;
  QuireLinear qkv, output, gate_up, down;  // gate_up: a strip of gates, a strip of ups, and so on.
  int64_t window;                          // Keys a token sees, itself included; 0 for all.
  int64_t rotates;                         // Whether queries and keys are rotated.
};

// Sixteen outputs of an adapter's `up`: a strip of so many words, to be multiplied with those from
// word `first` on of what `down` has made of a row.
struct QuireUp {
  const void* packed;
  int64_t first, words;
};

// What an adapter adds to a product: outputs += up . (scales * (down . inputs)).
struct QuireAddition {
  const void* down;     // Strips of `rank` outputs; null where nothing is added.
  const float* scales;  // One per output of `down`, whole strips.
  const QuireUp* ups;   // One per strip of the product.
  int64_t rank;
  int64_t words;  // Of every strip of `up`; negative where they differ.
};

struct QuireModel {
  int64_t is_bfloat16, num_layers, hidden_size, num_heads, num_kv_heads, head_dim, rotary_dim;
  int64_t intermediate_size, vocab_size;
  int64_t norms_whole_projections;  // query_norm and key_norm span all heads, not each.
  float epsilon, scaling, rotary_scaling;
  float embedding_multiplier, residual_multiplier, logits_divisor;
  const void* embedding;
  const float* inverse_frequencies;
  const float* final_norm;
  QuireLinear head;
  const QuireLayer* layers;
  int64_t num_adapters;
  const QuireAddition* additions;  // Of each adapter, of each layer: qkv, output, gate_up, down.
};

struct QuireStep {
  int64_t num_tokens, num_rows, num_logit_rows, table_stride, block_size, num_threads;
  const int64_t *token_ids, *positions, *slot_blocks, *slot_offsets;  // One per token.
  const int64_t *query_lens, *context_lens, *tables;                  // One per row.
  const int64_t* logit_rows;
  const int64_t* adapters;  // One per token, negative for none; null where no token has one.
  void* const* key_caches;  // One per layer.
  void* const* value_caches;
  float* logits;       // One row of the head's outputs for each; or, where that is given,
  int64_t* likeliest;  // the token of its largest logit alone, or BROKEN.
};

// Changes with the structs above.
int64_t quire_abi(void);
// Asks for huge pages where memory has not been touched yet: blocks lie scattered, and with small
// pages every one of them begins with a walk through the page tables.
void quire_advise(void* memory, int64_t size);
// Null when there is no memory. The model's arrays must outlive the decoder.
void* quire_create(const QuireModel* model);
void quire_destroy(void* decoder);
// 0, or 1 when there is no memory: nothing is computed then.
int64_t quire_step(void* decoder, const QuireStep* step);
}
