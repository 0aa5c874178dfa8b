"""How the program of a process begins, and with which exit code it ends."""

import pytest

from service.shared.process import EXIT_USAGE, run
from service.shared.settings.sources import ConfigurationError


def fails_with(error: Exception):
    def body() -> int:
        raise error

    return body


def test_the_exit_code_is_that_of_the_body(capsys):
    assert run("sorter", lambda: 7, extra="sorting") == 7
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigurationError("queue: must be short"), "configuration: queue: must be short\n"),
        (
            ModuleNotFoundError(name="sorts"),
            (
                "installation: the module sorts is missing; the sorter needs the extra `sorting`: "
                "pip install -c constraints.txt -e '.[sorting]' in a checkout, or "
                "pip install 'FILE.whl[sorting]' with a wheel\n"
            ),
        ),
    ],
)
def test_a_process_that_cannot_begin_says_why_in_one_line(capsys, error, line):
    assert run("sorter", fails_with(error), extra="sorting") == EXIT_USAGE
    assert capsys.readouterr().err == line


def test_a_defect_is_not_taken_for_wrong_usage():
    with pytest.raises(ZeroDivisionError):
        run("sorter", fails_with(ZeroDivisionError()), extra="sorting")
