"""How the command becomes a program of the application."""

import os
import sys

import pytest

from quire.cli import main
from quire.cli.usage import COMMAND_VARIABLE
from service.worker.settings.config import Settings


class Become(Exception):
    """In place of the end of this process."""


def test_the_usage_of_a_program_has_the_words_that_were_typed(monkeypatch, capsys):
    found = []

    def execve(*what):
        found[:] = what
        raise Become

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(Become):
        main(["worker", "--help"])
    program, command, environ = found
    assert (program, command[1:]) == (sys.executable, ["-m", "service", "--help"])
    with pytest.raises(Become):
        main(["config", "show"])
    assert found[2][COMMAND_VARIABLE] == "quire config show"
    assert Settings.parser().prog == "python -m service"
    monkeypatch.setenv(COMMAND_VARIABLE, environ[COMMAND_VARIABLE])
    assert Settings.parser().format_usage().startswith("usage: quire worker [options]")


def test_config_says_how_it_is_used(capsys):
    usage = "usage: quire config show [--origin] [--json] [flags of a worker]\n"
    assert main(["config", "--help"]) == 0
    assert capsys.readouterr() == (usage, "")
    assert main(["config"]) == 2
    assert capsys.readouterr() == ("", f"error: {usage}")
