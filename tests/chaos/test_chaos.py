"""A few schedules of chaos, small enough for every run of the tests, and all controls."""

from collections.abc import Mapping

import pytest

from quire.local_redis import URL_VARIABLE, LocalRedis
from tests.chaos.append_only import cut, read_command
from tests.chaos.audit import log_violations
from tests.chaos.company import CONTROL, INTACT, SCHEDULE, Company, Play, Report
from tests.chaos.controls import LIVE
from tests.chaos.plants import MAX_ATTEMPTS, PLANTS, sound_log
from tests.chaos.schedules import FAULTS, draw_plan

#: Between them every fault there is.
SMOKE_SEEDS = (90, 661, 690)
#: Plays at once.
JOBS = 4
#: Whichever test is the first waits for all plays.
FIRST_TEST_SECONDS = 400


@pytest.fixture(scope="module")
def reports() -> Mapping[Play, Report]:
    """All plays of this file, played at once: they mostly wait."""
    with pytest.MonkeyPatch.context() as patch:
        # A server that was only named is not ours to kill.
        patch.delenv(URL_VARIABLE, raising=False)
        with LocalRedis.start() as server:
            if not server.is_real:
                pytest.skip("chaos kills its Redis: there is no redis-server to start")
    plays = [Play(SCHEDULE, str(seed)) for seed in SMOKE_SEEDS]
    plays += [Play(kind, name) for name in LIVE for kind in (CONTROL, INTACT)]
    with Company(JOBS) as company:
        return {report.play: report for report in company.perform(plays)}


@pytest.mark.real_redis
@pytest.mark.processes
@pytest.mark.timeout(FIRST_TEST_SECONDS)
@pytest.mark.parametrize("seed", SMOKE_SEEDS)
def test_whatever_goes_wrong_every_log_is_that_of_the_uninterrupted_run(reports, seed):
    report = reports[Play(SCHEDULE, str(seed))]
    assert report.sentences == ()
    assert report.figures["tokens"] > 0


@pytest.mark.real_redis
@pytest.mark.processes
@pytest.mark.timeout(FIRST_TEST_SECONDS)
@pytest.mark.parametrize("name", LIVE)
def test_a_system_that_breaks_a_law_is_caught_by_that_law(reports, name):
    assert reports[Play(CONTROL, name)].sentences == ()


@pytest.mark.real_redis
@pytest.mark.processes
@pytest.mark.timeout(FIRST_TEST_SECONDS)
@pytest.mark.parametrize("name", LIVE)
def test_the_scene_of_a_broken_law_is_silent_when_the_law_is_kept(reports, name):
    assert reports[Play(INTACT, name)].sentences == ()


def test_a_seed_always_draws_the_same_plan():
    assert draw_plan(7) == draw_plan(7)


def test_the_small_schedules_hold_every_fault():
    drawn = {fault.kind for seed in SMOKE_SEEDS for fault in draw_plan(seed).faults}
    assert drawn == set(FAULTS)


def test_the_audit_accepts_a_sound_log():
    expected, log = sound_log()
    assert list(log_violations(expected, log, max_attempts=MAX_ATTEMPTS)) == []


@pytest.mark.parametrize("name", PLANTS)
def test_the_audit_names_every_planted_damage(name):
    assert PLANTS[name].is_found


def test_a_log_is_cut_at_the_end_of_a_whole_transaction(tmp_path):
    one, two = _command(b"SET", b"a", b"1"), _command(b"SET", b"b", b"2")
    transaction = _command(b"MULTI") + one + two + _command(b"EXEC")
    whole = one + transaction
    for size in range(len(whole) + 1):
        log = tmp_path / "log"
        log.write_bytes(whole)
        cut(log, size)
        assert log.read_bytes() in (b"", one, whole)
        assert len(log.read_bytes()) <= size


def test_a_command_that_is_cut_off_is_not_read():
    command = _command(b"SET", b"a", b"1")
    assert read_command(command, 0) == (b"SET", len(command))
    assert all(read_command(command[:size], 0) is None for size in range(len(command)))


def _command(*words: bytes) -> bytes:
    parts = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
    return b"*%d\r\n%s" % (len(words), parts)
