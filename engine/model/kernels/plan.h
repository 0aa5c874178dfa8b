// Divides the attention of a step into units of work. Knows the lengths of requests, but no keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "team.h"

namespace quire {

// Keys of a span, the block of the context that is processed at once.
constexpr int64_t SPAN = 256;
// Most query rows (tokens times query heads of a group) of one unit, unless one token has more.
constexpr int64_t UNIT_ROWS = 96;
// A unit may have several key heads that are adjacent in a block: reading them together is faster
// than one after the other. A unit has at most MAX_UNIT_HEADS key heads and UNIT_BYTES of a span's
// keys and values (the prefetched span takes as much again, and both must stay in L2). It has only
// one key head where there would otherwise be fewer than UNITS_PER_THREAD units per thread: with
// few large units, threads wait long for the last one.
constexpr int64_t MAX_UNIT_HEADS = 16;
constexpr int64_t UNIT_BYTES = 1 << 18;
constexpr int64_t UNITS_PER_THREAD = 4;

struct AttentionRow {
  int64_t num_tokens;    // Tokens of the row that are computed in this step.
  int64_t context;       // Number of keys, those of this step's tokens included.
  int64_t offset;        // Index of its first token among the tokens of the step.
  int64_t output;        // Index of its first token among the tokens that attend.
  const int64_t* table;  // Block ids.

  int64_t start() const { return context - num_tokens; }
  int64_t num_spans() const { return (context + SPAN - 1) / SPAN; }
};

struct Unit {
  int64_t row, kv_head, num_heads;  // Key heads kv_head .. kv_head + num_heads - 1.
  int64_t first_token, last_token;  // Range of the row's tokens of this step.
  int64_t first_span, last_span;
  int64_t partial;  // Index of its partial result; -1 for a unit with all spans of the row.

  int64_t num_tokens() const { return last_token - first_token; }
  // Query rows, in the order key head, token, query head of the key head's `group`.
  int64_t num_rows(int64_t group) const { return num_heads * num_tokens() * group; }
};

// The units, in the order in which threads take them. If there are fewer than two per thread, each
// unit of several spans is split into units of one span (split-K). `split_units` then lists the
// original units, whose partial results must be merged.
class AttentionPlan {
 public:
  std::vector<AttentionRow> rows;
  std::vector<Unit> units, split_units;
  int64_t num_partials = 0;

  void clear() {
    rows.clear();
    units.clear();
    split_units.clear();
    num_partials = 0;
  }

  // Number of tokens that attend.
  int64_t num_outputs() const {
    return rows.empty() ? 0 : rows.back().output + rows.back().num_tokens;
  }

  // The range of units whose first token is one of `tokens`.
  Share units_of(const Share& tokens) const {
    const auto first_from = [&](int64_t token) {
      const auto before = [&](const Unit& unit) {
        return rows[unit.row].output + unit.first_token < token;
      };
      return std::partition_point(units.begin(), units.end(), before) - units.begin();
    };
    return {first_from(tokens.first), first_from(tokens.last)};
  }

  // Makes this the plan for a part of the tokens of `all`: only the tokens with the step's indices
  // indices[0 .. count-1] attend, in this order. Consecutive tokens of one row stay one row.
  void select(const AttentionPlan& all, const int64_t* indices, int64_t count) {
    clear();
    for (int64_t i = 0; i < count; i++) {
      const auto after = std::upper_bound(
          all.rows.begin(), all.rows.end(), indices[i],
          [](int64_t index, const AttentionRow& row) { return index < row.offset; });
      const AttentionRow& row = *(after - 1);
      const int64_t context = row.start() + indices[i] - row.offset + 1;
      if (i > 0 && indices[i] == indices[i - 1] + 1 && row.table == rows.back().table) {
        rows.back().num_tokens++;
        rows.back().context = context;
        continue;
      }
      rows.push_back({1, context, indices[i], i, row.table});
    }
  }

  // Divides the rows into units; call it when all rows are there. Each of `kv_heads` key heads has
  // `group` query heads; the key and the value of one token and one key head take `key_bytes`.
  void cut(int64_t group, int64_t kv_heads, int64_t key_bytes, int64_t num_threads) {
    const int64_t tokens_per_unit = std::max<int64_t>(1, UNIT_ROWS / group);
    int64_t max_heads =
        std::clamp<int64_t>(UNIT_BYTES / (SPAN * key_bytes), 1, std::min(MAX_UNIT_HEADS, kv_heads));
    const auto heads_of = [&](const AttentionRow& row) {
      const int64_t tokens = std::min(row.num_tokens, tokens_per_unit);
      return std::clamp<int64_t>(UNIT_ROWS / (group * tokens), 1, max_heads);
    };
    const auto count = [&] {
      int64_t units = 0;
      for (const AttentionRow& row : rows)
        units += (row.num_tokens + tokens_per_unit - 1) / tokens_per_unit *
                 ((kv_heads + heads_of(row) - 1) / heads_of(row));
      return units;
    };
    if (count() < UNITS_PER_THREAD * num_threads) max_heads = 1;
    const bool split = count() < 2 * num_threads;
    for (int64_t r = 0; r < (int64_t)rows.size(); r++)
      for (int64_t first = 0; first < rows[r].num_tokens; first += tokens_per_unit)
        for (int64_t head = 0, heads = heads_of(rows[r]); head < kv_heads; head += heads) {
          const int64_t last = std::min(first + tokens_per_unit, rows[r].num_tokens);
          add({r, head, std::min(heads, kv_heads - head), first, last, 0, rows[r].num_spans(), -1},
              split);
        }
  }

 private:
  void add(const Unit& whole, bool split) {
    if (!split || whole.last_span < 2) {
      units.push_back(whole);
      return;
    }
    split_units.push_back(whole);
    split_units.back().partial = num_partials;
    for (int64_t span = 0; span < whole.last_span; span++) {
      Unit unit = whole;
      unit.first_span = span;
      unit.last_span = span + 1;
      unit.partial = num_partials++;
      units.push_back(unit);
    }
  }
};

// Runs one thread's part of the units, in the order of the plan: body(unit, its next unit or null).
template <class Body>
void take_units(const AttentionPlan& plan, Team& team, int member, const Body& body) {
  const int64_t count = (int64_t)plan.units.size();
  for (int64_t i = member, next; i < count; i = next) {
    next = team.take();
    body(plan.units[i], next < count ? &plan.units[next] : nullptr);
  }
}

// The same where each thread has its own tokens, own(thread); other threads may steal its units.
template <class Own, class Body>
void take_own_units(const AttentionPlan& plan, Team& team, int member, const Own& own,
                    const Body& body) {
  const auto units_of = [&](int share) { return plan.units_of(own(share)); };
  run_with_stealing(
      team, member, [&](int share) { return units_of(share).last - units_of(share).first; },
      [&](int share, int64_t i, int64_t next) {
        const Unit* const units = plan.units.data() + units_of(share).first;
        body(units[i], next != Team::NONE ? &units[next] : nullptr);
      });
}

}  // namespace quire
