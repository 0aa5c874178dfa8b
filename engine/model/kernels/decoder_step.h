// One step of a decoder over all its layers, in one parallel region. Knows no request.
//
// The residual stream is float32 for every type of weights. Inputs of products are rounded to the
// type of the weights if that makes products faster. Every phase is divided among the threads, with
// barriers between phases: one parallel region per phase would cost several times as much.
#pragma once

#include <omp.h>

#include <optional>

#include "adapters.h"
#include "argmax.h"
#include "attention.h"
#include "decoder.h"
#include "experts.h"
#include "heads.h"
#include "layers.h"
#include "product.h"
#include "recurrent_mixer.h"
#include "rotary.h"
#include "short_convolution.h"
#include "workspace.h"

namespace quire {

// Unused words after each activation row: rows with a power of two of words would share cache sets.
constexpr int64_t ROW_PADDING = 16;
// In this many first layers, attention uses split precision: activations keep the low parts that
// rounding drops. The first layer's errors pass through all others and dominate the logits' error.
constexpr int64_t SPLIT_PRECISION_LAYERS = 1;

class AnyDecoder {
 public:
  virtual ~AnyDecoder() {}
  virtual void step(const QuireStep& step) = 0;
};

template <class T>
class Decoder : public AnyDecoder {
  typedef typename T::Element Element;
  typedef typename T::Row Row;
  typedef RoundedRows<Row> Inputs;  // The inputs of products.

 public:
  explicit Decoder(const QuireModel& model)
      : model_(model),
        head_(4 * model.num_layers),
        group_(model.num_heads / model.num_kv_heads),
        width_(SpanWorker<T>::padded(model.head_dim)),
        gate_(model),
        angles_(model),
        heads_(model),
        convolutions_(model),
        recurrences_(model),
        adapters_(model),
        experts_(model) {
    for (int64_t i = 0; i < model.num_layers; i++) {
      const QuireLayer& layer = model.layers[i];
      for (const QuireLinear& linear : {layer.projection, layer.output, layer.gate_up, layer.down})
        products_.push_back({linear});
    }
    products_.push_back({model.head});
    for (int64_t i = 0; i < model.num_layers; i++) {
      const QuireExperts* const experts = model.layers[i].experts;
      products_.push_back({experts != nullptr ? experts->router : QuireLinear{}});
    }
    for (int64_t i = 0; i < head_; i++) products_[i].next = &products_[i + 1];
    products_[head_].next = &products_[0];
    // Experts follow the router, and then the MLP beside them, or else the next layer.
    for (int64_t i = 0; i < model.num_layers; i++) {
      if (model.layers[i].experts == nullptr) continue;
      products_[4 * i + 1].next = &router(i);
      router(i).next = &products_[4 * i + (model.layers[i].gate_up.outputs > 0 ? 2 : 4)];
    }
  }

  void step(const QuireStep& step) override {
    step_ = &step;
    const int64_t element_bytes = step.quantizes_cache ? 1 : (int64_t)sizeof(Element);
    cache_ = {model_.num_kv_heads, step.block_size, model_.head_dim, element_bytes};
    plan_attention();
    convolutions_.plan(step);
    adapters_.plan(step);
    lay_out();
    std::optional<Team> team;
#pragma omp parallel num_threads(step.num_threads)
    {
#pragma omp single
      team.emplace(omp_get_num_threads());
      run(*team, omp_get_thread_num());
    }
  }

 private:
  Product& router(int64_t layer) { return products_[head_ + 1 + layer]; }

  void plan_attention() {
    plan_.clear();
    int64_t offset = 0;
    for (int64_t r = 0; r < step_->num_rows; r++) {
      const int64_t* table = step_->tables + r * step_->table_stride;
      plan_.rows.push_back({step_->query_lens[r], step_->context_lens[r], offset, offset, table});
      offset += step_->query_lens[r];
    }
    logit_plan_.select(plan_, step_->logit_rows, step_->num_logit_rows);
    for (AttentionPlan* plan : {&plan_, &logit_plan_})
      plan->cut(group_, model_.num_kv_heads, 2 * cache_.slot_bytes(), step_->num_threads);
  }

