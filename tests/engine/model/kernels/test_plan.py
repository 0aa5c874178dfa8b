"""The units of attention: if threads have their own tokens, each unit belongs to one thread."""

import ctypes
import random

import numpy as np
import pytest

from engine.model.kernels.build import best_variant
from tests.engine.model.shims import compile_shim

SHIM = """
#include <omp.h>

#include <optional>

#include "plan.h"
using namespace quire;
// Plans `num_rows` rows with three query heads per key head for `size` threads. `heads` counts, for
// each token, the pairs of key head and span that are attended to. Returns how many units are in
// another thread's share than their first token.
extern "C" int64_t attend(int size, int64_t num_rows, const int64_t* lens, const int64_t* contexts,
                          int64_t kv_heads, int64_t* heads) {
  AttentionPlan plan;
  int64_t tokens = 0, foreign = 0;
  for (int64_t r = 0; r < num_rows; tokens += lens[r++])
    plan.rows.push_back({lens[r], contexts[r], tokens, tokens, nullptr});
  plan.cut(3, kv_heads, 256, size);
  const auto own = [&](int share) { return Share(plan.num_outputs(), share, size); };
  std::optional<Team> team;
#pragma omp parallel num_threads(size)
  {
#pragma omp single
    team.emplace(omp_get_num_threads());
    take_own_units(plan, *team, omp_get_thread_num(), own, [&](const Unit& unit, const Unit*) {
      const int64_t offset = plan.rows[unit.row].output;
      for (int64_t t = unit.first_token; t < unit.last_token; t++)
#pragma omp atomic
        heads[offset + t] += unit.num_heads * (unit.last_span - unit.first_span);
    });
  }
  for (int share = 0; share < size; share++) {
    const Share tokens_of = own(share), units = plan.units_of(tokens_of);
    for (int64_t i = units.first; i < units.last; i++) {
      const int64_t token = plan.rows[plan.units[i].row].output + plan.units[i].first_token;
      foreign += token < tokens_of.first || token >= tokens_of.last;
    }
  }
  return foreign;
}
"""


@pytest.fixture(scope="module")
def library():
    return compile_shim(SHIM, best_variant())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_each_token_is_attended_for_once_with_all_its_heads(library, size, seed):
    drawn = random.Random(seed)
    lens = np.array([drawn.choice([1, 1, 1, 7, 32, 150]) for _ in range(drawn.randint(1, 40))])
    contexts = lens + [drawn.randrange(600) for _ in lens]
    kv_heads = drawn.choice([1, 3, 8])
    heads = np.zeros(lens.sum(), dtype=np.int64)
    library.attend.restype = ctypes.c_int64
    foreign = library.attend(
        ctypes.c_int(size),
        ctypes.c_int64(len(lens)),
        *(a.astype(np.int64).ctypes.data_as(ctypes.c_void_p) for a in (lens, contexts)),
        ctypes.c_int64(kv_heads),
        heads.ctypes.data_as(ctypes.c_void_p),
    )
    spans = -(-contexts // 256)
    assert (heads == np.repeat(kv_heads * spans, lens)).all()
    assert foreign == 0
