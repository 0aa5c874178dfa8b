"""The thread team of a step: each work item runs once, also if some threads are late."""

import ctypes

import numpy as np
import pytest

from engine.model.kernels.build import best_variant
from tests.engine.model.shims import compile_shim

SHIM = """
#include <omp.h>

#include <optional>

#include "team.h"
using namespace quire;
// Twice, with a barrier between: members take the items of their own shares, then of others'. But
// members below `idle` begin only when the others find no item any more. Returns how often a member
// got an item of a share that is not behind the last item it had of that share.
extern "C" int64_t take_all(int size, int idle, int64_t count, int64_t* times, int64_t* by_owner) {
  std::optional<Team> team;
  int64_t backwards = 0;
#pragma omp parallel num_threads(size)
  {
#pragma omp single
    team.emplace(omp_get_num_threads());
    const int member = omp_get_thread_num();
    for (int round = 0; round < 2; round++) {
      const auto take = [&] {
        std::vector<int64_t> last(size, -1);
        run_with_stealing(
            *team, member, [&](int) { return count; },
            [&](int share, int64_t i, int64_t) {
              int64_t* const time = times + (round * size + share) * count + i;
#pragma omp atomic
              (*time)++;
              if (share == member) by_owner[(round * size + share) * count + i]++;
#pragma omp atomic
              backwards += i <= last[share];
              last[share] = i;
            });
      };
      if (member >= idle) take();
      if (idle > 0) {
#pragma omp barrier
      }
      take();
      team->barrier();
    }
  }
  return backwards;
}
"""


@pytest.fixture(scope="module")
def library():
    return compile_shim(SHIM, best_variant())


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def take_all(library, *, size, idle, count):
    """How often each item was taken, and how often by its owner: both [rounds, shares, items]."""
    times, by_owner = np.zeros((2, 2, size, count), dtype=np.int64)
    library.take_all.restype = ctypes.c_int64
    backwards = library.take_all(
        size, idle, ctypes.c_int64(count), pointer(times), pointer(by_owner)
    )
    assert backwards == 0, "RowArgmax would keep another than the first of equal values"
    return times, by_owner


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 9, 1000])
def test_every_item_is_taken_once_and_in_ascending_order_between_two_barriers(library, size, count):
    times, _ = take_all(library, size=size, idle=0, count=count)
    assert (times == 1).all()


def test_the_share_of_a_late_member_is_stolen_by_others(library):
    times, by_owner = take_all(library, size=2, idle=1, count=50)
    assert (times == 1).all()
    assert (by_owner[:, 0] == 0).all() and (by_owner[:, 1] == 1).all()