  void lay_out() {
    const QuireModel& m = model_;
    const int64_t threads = step_->num_threads;
    const int64_t tokens = std::max(step_->num_tokens, step_->num_logit_rows);
    const int64_t padding = ROW_PADDING * T::PER_WORD;
    int64_t projected = m.hidden_size, mixed = m.num_heads * m.head_dim;
    for (int64_t i = 0; i < m.num_layers; i++) {
      projected = std::max(projected, m.layers[i].projection.outputs);
      mixed = std::max(mixed, m.layers[i].output.inputs);
    }
    normed_.stride = m.hidden_size + padding;
    mixed_.stride = mixed + padding;
    activated_.stride = SpanWorker<T>::padded(m.intermediate_size) + padding;
    queries_.stride = group_ * m.head_dim;
    projected_stride_ = std::max(projected, SpanWorker<T>::padded(m.num_experts));
    scratch_stride_ = SpanWorker<T>::scratch_size(cache_, group_);
    partial_stride_ = Partial::size(SpanWorker<T>::max_rows(group_), width_);
    stream_.count = step_->num_tokens;
    logit_stream_.count = step_->num_logit_rows;
    workspace_.add(&stream_.rows, stream_.count * m.hidden_size);
    workspace_.add(&logit_stream_.rows, logit_stream_.count * m.hidden_size);
    add_rows(normed_, tokens);
    add_rows(mixed_, tokens);
    add_rows(queries_, tokens * m.num_kv_heads);
    add_rows(activated_, tokens);
    workspace_.add(&projected_, tokens * projected_stride_);
    angles_.lay_out(workspace_, step_->num_tokens);
    workspace_.add(&sums_, threads * SUMS_SIZE);
    workspace_.add(&scratch_, threads * scratch_stride_);
    workspace_.add(&argmax_, threads * logit_stream_.count * RowArgmax::ROW_SIZE);
    const int64_t partials = std::max(plan_.num_partials, logit_plan_.num_partials);
    workspace_.add(&partials_, (partials + threads) * partial_stride_);
    adapters_.lay_out(workspace_, activated_.stride, mixed_.stride, normed_.stride);
    recurrences_.lay_out(*step_, workspace_);
    digits_.lay_out(workspace_, products_, tokens, threads);
    // The matrix unit reads whole tile registers, beyond the last row.
    int64_t longest = std::max({normed_.stride, mixed_.stride, activated_.stride});
    experts_.lay_out(workspace_, tokens, step_->num_chosen, padding, &longest);
    workspace_.reserve(UNIT_HEIGHT * longest * (int64_t)sizeof(typename Row::Element));
  }

  void add_rows(Inputs& rows, int64_t count) {
    workspace_.add(&rows.values, count * rows.stride);
    if (Row::PER_WORD > 1) workspace_.add(&rows.low, count * rows.stride);
  }

  // From the attention of the last layer on, only the tokens whose logits are needed are computed.
  void run(Team& team, int member) {
    const MatrixUnit unit;
    embed(team, member);
    for (int64_t i = 0; i < model_.num_layers; i++) {
      const QuireLayer& layer = model_.layers[i];
      const Product* const products = &products_[4 * i];
      const bool split = i < SPLIT_PRECISION_LAYERS, last = i + 1 == model_.num_layers;
      const Inputs normed = inputs_of(products[0], normed_, split);
      const Inputs mixed = inputs_of(products[1], mixed_, split);
      norm(stream_, layer.attention_norm, normed, team, member);
      project(products[0], normed, stream_.count, team, member);
      if (last) gather_logit_rows(team, member);
      const ResidualStream& stream = last ? logit_stream_ : stream_;
      if (layer.convolution != nullptr || layer.recurrence != nullptr)
        recur(layer, last ? step_->logit_rows : nullptr, stream.count, mixed, team, member);
      else
        attend(layer, last ? logit_plan_ : plan_, queries_.with_low(split), mixed, team, member);
      add_to_residual(stream, products[1], mixed, layer.attention_post_norm, team, member);
      feed_forward(i, stream, team, member);
    }
    compute_logits(team, member);
  }

  void embed(Team& team, int member) {
    const Share mine(step_->num_tokens, member, team.size());
    for (int64_t t = mine.first; t < mine.last; t++) {
      read_embedding<T>(model_, step_->token_ids[t], stream_.rows + t * model_.hidden_size);
      angles_.find(t, step_->positions[t]);
    }
    team.barrier();
  }

  // Needs no barrier: attend() and recur() have one before the rows are read.
  void gather_logit_rows(Team& team, int member) {
    const int64_t size = model_.hidden_size;
    const Share mine(logit_stream_.count, member, team.size());
    for (int64_t i = mine.first; i < mine.last; i++)
      std::copy_n(stream_.rows + step_->logit_rows[i] * size, size, logit_stream_.rows + i * size);
  }

  void norm(const ResidualStream& from, const float* weight, const Inputs& to, Team& team,
            int member) {
    const int64_t size = model_.hidden_size;
    const Share mine(from.count, member, team.size());
    for (int64_t t = mine.first; t < mine.last; t++)
      norm_row(to.at(t), from.rows + t * size, weight, size, model_.epsilon);
    team.barrier();
  }

