"""What a log line may hold, in both forms."""

import io
import logging

import pytest

from service.logs import configure_logs


@pytest.fixture(autouse=True)
def _restore_root_logger():
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = before


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_traceback_shows_where_and_never_what_was_in_the_variables(style):
    stream = io.StringIO()
    configure_logs(style=style, stream=stream)
    try:
        prompt = "a secret prompt"
        raise ValueError(len(prompt))
    except ValueError:
        logging.getLogger("somewhere").exception("it broke")
    assert "ValueError: 15" in stream.getvalue()
    assert "it broke" in stream.getvalue()
    assert "a secret" not in stream.getvalue().replace('prompt = "a secret prompt"', "")
