// Cuts the attention of a step into units of work. Knows lengths, and no keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "team.h"

namespace quire {

constexpr int64_t SPAN = 256;
// Query rows (tokens times heads of a group) of one unit, unless a single token has more.
constexpr int64_t UNIT_ROWS = 96;
// Key heads that lie beside each other in a block are read at once, which is faster than one after
// the other: so many at most, so many bytes of a span (as much again is being worked on, and both
// have to stay in the second-level cache), and not when that leaves a thread fewer units than this:
// some would wait long for the last one.
constexpr int64_t MAX_TOGETHER = 16;
constexpr int64_t TOGETHER_BYTES = 1 << 18;
constexpr int64_t UNITS_PER_THREAD = 4;

struct AttentionRow {
  int64_t num_tokens;    // Of this step.
  int64_t context;       // Length including them.
  int64_t offset;        // Of its first token in the step.
  int64_t output;        // Of its first token among those that attend.
  const int64_t* table;  // Block ids.

  int64_t start() const { return context - num_tokens; }
  int64_t num_spans() const { return (context + SPAN - 1) / SPAN; }
};

struct Unit {
  int64_t row, kv_head, num_heads;  // Key heads from kv_head on.
  int64_t first_token, last_token;  // Of the row's tokens of this step.
  int64_t first_span, last_span;
  int64_t piece;  // Where a part of the spans leaves its result; -1: the unit is complete.

  int64_t num_tokens() const { return last_token - first_token; }
  // One head's tokens with their `group` query heads, then the next head's.
  int64_t num_rows(int64_t group) const { return num_heads * num_tokens() * group; }
};

// Units in the order in which they are taken. Where they are fewer than two a thread, those of
// several spans are cut into pieces of one span, and `split_units` says what has to be folded.
class AttentionPlan {
 public:
  std::vector<AttentionRow> rows;
  std::vector<Unit> units, split_units;
  int64_t num_pieces = 0;

  void clear() {
    rows.clear();
    units.clear();
    split_units.clear();
    num_pieces = 0;
  }

  // Tokens that attend.
  int64_t num_outputs() const {
    return rows.empty() ? 0 : rows.back().output + rows.back().num_tokens;
  }

  // The units, by number, that begin with some of these tokens.
  Share units_of(const Share& tokens) const {
    const auto first_from = [&](int64_t token) {
      const auto before = [&](const Unit& unit) {
        return rows[unit.row].output + unit.first_token < token;
      };
      return std::partition_point(units.begin(), units.end(), before) - units.begin();
    };
    return {first_from(tokens.first), first_from(tokens.last)};
  }

  // Of the rows of `all`, the tokens number indices[0 .. count-1] of the step and nothing else: they
  // attend alone, in this order. Neighbours of one row stay together.
  void select(const AttentionPlan& all, const int64_t* indices, int64_t count) {
    clear();
    for (int64_t i = 0; i < count; i++) {
      const auto behind = std::upper_bound(
          all.rows.begin(), all.rows.end(), indices[i],
          [](int64_t index, const AttentionRow& row) { return index < row.offset; });
      const AttentionRow& row = *(behind - 1);
      const int64_t context = row.start() + indices[i] - row.offset + 1;
      if (i > 0 && indices[i] == indices[i - 1] + 1 && row.table == rows.back().table) {
        rows.back().num_tokens++;
        rows.back().context = context;
        continue;
      }
      rows.push_back({1, context, indices[i], i, row.table});
    }
  }

  // After all rows have come: the units of `group` query heads for each of `kv_heads` key heads. Of
  // a token, the key and value of one head take `key_bytes`.
  void cut(int64_t group, int64_t kv_heads, int64_t key_bytes, int64_t num_threads) {
    const int64_t tokens_per_unit = std::max<int64_t>(1, UNIT_ROWS / group);
    int64_t together = std::clamp<int64_t>(TOGETHER_BYTES / (SPAN * key_bytes), 1,
                                           std::min(MAX_TOGETHER, kv_heads));
    const auto heads_of = [&](const AttentionRow& row) {
      const int64_t tokens = std::min(row.num_tokens, tokens_per_unit);
      return std::clamp<int64_t>(UNIT_ROWS / (group * tokens), 1, together);
    };
    const auto count = [&] {
      int64_t units = 0;
      for (const AttentionRow& row : rows)
        units += (row.num_tokens + tokens_per_unit - 1) / tokens_per_unit *
                 ((kv_heads + heads_of(row) - 1) / heads_of(row));
      return units;
    };
    if (count() < UNITS_PER_THREAD * num_threads) together = 1;
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
    split_units.back().piece = num_pieces;
    for (int64_t span = 0; span < whole.last_span; span++) {
      Unit unit = whole;
      unit.first_span = span;
      unit.last_span = span + 1;
      unit.piece = num_pieces++;
      units.push_back(unit);
    }
  }
};

// One thread's part of the units, in the order of the plan: body(unit, its next one if known).
template <class Body>
void take_units(const AttentionPlan& plan, Team& team, int member, const Body& body) {
  const int64_t count = (int64_t)plan.units.size();
  for (int64_t i = member, next; i < count; i = next) {
    next = team.take();
    body(plan.units[i], next < count ? &plan.units[next] : nullptr);
  }
}

// The same where everyone has tokens of its own: own(share).
template <class Own, class Body>
void take_own_units(const AttentionPlan& plan, Team& team, int member, const Own& own,
                    const Body& body) {
  const auto units_of = [&](int share) { return plan.units_of(own(share)); };
  take_shares(
      team, member, [&](int share) { return units_of(share).last - units_of(share).first; },
      [&](int share, int64_t i, int64_t next) {
        const Unit* const units = plan.units.data() + units_of(share).first;
        body(units[i], next != Team::NONE ? &units[next] : nullptr);
      });
}

}  // namespace quire