  // One thread's part of a product; epilogue(row, strip, values, count) as in multiply().
  template <class Epilogue>
  void multiply_share(const Product& product, const Inputs& from, int64_t count, Team& team,
                      int member, const Epilogue& epilogue) {
    const auto multiply_rows = [&](const auto& rows) {
      adapters_.multiply(product, &product - products_.data(), from, rows, team, member,
                         sums_ + member * SUMS_SIZE, epilogue);
    };
    if (product.linear.num_parts > 0)
      return multiply_rows(digits_.of(from, count, product.linear, team, member));
    multiply_rows(rows_of<T>(from, count));
  }

  template <class Write>
  void write_outputs(const Product& product, const Inputs& from, int64_t count, Team& team,
                     int member, const Write& write) {
    const Outputs<Write> outputs{product.linear.bias, product.linear.outputs, write};
    multiply_share(product, from, count, team, member, outputs);
  }

  void project(const Product& product, const Inputs& from, int64_t count, Team& team, int member) {
    write_outputs(product, from, count, team, member, Assign{projected_, projected_stride_});
    team.barrier();
  }

  void add_to_residual(const ResidualStream& to, const Product& product, const Inputs& from,
                       const float* post_norm, Team& team, int member) {
    const int64_t size = model_.hidden_size;
    if (post_norm == nullptr) {
      write_outputs(product, from, to.count, team, member,
                    Add{to.rows, size, model_.residual_multiplier});
      team.barrier();
      return;
    }
    project(product, from, to.count, team, member);
    const Share mine(to.count, member, team.size());
    for (int64_t t = mine.first; t < mine.last; t++) {
      float* row = projected_ + t * projected_stride_;
      norm_in_place(row, post_norm, size, model_.epsilon);
      for (int64_t i = 0; i < size; i++)
        to.rows[t * size + i] += row[i] * model_.residual_multiplier;
    }
    team.barrier();
  }

  void recur(const QuireLayer& layer, const int64_t* tokens, int64_t count, const Inputs& mixed,
             Team& team, int member) {
    float* const* const states = step_->states + layer.place;
    if (layer.recurrence != nullptr)
      return recurrences_.mix(*layer.recurrence, states, projected_, projected_stride_, tokens,
                              count, mixed, team, member);
    convolutions_.mix(*layer.convolution, *states, projected_, projected_stride_, tokens, count,
                      mixed, team, member);
  }

  // Query rows are in the order key head, token, query head; this is the first of a token.
  int64_t query_row(int64_t kv_head, int64_t token) const {
    return kv_head * step_->num_tokens + token;
  }

  void attend(const QuireLayer& layer, const AttentionPlan& plan, const Inputs& queries,
              const Inputs& attended, Team& team, int member) {
    heads_.store(layer, *step_, cache_, angles_, projected_, projected_stride_, queries, team,
                 member);
    SpanWorker<T> worker(cache_, step_->key_caches[layer.place],
                         step_->value_caches[layer.place], group_, model_.scaling, model_.softcap,
                         scratch_ + member * scratch_stride_);
    const auto attend_for = [&](const Unit& unit, const Unit* next) {
      const int64_t first = plan.rows[unit.row].offset + unit.first_token;
      const Partial sum =
          partial(unit.partial < 0 ? plan.num_partials + member : unit.partial, unit);
      worker.attend(unit, plan.rows.data(), queries.at(query_row(unit.kv_head, first)),
                    step_->num_tokens * queries.stride, layer.window, next, sum);
      if (unit.partial < 0) finish(plan, unit, layer.sinks, sum, attended);
    };
    const int64_t tokens = plan.num_outputs();
    const auto own = [&](int share) { return Share(tokens, share, team.size()); };
    if (threads_own_rows<T>(tokens, team.size()))
      take_own_units(plan, team, member, own, attend_for);
    else
      take_units(plan, team, member, attend_for);
    team.barrier();
    if (plan.split_units.empty()) return;
    const Share mine((int64_t)plan.split_units.size(), member, team.size());
    for (int64_t i = mine.first; i < mine.last; i++) {
      const Unit& unit = plan.split_units[i];
      const Partial sum = partial(unit.partial, unit);
      for (int64_t span = 1; span < unit.last_span; span++)
        merge(sum, partial(unit.partial + span, unit), unit.num_rows(group_), width_);
      finish(plan, unit, layer.sinks, sum, attended);
    }
    team.barrier();
  }

  Partial partial(int64_t index, const Unit& unit) const {
    return Partial(partials_ + index * partial_stride_, unit.num_rows(group_), width_);
  }

