"""When the command of chaos fails, and what it prints then. Nothing is played here."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from engine.cache.state_tags import StateTags
from tests.chaos import __main__ as command
from tests.chaos.company import CONTROL, INTACT, SCHEDULE, Play, Report
from tests.chaos.hybrid import HYBRID
from tests.chaos.orders import ORDER_PLANTS
from tests.chaos.plants import PLANTS
from tests.chaos.real import HYBRID_FLAGS, VLLM, draw_hybrid_flags, draw_vllm_workers
from tests.chaos.sinks.controls import SINKS_LIVE
from tests.chaos.sinks.laws import SINK_PLANTS
from tests.chaos.stage import Cast
from tests.chaos.worker import STALE_STATE, _stale


class Told:
    """A company that has played already."""

    def __init__(self, *reports: Report) -> None:
        self._reports = reports

    def __call__(self, jobs: int) -> "Told":
        return self

    def __enter__(self) -> "Told":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def perform(self, plays: Sequence[Play], *, seconds: float) -> Iterator[Report]:
        return iter(self._reports)


def report(kind: str, *violations: str, breakdown: str = "") -> Report:
    name = "5" if kind == SCHEDULE else "no fence"
    return Report(Play(kind, name), 1.0, violations, breakdown=breakdown)


SOUND = (report(SCHEDULE), report(CONTROL, "I4 is broken"), report(INTACT))


@pytest.mark.parametrize(
    ("last", "code", "told"),
    [
        (report(SCHEDULE), 0, "violations                       0"),
        (report(SCHEDULE, "I2: a gap"), 1, "VIOLATION in schedule 5: I2: a gap"),
        (report(SCHEDULE, "I2: a gap"), 1, "again: python -m tests.chaos --seed 5"),
        (report(SCHEDULE, breakdown="stuck"), 1, "VIOLATION in schedule 5: stuck"),
        (report(INTACT, "I4 is broken"), 1, "again: python -m tests.chaos --control 'no fence'"),
        (report(CONTROL), 1, "the audit did not name the broken law"),
        (report(CONTROL, "I4", breakdown="stuck"), 1, "VIOLATION in control no fence: stuck"),
    ],
)
def test_the_command_fails_for_all_that_went_wrong_and_says_what_plays_it_again(
    monkeypatch, capsys, last, code, told
):
    monkeypatch.setattr("sys.argv", ["tests.chaos", "--first", "5", "--schedules", "2"])
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command, "Company", Told(*SOUND, last))
    assert command.main() == code
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("violation", "figure"),
    [
        ("a: tokens 3 to 5 are missing", "tokens lost"),
        ("a: completed with 4 of 9 tokens", "tokens lost"),
        ("a: tokens 3 to 5 were written twice", "tokens repeated"),
        ("a: token 3 is not that of the uninterrupted run", "tokens different"),
        ("line row-3 has 0 results", "lines lost"),
        ("line row-3 has 2 results", "lines repeated"),
        ("a: its end (batch.failed) was posted by no webhook", "ends lost"),
        ("a: its end (batch.failed) was posted under 2 ids", "ends under two ids"),
    ],
)
def test_what_has_happened_to_tokens_is_counted(monkeypatch, capsys, violation, figure):
    monkeypatch.setattr("sys.argv", ["tests.chaos", "--first", "5", "--schedules", "2"])
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command, "Company", Told(*SOUND, report(SCHEDULE, violation)))
    assert command.main() == 1
    told = capsys.readouterr().out.splitlines()
    counts = {line[:26].strip(): line[26:].strip() for line in told}
    names = {name.replace("_", " ") for name in (*command.TOKEN_FIGURES, *command.SINK_FIGURES)}
    assert [name for name in counts if name in names and counts[name] == "1"] == [figure]


def test_the_words_for_lost_and_repeated_tokens_are_those_of_the_audit():
    plants = (*PLANTS.values(), *ORDER_PLANTS.values(), *SINK_PLANTS.values())
    said = [plant.words for plant in plants if plant.is_found]
    for words in (*command.TOKEN_FIGURES.values(), *command.SINK_FIGURES.values()):
        assert any(word in sentence for word in words for sentence in said), words


def test_plays_with_vllm_say_so_in_the_command_that_plays_them_again():
    assert Play(SCHEDULE, "5", VLLM).replay == "python -m tests.chaos --seed 5 --engine vllm"
    stocks = [Play(SCHEDULE, name).stock for name in ("5", "9", "3", "8")]
    assert stocks == ["fake", "real", "sinks", "sinks"]
    assert Play(SCHEDULE, "3", VLLM).stock == VLLM
    assert {Play(CONTROL, name).stock for name in SINKS_LIVE} == {"sinks"}
    assert Play(CONTROL, "no fence", VLLM).stock == VLLM


def test_plays_with_the_hybrid_model_come_besides_and_bring_their_control(monkeypatch):
    argv = ["tests.chaos", "--first", "8", "--schedules", "1", "--hybrid", "2"]
    told = Told()
    played: list[Play] = []
    monkeypatch.setattr(told, "perform", lambda plays, *, seconds: iter(played.extend(plays) or ()))
    monkeypatch.setattr("sys.argv", argv)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command, "Company", told)
    command.main()
    hybrid = [play for play in played if play.engine == HYBRID]
    assert {play.stock for play in hybrid} == {HYBRID}
    assert [(play.kind, play.name) for play in hybrid] == [
        (CONTROL, STALE_STATE),
        (INTACT, STALE_STATE),
        (SCHEDULE, "9"),
        (SCHEDULE, "10"),
    ]
    assert hybrid[-1].replay == "python -m tests.chaos --seed 10 --engine hybrid"
    # The seed of a schedule with the embedded model, and yet it is not counted as one.
    assert not hybrid[2].is_real


def test_schedules_with_the_hybrid_model_preempt_by_both_modes():
    modes = {draw_hybrid_flags(seed)[len(HYBRID_FLAGS) + 1] for seed in range(9)}
    assert modes == {"swap", "recompute"}
    assert draw_hybrid_flags(7) == draw_hybrid_flags(7)


def test_a_state_is_stale_from_the_second_chunk_on_and_in_no_decode():
    tags = StateTags(1)
    turn = _stale(StateTags.turn)
    slots, spans = np.array([0]), [(0, 4), (4, 5), (5, 9), (9, 10)]
    stale = []
    for start, end in spans:
        turned = turn(tags, slots, np.array([start]), np.array([end]))
        stale.append(bool(turned.reads[0] == turned.writes[0]))
        tags.commit(turned)
    assert stale == [False, False, True, False]


def test_a_fleet_begins_with_vllm_and_every_third_has_nothing_else():
    fleets = [draw_vllm_workers(seed) for seed in range(30)]
    assert all(fleet[0] for fleet in fleets)
    assert [all(fleet) for fleet in fleets] == [seed % 3 == 0 for seed in range(30)]
    assert draw_vllm_workers(7) == draw_vllm_workers(7)
    cast = Cast((), 1.0, 1, None, vllm_flags=("--engine", VLLM), vllm_workers=(True, False))
    assert [cast.has_vllm(number) for number in range(4)] == [True, False, True, False]
    assert not Cast((), 1.0, 1, None).has_vllm(0)


def test_a_plant_that_the_audit_does_not_find_fails_the_command(monkeypatch, capsys):
    class Unfound:
        is_found = False

    monkeypatch.setattr("sys.argv", ["tests.chaos", "--first", "5", "--schedules", "2"])
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command, "Company", Told(*SOUND))
    monkeypatch.setattr(command, "PLANTS", {"unfound": Unfound()})
    assert command.main() == 1
