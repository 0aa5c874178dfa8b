// The operations between the matrix products: norms, rotary embedding, gated activation, and
// writers of outputs. Knows no step.
#pragma once

#include <cmath>

#include "decoder.h"
#include "panels.h"
#include "rounded_rows.h"

namespace quire {

// The residual stream of some tokens: `count` rows, hidden_size floats apart.
struct ResidualStream {
  float* rows = nullptr;
  int64_t count = 0;
};

// Sums in sixteen lanes, then across the lanes; the tail of a row is padded with zeros.
template <class Load>
inline float sum_of_squares(int64_t size, const Load& load_at) {
  Vector total = Vector{};
  for (int64_t i = 0; i < size; i += LANES) {
    Vector value;
    if (i + LANES <= size) {
      value = load_at(i);
    } else {
      value = Vector{};
      for (int64_t lane = 0; i + lane < size; lane++) value[lane] = load_at.scalar(i + lane);
    }
    total += value * value;
  }
  return sum_of(total);
}

struct Floats {
  const float* from;
  Vector operator()(int64_t i) const { return load<Vector>(from + i); }
  float scalar(int64_t i) const { return from[i]; }
};

// 1 / sqrt(mean of squares + epsilon), Zhang and Sennrich, Root Mean Square Layer Normalization.
inline float rms_scale(const float* row, int64_t size, float epsilon) {
  return 1.0f / std::sqrt(sum_of_squares(size, Floats{row}) / (float)size + epsilon);
}

// Writes the RMS norm of a row, times `weight`; a null weight copies the row.
template <class T>
inline void norm_row(const RoundedRow<T>& to, const float* row, const float* weight, int64_t size,
                     float epsilon) {
  if (weight == nullptr) return narrow_row(to, row, size);
  const float scale = rms_scale(row, size, epsilon);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES)
    to.vector(i, load<Vector>(row + i) * scale * load<Vector>(weight + i));
  for (; i < size; i++) to.scalar(i, row[i] * scale * weight[i]);
}

inline void norm_in_place(float* row, const float* weight, int64_t size, float epsilon) {
  const float scale = rms_scale(row, size, epsilon);
  for (int64_t i = 0; i < size; i++) row[i] = row[i] * scale * weight[i];
}

// Rotates the pairs (i, i + half) of a head in place, Su et al., RoFormer; cosines and sines are
// `half` values each.
inline void rotate(float* head, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cosines[i] - b * sines[i];
    head[i + half] = b * cosines[i] + a * sines[i];
  }
}

// The activation of a gate x, times an up:
//   x * sigmoid(x * (linear + cubic * x^2)) * (up + offset).
// This is SiLU for (1, 0). Since sigmoid(2 y) = (1 + tanh(y)) / 2, it is also the tanh form of
// GELU, Hendrycks and Gimpel, Gaussian Error Linear Units. Before that, the gate is limited from
// above, and the up from both sides; the limit may be infinity.
struct Gate {
  float linear, cubic, limit, offset;

  explicit Gate(const QuireModel& model)
      : linear(model.gate_linear),
        cubic(model.gate_cubic),
        limit(model.gate_limit),
        offset(model.up_offset) {}

  Vector operator()(Vector gate, Vector up) const {
    const Vector highest = broadcast(limit), lowest = broadcast(-limit);
    gate = gate > highest ? highest : gate;
    up = up > highest ? highest : up;
    up = up < lowest ? lowest : up;
    return times_sigmoid(gate, gate * (linear + cubic * (gate * gate))) * (up + offset);
  }
};

// The last operations on a logit: a factor, and a soft cap (0 for none).
struct LogitScale {
  float factor, cap;

  Vector operator()(Vector logits) const {
    const Vector value = logits * factor;
    return cap > 0.0f ? capped(value, cap) : value;
  }
  float operator()(float logit) const { return (*this)(broadcast(logit))[0]; }
};

// Reads the embedding of a token. A tied one is read from the head's strips (see multiply.h), in
// which the words of a row are sixteen words apart.
template <class T>
inline void read_embedding(const QuireModel& model, int64_t token, float* to) {
  const int64_t size = model.hidden_size;
  const bool tied = model.embedding.packed == nullptr && model.embedding.num_parts == 0;
  const QuireLinear& table = tied ? model.head : model.embedding;
  if (table.num_parts > 0) {
    read_output(table, token, to);
    for (int64_t i = 0; i < size; i++) to[i] *= model.embedding_multiplier;
    return;
  }
  const auto* from = (const typename T::Element*)table.packed;
  from += (tied ? token / LANES * LANES : token) * size;
  if (tied) from += token % LANES * T::PER_WORD;
  const int64_t stride = (tied ? LANES : 1) * T::PER_WORD;
  for (int64_t i = 0; i < size; i += T::PER_WORD, from += stride)
    for (int64_t e = 0; e < T::PER_WORD; e++)
      to[i + e] = T::widen(from[e]) * model.embedding_multiplier;
}

// Writers of a linear layer's outputs: a vector or a scalar at a time.
struct Assign {
  float* to;
  int64_t stride;
  void vector(int64_t row, int64_t column, Vector value) const {
    store(to + row * stride + column, value);
  }
  void scalar(int64_t row, int64_t column, float value) const { to[row * stride + column] = value; }
};

struct AssignLogits {
  float* to;
  int64_t stride;
  LogitScale scale;
  void vector(int64_t row, int64_t column, Vector value) const {
    store(to + row * stride + column, scale(value));
  }
  void scalar(int64_t row, int64_t column, float value) const {
    to[row * stride + column] = scale(value);
  }
};

struct Add {
  float* to;
  int64_t stride;
  float factor;
  void vector(int64_t row, int64_t column, Vector value) const {
    float* address = to + row * stride + column;
    store(address, load<Vector>(address) + value * factor);
  }
  void scalar(int64_t row, int64_t column, float value) const {
    to[row * stride + column] += value * factor;
  }
};

// The epilogue of a linear layer for multiply(): adds the bias and passes the outputs to a writer.
template <class Write>
struct Outputs {
  const float* bias;  // May be null.
  int64_t count;
  const Write& write;

  void operator()(int64_t row, int64_t strip, const float* values, int64_t num_strips) const {
    for (int64_t s = 0; s < num_strips; s++, values += LANES) {
      const int64_t column = (strip + s) * LANES;
      const float* more = bias != nullptr ? bias + column : nullptr;
      if (column + LANES <= count) {
        const Vector value = load<Vector>(values);
        write.vector(row, column, more ? value + load<Vector>(more) : value);
        continue;
      }
      for (int64_t i = 0; column + i < count; i++)
        write.scalar(row, column + i, values[i] + (more ? more[i] : 0.0f));
    }
  }
};

}  // namespace quire
