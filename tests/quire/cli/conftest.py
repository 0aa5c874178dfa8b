"""Runs command lines in this process, on the queue of the test."""

import pytest

from quire.cli import main


@pytest.fixture
def quire(real_server, real_broker, monkeypatch, capsys):
    """Runs a command line on the queue of this test; returns exit code, stdout and stderr."""
    monkeypatch.setenv("QUIRE_REDIS_URL", real_server.url)
    monkeypatch.setenv("QUIRE_QUEUE", real_broker.keys.queue)

    def run(*arguments):
        try:
            code = main(arguments)
        except SystemExit as exit_:
            code = exit_.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
