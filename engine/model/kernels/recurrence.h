// Linear recurrences whose state is a matrix for each head: gated delta rules, Mamba-2, and linear
// attention with a decay. Knows no model.
//
// With the state S [key_dim][value_dim] of a head, and of each token a decay a (a number, or one for
// each key), a key k, a value v, a query q and a strength b:
//
//   S = a S + k change^T      change = b (v - (a S)^T k), or b v without a correction
//   output = S^T q + skip v
//
// Tokens are computed one after the other, and sums over keys run in the order of the keys. So a
// state is a function of the tokens before it, however they are divided into steps. The columns of
// a state are independent of each other: a unit of work is a few columns of one head of one row.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "layers.h"
#include "recurrent.h"
#include "team.h"

namespace quire {

// Registers of adjacent columns in a unit. Three times as many are in use: changes and two sums.
constexpr int WIDE = REGISTERS / 4;

// What the keys of one head's state are multiplied with for one token: `key_dim` numbers each.
struct TokenFactors {
  float *decays, *keys, *queries;
  float* decayed_keys;  // (a S)^T k = S^T (a k)
};

// One thread's memory for a unit.
struct RecurrenceScratch {
  float* columns;  // The state of a unit between its first and its last token.
  TokenFactors factors[2];

  static int64_t size(int64_t key_dim) { return key_dim * (WIDE * PART_LANES + 8); }
  RecurrenceScratch(float* memory, int64_t key_dim) : columns(memory) {
    memory += key_dim * WIDE * PART_LANES;
    for (TokenFactors& each : factors)
      for (float** array : {&each.decays, &each.keys, &each.queries, &each.decayed_keys}) {
        *array = memory;
        memory += key_dim;
      }
  }
};

// The numbers of a token's head.
inline const float* at(const float* from, const int64_t* strides, int64_t token, int64_t head) {
  return from + token * strides[0] + head * strides[1];
}

inline void read_factors(const QuireRecurrence& of, int64_t token, int64_t head,
                         const TokenFactors& to) {
  const int64_t key_head = head / (of.num_heads / of.num_key_heads);
  const float* const key = at(of.keys, of.key_strides, token, key_head);
  const float* const query = at(of.queries, of.query_strides, token, key_head);
  const float* const decay = at(of.decays, of.decay_strides, token, head);
  float key_factor = 1.0f, query_factor = of.query_factor;
  if (of.epsilon >= 0.0f) {
    key_factor = 1.0f / std::sqrt(sum_of_squares(of.key_dim, Floats{key}) + of.epsilon);
    query_factor /= std::sqrt(sum_of_squares(of.key_dim, Floats{query}) + of.epsilon);
  }
  // Loops apart, so that the compiler vectorizes them.
  if (of.decay_strides[2] == 0)
    std::fill_n(to.decays, of.key_dim, *decay);
  else
    for (int64_t k = 0; k < of.key_dim; k++) to.decays[k] = decay[k * of.decay_strides[2]];
  for (int64_t k = 0; k < of.key_dim; k++) to.keys[k] = key[k] * key_factor;
  for (int64_t k = 0; k < of.key_dim; k++) to.queries[k] = query[k] * query_factor;
  if (!of.corrects) return;
  for (int64_t k = 0; k < of.key_dim; k++) to.decayed_keys[k] = to.decays[k] * to.keys[k];
}

// Registers of adjacent columns, or, in one register, the last `count` columns of a head.
template <int NUM_REGISTERS, bool IS_WHOLE>
struct Columns {
  static constexpr int SIZE = NUM_REGISTERS;
  static constexpr int64_t STRIDE = NUM_REGISTERS * PART_LANES;
  int64_t count;

