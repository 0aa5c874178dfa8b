"""When the command of chaos fails, and what it prints then. Nothing is played here."""

from collections.abc import Iterator, Sequence

import pytest

from tests.chaos import __main__ as command
from tests.chaos.company import CONTROL, INTACT, SCHEDULE, Play, Report


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


def test_a_plant_that_the_audit_does_not_find_fails_the_command(monkeypatch, capsys):
    class Unfound:
        is_found = False

    monkeypatch.setattr("sys.argv", ["tests.chaos", "--first", "5", "--schedules", "2"])
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command, "Company", Told(*SOUND))
    monkeypatch.setattr(command, "PLANTS", {"unfound": Unfound()})
    assert command.main() == 1
