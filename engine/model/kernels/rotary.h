// The rotary embeddings of a step's tokens. Knows no layer.
#pragma once

#include <cmath>

#include "decoder.h"
#include "layers.h"
#include "workspace.h"

namespace quire {

// The cosines and sines of each token, for each of the model's rotary embeddings.
class RotaryAngles {
 public:
  explicit RotaryAngles(const QuireModel& model) : model_(model), half_(model.rotary_dim / 2) {}

  // Requests the memory of a step.
  void lay_out(Workspace& workspace, int64_t tokens) {
    tokens_ = tokens;
    workspace.add(&cosines_, model_.num_rotaries * tokens * half_);
    workspace.add(&sines_, model_.num_rotaries * tokens * half_);
  }

  void find(int64_t token, int64_t position) const {
    for (int64_t r = 0; r < model_.num_rotaries; r++) {
      const QuireRotary& from = model_.rotaries[r];
      const int64_t first = first_of(r, token);
      for (int64_t i = 0; i < half_; i++) {
        const float angle = (float)position * from.inverse_frequencies[i];
        cosines_[first + i] = std::cos(angle) * from.scaling;
        sines_[first + i] = std::sin(angle) * from.scaling;
      }
    }
  }

  // Rotates a head of a token in place.
  void rotate(float* head, int64_t rotary, int64_t token) const {
    const int64_t first = first_of(rotary, token);
    quire::rotate(head, cosines_ + first, sines_ + first, half_);
  }

 private:
  int64_t first_of(int64_t rotary, int64_t token) const {
    return (rotary * tokens_ + token) * half_;
  }

  const QuireModel model_;
  const int64_t half_;
  int64_t tokens_ = 0;
  float *cosines_ = nullptr, *sines_ = nullptr;
};

}  // namespace quire