  PartVector load(const float* from, int part) const {
    if (IS_WHOLE) return quire::load<PartVector>(from + part * PART_LANES);
    PartVector value = {};
    for (int64_t i = 0; i < count; i++) value[i] = from[i];
    return value;
  }
  void store(float* to, int part, PartVector value) const {
    if (IS_WHOLE) return quire::store(to + part * PART_LANES, value);
    for (int64_t i = 0; i < count; i++) to[i] = value[i];
  }
  // Stores past the caches, which may need their lines for what is read before the state is.
  void store_past_caches(float* to, int part, PartVector value) const {
    if (IS_WHOLE && (uintptr_t)to % PART_BYTES == 0) return stream(to + part * PART_LANES, value);
    store(to, part, value);
  }
};

// sums = S^T weights.
template <class C>
inline void recall(const C& columns, const float* state, int64_t stride, int64_t key_dim,
                   const float* weights, PartVector* sums) {
  PartVector found[C::SIZE] = {};
  for (int64_t k = 0; k < key_dim; k++)
    for (int i = 0; i < C::SIZE; i++)
      found[i] = multiply_add(columns.load(state + k * stride, i), weights[k] - PartVector{},
                              found[i]);
  for (int i = 0; i < C::SIZE; i++) sums[i] = found[i];
}

// Updates the state with a token, from one place to another, and computes its output. With RECALLS,
// also S^T next of the new state: what the next token needs, while the state is in registers.
template <bool RECALLS, bool IS_STREAMED, class C>
inline void update(const C& columns, const float* from, int64_t from_stride, float* to,
                   int64_t to_stride, int64_t key_dim, const TokenFactors& token,
                   const PartVector* change, const float* next, PartVector* output,
                   PartVector* sums) {
  PartVector added[C::SIZE], found[C::SIZE] = {}, recalled[C::SIZE] = {};
  for (int i = 0; i < C::SIZE; i++) added[i] = change[i];
  for (int64_t k = 0; k < key_dim; k++)
    for (int i = 0; i < C::SIZE; i++) {
      const PartVector kept = columns.load(from + k * from_stride, i) * token.decays[k];
      const PartVector state = multiply_add(added[i], token.keys[k] - PartVector{}, kept);
      if (IS_STREAMED)
        columns.store_past_caches(to + k * to_stride, i, state);
      else
        columns.store(to + k * to_stride, i, state);
      found[i] = multiply_add(state, token.queries[k] - PartVector{}, found[i]);
      if (RECALLS) recalled[i] = multiply_add(state, next[k] - PartVector{}, recalled[i]);
    }
  for (int i = 0; i < C::SIZE; i++) {
    output[i] = found[i];
    if (RECALLS) sums[i] = recalled[i];
  }
}

// All tokens of a row, for the columns of a head from `column` on.
template <class C>
void recur_columns(const QuireRows& rows, const QuireRecurrence& of, int64_t row, int64_t head,
                   int64_t column, const C& columns, RecurrenceScratch scratch) {
  const int64_t num_tokens = rows.query_lens[row], first = rows.offsets[row];
  const auto state_of = [&](int64_t buffer) {
    return of.states + (buffer * of.num_heads + head) * of.key_dim * of.value_dim + column;
  };
  const float* from = state_of(rows.reads[row]);
  int64_t stride = of.value_dim;
  TokenFactors &token = scratch.factors[0], &next = scratch.factors[1];
  PartVector known[C::SIZE] = {}, change[C::SIZE], output[C::SIZE];
  read_factors(of, first, head, token);
  if (of.corrects) recall(columns, from, stride, of.key_dim, token.decayed_keys, known);
  for (int64_t t = first; t < first + num_tokens; t++) {
    const bool is_last = t + 1 == first + num_tokens;
    const float strength = of.strengths == nullptr ? 1.0f : of.strengths[t * of.num_heads + head];
    const float* const values = at(of.values, of.value_strides, t, head) + column;
    for (int i = 0; i < C::SIZE; i++)
      change[i] = (columns.load(values, i) - known[i]) * strength;
    float* const to = is_last ? state_of(rows.writes[row]) : scratch.columns;
    const int64_t to_stride = is_last ? of.value_dim : C::STRIDE;
    if (!is_last) read_factors(of, t + 1, head, next);
    if (of.corrects && !is_last)
      update<true, false>(columns, from, stride, to, to_stride, of.key_dim, token, change,
                          next.decayed_keys, output, known);
    else if (is_last && num_tokens == 1)
      update<false, true>(columns, from, stride, to, to_stride, of.key_dim, token, change, nullptr,
                          output, known);
    else
      update<false, false>(columns, from, stride, to, to_stride, of.key_dim, token, change, nullptr,
                           output, known);
    float* const outputs = of.outputs + (t * of.num_heads + head) * of.value_dim + column;
    const float skip = of.skips == nullptr ? 0.0f : of.skips[head];
    for (int i = 0; i < C::SIZE; i++)
      columns.store(outputs, i,
                    multiply_add(columns.load(values, i), skip - PartVector{}, output[i]));
    from = scratch.columns, stride = C::STRIDE;
    std::swap(token, next);
  }
}

// The units of a head: wide ones, then at most one of each half as many registers, then a part of a
// register.
struct HeadUnits {
  int64_t value_dim;

  int64_t count() const {
    int64_t units = 0, left = value_dim;
    for (int64_t width = WIDE * PART_LANES; width >= PART_LANES; width /= 2) {
      units += left / width;
      left %= width;
    }
    return units + (left > 0 ? 1 : 0);
  }

  // Calls body(first column, columns) for one unit, which begins at `column` or later.
  template <int SIZE = WIDE, class Body>
  void visit(int64_t unit, const Body& body, int64_t column = 0) const {
    constexpr int64_t width = SIZE * PART_LANES;
    const int64_t count = (value_dim - column) / width;
    if (unit < count) return body(column + unit * width, Columns<SIZE, true>{0});
    unit -= count;
    column += count * width;
    if constexpr (SIZE > 1)
      visit<SIZE / 2>(unit, body, column);
    else
      body(column, Columns<1, false>{value_dim - column});
  }
};

// One thread's part of a recurrence; all threads of a team call it, with a barrier before and after.
// `scratch` has RecurrenceScratch::size(key_dim) numbers.
inline void recur(const QuireRows& rows, const QuireRecurrence& of, Team& team, int member,
                  float* scratch) {
  const RecurrenceScratch memory(scratch, of.key_dim);
  const HeadUnits units{of.value_dim};
  const int64_t total = rows.num_rows * of.num_heads * units.count();
  for (int64_t i = member; i < total; i = team.take()) {
    const int64_t row = i / units.count() / of.num_heads, head = i / units.count() % of.num_heads;
    units.visit(i % units.count(), [&](int64_t column, const auto& columns) {
      recur_columns(rows, of, row, head, column, columns, memory);
    });
  }
  finish_streams();
}

}  // namespace quire
