"""A few schedules of chaos, small enough for every run of the tests."""

import pytest

from tests.chaos.audit import plants
from tests.chaos.controls import LIVE, planted, run_control
from tests.chaos.schedules import draw_plan, play

#: A kill with lost replies, a pause with a drain, and a crash of Redis that loses data.
SMOKE_SEEDS = (2, 4, 5)


@pytest.mark.real_redis
@pytest.mark.processes
@pytest.mark.parametrize("seed", SMOKE_SEEDS)
def test_whatever_goes_wrong_every_log_is_that_of_the_uninterrupted_run(seed):
    outcome = play(draw_plan(seed))
    assert outcome.violations == []
    assert outcome.figures["tokens"] > 0


@pytest.mark.real_redis
@pytest.mark.processes
@pytest.mark.parametrize("name", LIVE)
def test_a_worker_that_breaks_a_law_is_caught_by_that_law(name):
    assert run_control(name) != []


def test_a_seed_always_draws_the_same_plan():
    assert draw_plan(7) == draw_plan(7)


def test_the_audit_accepts_a_sound_log():
    assert planted("nothing planted") == []


@pytest.mark.parametrize("name", plants())
def test_the_audit_names_every_planted_damage(name):
    assert planted(name) != []