  void finish(const AttentionPlan& plan, const Unit& unit, const float* sinks, const Partial& sum,
              const Inputs& attended) {
    const int64_t dim = model_.head_dim;
    const int64_t first = plan.rows[unit.row].output + unit.first_token;
    const int64_t tokens = unit.num_tokens();
    for (int64_t r = 0; r < unit.num_rows(group_); r++) {
      float* row = sum.sums + r * width_;
      const int64_t token = r / group_ % tokens;
      const int64_t head = (unit.kv_head + r / group_ / tokens) * group_ + r % group_;
      float total = sum.total[r];
      if (sinks != nullptr) total += std::exp2(sinks[head] * LOG2_E - sum.highest[r]);
      const float factor = 1.0f / total;
      for (int64_t i = 0; i < width_; i += LANES) store(row + i, load<Vector>(row + i) * factor);
      heads_.gate(row, projected_, projected_stride_,
                  plan.rows[unit.row].offset + unit.first_token + token, head);
      narrow_row(attended.at(first + token, head * dim), row, dim);
    }
  }

  // The experts of a layer, its MLP, or both.
  void feed_forward(int64_t index, const ResidualStream& stream, Team& team, int member) {
    const QuireLayer& layer = model_.layers[index];
    const Product &gate_up = products_[4 * index + 2], &down = products_[4 * index + 3];
    const Inputs normed = inputs_of(gate_up, normed_, layer.experts != nullptr);
    norm(stream, layer.mlp_norm, normed, team, member);
    if (layer.experts != nullptr)
      mix_experts(*layer.experts, router(index), normed, stream, team, member);
    if (gate_up.linear.outputs > 0) activate(layer, gate_up, down, stream, team, member);
  }

  // Each strip of gates and the strip of ups after it give one strip of activations.
  void activate(const QuireLayer& layer, const Product& gate_up, const Product& down,
                const ResidualStream& stream, Team& team, int member) {
    const Inputs normed = inputs_of(gate_up, normed_), activated = inputs_of(down, activated_);
    const auto epilogue = [&](int64_t row, int64_t strip, const float* values, int64_t num_strips) {
      const RoundedRow<Row> to = activated.at(row, strip / 2 * LANES);
      for (int64_t s = 0; s < num_strips; s += 2, values += 2 * LANES)
        to.vector(s / 2 * LANES, gate_(load<Vector>(values), load<Vector>(values + LANES)));
    };
    multiply_share(gate_up, normed, stream.count, team, member, epilogue);
    team.barrier();
    add_to_residual(stream, down, activated, layer.mlp_post_norm, team, member);
  }

  // The router uses split precision: rounding must not change which experts a token has.
  void mix_experts(const QuireExperts& experts, const Product& router, const Inputs& normed,
                   const ResidualStream& stream, Team& team, int member) {
    project(router, normed, stream.count, team, member);
    experts_.mix(experts, normed, projected_, projected_stride_, stream,
                 first_strips<T>(*router.next, stream.count, member, team.size()),
                 sums_ + member * SUMS_SIZE, team, member);
  }

  // Computes the logits, or only the argmax of each row.
  void compute_logits(Team& team, int member) {
    const Product& head = products_[head_];
    const Inputs normed = inputs_of(head, normed_);
    const LogitScale scale{1.0f / model_.logits_divisor, model_.logits_softcap};
    norm(logit_stream_, model_.final_norm, normed, team, member);
    if (step_->argmax == nullptr) {
      write_outputs(head, normed, logit_stream_.count, team, member,
                    AssignLogits{step_->logits, model_.head.outputs, scale});
      return;
    }
    const int64_t stride = logit_stream_.count * RowArgmax::ROW_SIZE;
    const RowArgmax mine(argmax_ + member * stride, model_.vocab_size, scale);
    mine.clear(logit_stream_.count);
    write_outputs(head, normed, logit_stream_.count, team, member, mine);
    team.barrier();
    const Share rows(logit_stream_.count, member, team.size());
    for (int64_t r = rows.first; r < rows.last; r++)
      step_->argmax[r] = RowArgmax::merge(argmax_, stride, team.size(), r);
  }

  const QuireModel model_;
  const int64_t head_, group_, width_;
  const Gate gate_;
  std::vector<Product> products_;  // Four of each layer, the head, then the routers.
  CacheShape cache_;
  const QuireStep* step_ = nullptr;
  AttentionPlan plan_, logit_plan_;
  RotaryAngles angles_;
  Heads<T> heads_;
  GatedConvolutions convolutions_;
  RecurrentMixers recurrences_;
  Adapters<T> adapters_;
  Experts<T> experts_;
  DigitWriter<Row> digits_;
  ResidualStream stream_, logit_stream_;
  Workspace workspace_;
  int64_t projected_stride_, scratch_stride_, partial_stride_;
  float *projected_, *sums_, *scratch_, *partials_, *argmax_;
  Inputs normed_, mixed_, activated_, queries_;
};

}  // namespace quire
