"""The soak's gate: a short one passes it, and each thing it guards against fails it."""

import subprocess
import sys

import pytest

from benchmarks.bench_soak import (
    MAX_GROWTH_BYTES,
    Soak,
    SoakFailed,
    growth_of_last_half,
    make_request,
    soak,
)

#: A soak with a scheduler that forgets nobody. In a process of its own: the one of the tests has
#: memory to spare, which a leak fills up first.
LEAKING = """
from benchmarks.bench_soak import soak
from engine.scheduling.scheduler import Scheduler

kept, finish = [], Scheduler.finish

def finish_and_keep(self, request, *arguments, **names):
    finish(self, request, *arguments, **names)
    kept.append((request, bytes(4096)))

Scheduler.finish = finish_and_keep
soak(1000, seed=3)
"""


def test_a_short_soak_sees_every_kind_of_trouble_and_passes():
    record = soak(800, seed=3)
    assert record["requests"] == 800
    assert len(record["resident_bytes_at_tenths"]) == 10


def test_one_wrong_token_fails_the_soak():
    one = Soak(60, seed=3)
    index = next(
        index
        for index in range(60)
        if (request := make_request(index, 3, 0.0)).abort_at_step is None and not request.published
    )
    one.runner.script.tokens = {f"r{index}": {0: 511 - make_request(index, 3, 0.0).expected[0]}}
    with pytest.raises(SoakFailed, match=f"r{index}: wrong tokens"):
        list(one.run())


def test_one_dictionary_entry_per_request_is_more_growth_than_is_allowed():
    sizes = [50 * 2**20 + tenth * 10_000 * 100 for tenth in range(10)]
    with pytest.raises(SoakFailed, match="grew by 5000000 bytes"):
        growth_of_last_half(sizes, 100_000)


def test_a_scheduler_that_keeps_what_has_ended_fails_the_soak():
    ended = subprocess.run([sys.executable, "-c", LEAKING], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "SoakFailed: grew by" in ended.stderr


def test_growth_in_the_first_half_is_warming_up():
    sizes = [tenth * MAX_GROWTH_BYTES for tenth in (1, 9, 12, 13, 14, 14, 14, 14, 14, 14)]
    assert growth_of_last_half(sizes, 1000) == 0


def test_the_requests_of_a_soak_depend_on_its_seed_and_their_number_alone():
    first, again, other = (make_request(7, seed, 0.0) for seed in (1, 1, 2))
    assert first.expected == again.expected
    assert first.expected != other.expected
