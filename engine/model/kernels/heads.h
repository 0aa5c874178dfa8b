// Around the attention of a layer: norms of heads, rotation, writes to the cache, and gates of the
// outputs. Knows no attention.
#pragma once

#include "cache.h"
#include "layers.h"
#include "rotary.h"
#include "team.h"

namespace quire {

// The heads of a step's tokens: rows of queries, keys and values, `stride` floats apart.
template <class T>
class Heads {
 public:
  explicit Heads(const QuireModel& model)
      : model_(model),
        group_(model.num_heads / model.num_kv_heads),
        query_stride_(model.head_dim * (model.gates_attention ? 2 : 1)) {}

  // One thread's part. Writes keys and values to the cache, and queries to `queries`, whose rows
  // are in the order key head, token, query head.
  void store(const QuireLayer& layer, const QuireStep& step, const CacheShape& cache,
             const RotaryAngles& angles, float* projected, int64_t stride,
             const RoundedRows<typename T::Row>& queries, Team& team, int member) const {
    if (layer.query_norm != nullptr && model_.norms_whole_projections)
      norm_whole(layer, step.num_tokens, projected, stride, team, member);
    const int64_t kv_heads = model_.num_kv_heads, dim = model_.head_dim;
    char* const keys = (char*)step.key_caches[layer.place];
    char* const values = (char*)step.value_caches[layer.place];
    const Share mine(step.num_tokens * kv_heads, member, team.size());
    for (int64_t i = mine.first; i < mine.last; i++) {
      const int64_t token = i / kv_heads, head = i % kv_heads;
      float* const row = projected + token * stride;
      float* key = row + model_.num_heads * query_stride_ + head * dim;
      for (int64_t g = 0; g < group_; g++) {
        float* query = row + (head * group_ + g) * query_stride_;
        prepare(query, layer, layer.query_norm, angles, token);
        narrow_row(queries.at(head * step.num_tokens + token, g * dim), query, dim);
      }
      prepare(key, layer, layer.key_norm, angles, token);
      const int64_t block = step.slot_blocks[token], offset = step.slot_offsets[token];
      store_key<T>(cache, cache.head_of(keys, block, head), offset, key);
      store_value<T>(cache, cache.head_of(values, block, head), offset, key + kv_heads * dim);
    }
    team.barrier();
  }

  // Multiplies the output of a query head, padded to whole vectors, by the sigmoid of its gate.
  void gate(float* output, const float* projected, int64_t stride, int64_t token,
            int64_t head) const {
    if (!model_.gates_attention) return;
    const int64_t dim = model_.head_dim;
    const float* const gates = projected + token * stride + head * query_stride_ + dim;
    for (int64_t i = 0; i < dim; i += LANES) {
      const Vector gate = load_lanes(gates + i, std::min<int64_t>(LANES, dim - i));
      quire::store(output + i, times_sigmoid(load<Vector>(output + i), gate));
    }
  }

 private:
  // Norms all queries of a token together, and all its keys.
  void norm_whole(const QuireLayer& layer, int64_t tokens, float* projected, int64_t stride,
                  Team& team, int member) const {
    const int64_t queries = model_.num_heads * model_.head_dim;
    const Share mine(tokens, member, team.size());
    for (int64_t t = mine.first; t < mine.last; t++) {
      float* row = projected + t * stride;
      norm_in_place(row, layer.query_norm, queries, model_.epsilon);
      norm_in_place(row + queries, layer.key_norm, model_.num_kv_heads * model_.head_dim,
                    model_.epsilon);
    }
    team.barrier();
  }

  void prepare(float* head, const QuireLayer& layer, const float* weight,
               const RotaryAngles& angles, int64_t token) const {
    if (weight != nullptr && !model_.norms_whole_projections)
      norm_in_place(head, weight, model_.head_dim, model_.epsilon);
    if (layer.rotary >= 0) angles.rotate(head, layer.rotary, token);
  }

  const QuireModel model_;
  const int64_t group_;
  const int64_t query_stride_;  // Numbers from the queries of a head to those of the next one.
};

}  // namespace quire
