"""The threads of a step: of shares, each piece is taken once, whoever is held up."""

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
// Twice, with a barrier between: members take their own shares, then others'. But those below
// `idle` begin when nobody else finds a piece any more.
extern "C" void take_all(int size, int idle, int64_t count, int64_t* times, int64_t* by_owner) {
  std::optional<Team> team;
#pragma omp parallel num_threads(size)
  {
#pragma omp single
    team.emplace(omp_get_num_threads());
    const int member = omp_get_thread_num();
    for (int round = 0; round < 2; round++) {
      const auto take = [&] {
        for (int turn = 0; turn < size; turn++) {
          const int share = (member + turn) % size;
          for (int64_t i; (i = team->take_of(share, member, count)) != Team::NONE;) {
#pragma omp atomic
            times[(round * size + share) * count + i]++;
            if (share == member)
#pragma omp atomic
              by_owner[(round * size + share) * count + i]++;
          }
        }
      };
      if (member >= idle) take();
      if (idle > 0) {
#pragma omp barrier
      }
      take();
      team->barrier();
    }
  }
}
// Numbers that calls of (share, member) in this order are given.
extern "C" void take_in_order(int64_t calls, const int* shares, const int* members, int64_t count,
                              int64_t* taken) {
  Team team(2);
  for (int64_t i = 0; i < calls; i++) taken[i] = team.take_of(shares[i], members[i], count);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_shim(SHIM, best_variant(), tmp_path_factory.mktemp("team"))


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 9, 1000])
def test_every_piece_of_every_share_is_taken_once_between_two_barriers(library, size, count):
    times, by_owner = np.zeros((2, 2, size, count), dtype=np.int64)
    library.take_all(size, 0, ctypes.c_int64(count), pointer(times), pointer(by_owner))
    assert (times == 1).all()


def test_the_share_of_a_member_that_is_held_up_is_taken_by_others(library):
    times, by_owner = np.zeros((2, 2, 2, 50), dtype=np.int64)
    library.take_all(2, 1, ctypes.c_int64(50), pointer(times), pointer(by_owner))
    assert (times == 1).all()
    assert (by_owner[:, 0] == 0).all() and (by_owner[:, 1] == 1).all()


def test_members_take_their_own_from_the_first_on_and_others_from_the_last_back(library):
    shares = np.array([0, 0, 0, 1, 0, 0, 0, 0], dtype=np.int32)
    members = np.array([0, 1, 0, 1, 1, 0, 0, 1], dtype=np.int32)
    taken = np.zeros(len(shares), dtype=np.int64)
    library.take_in_order(
        ctypes.c_int64(len(shares)),
        pointer(shares),
        pointer(members),
        ctypes.c_int64(5),
        pointer(taken),
    )
    assert taken.tolist() == [0, 4, 1, 0, 3, 2, -1, -1]
