"""The form of the log, and what a line may hold."""

import io
import json
import logging
import os
import subprocess
import sys

import pytest
import structlog

from service.shared.logs import configure_logs, trace_ids
from tests.service.builders import CHECKOUT

PROGRAM = """
import logging, structlog, warnings
from service.shared.logs import configure_logs
configure_logs(level={level!r}, style={style!r})
log = structlog.get_logger("test")
log.debug("too quiet")
log.info("finished", request_id="r-1", tokens=3)
logging.getLogger("library").warning("from a library")
warnings.warn("is old")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def test_tests_of_the_service_log_their_events_and_print_none(caplog, capfd):
    """See `_log_events` in conftest.py for what printing has done."""
    structlog.get_logger("service.somewhere").info("finished")
    assert "finished" in caplog.text
    assert capfd.readouterr() == ("", "")


def stderr_of_a_program(*, level: str = "info", style: str = "auto") -> str:
    program = PROGRAM.format(level=level, style=style)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "", "stdout is for data"
    return done.stderr


def test_where_nobody_watches_every_event_is_one_line_of_json():
    events = [json.loads(line) for line in stderr_of_a_program().splitlines()]
    (warned,) = (event for event in events if "UserWarning: is old" in event["event"])
    assert warned["level"] == "warning"
    events.remove(warned)
    assert [event["event"] for event in events] == ["finished", "from a library", "failed"]
    assert events[0]["request_id"] == "r-1"
    assert events[0]["level"] == "info"
    assert all([*event][:2] == ["event", "level"] for event in events)
    assert events[0]["timestamp"].endswith("Z")
    assert "ZeroDivisionError" in events[2]["exception"]


def test_every_line_of_json_names_the_worker_also_those_of_libraries():
    stream = io.StringIO()
    configure_logs(style="json", stream=stream, worker="worker-7")
    structlog.get_logger("ours").info("finished")
    logging.getLogger("library").warning("from a library")
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["worker"] for event in events] == ["worker-7", "worker-7"]


# Where CI is set, transformers also passes on to the root what it prints.
@pytest.mark.parametrize("ci", ["", "true"])
def test_libraries_that_print_by_themselves_log_one_event_per_line(ci: str):
    program = """
import sys, huggingface_hub.utils, transformers.utils.logging as transformers_logging
from service.shared.logs import configure_logs, take_over_libraries
configure_logs(style="json")
transformers_logging.get_logger("transformers.modeling").warning("from transformers")
take_over_libraries()
print("taken over", file=sys.stderr)
transformers_logging.get_logger("transformers.modeling").warning("from transformers")
huggingface_hub.utils.logging.get_logger("huggingface_hub.file").warning("from the hub")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=CHECKOUT,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        timeout=60,
    )
    before, _, after = done.stderr.partition("taken over\n")
    assert "[transformers] from transformers" in before, "nobody has to be taken over any more"
    events = [json.loads(line)["event"] for line in after.splitlines()]
    assert events == ["from transformers", "from the hub"]


def test_the_level_and_the_form_can_be_chosen():
    assert "too quiet" in stderr_of_a_program(level="debug")
    text = stderr_of_a_program(level="error", style="console")
    assert "failed" in text
    assert "finished" not in text
    assert not text.startswith("{")


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("header", [f"00-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-more"])
def test_a_trace_of_this_version_and_of_later_ones_is_read(header):
    assert trace_ids({"traceparent": header}) == {"trace_id": TRACE, "span_id": SPAN}


@pytest.mark.parametrize(
    "header",
    ["", "nonsense", f"00-{TRACE}-{SPAN}", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
     f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01\n"],
)  # fmt: skip
def test_what_is_no_trace_is_ignored(header):
    assert trace_ids({"traceparent": header}) == {}
    assert trace_ids({"tracestate": "x"}) == {}


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
        fail_over("a secret prompt")
    except ValueError:
        logging.getLogger("somewhere").exception("it broke")
    assert "it broke" in stream.getvalue()
    assert "ValueError: 15" in stream.getvalue()
    assert "len(prompt)" in stream.getvalue()
    assert stream.getvalue().count("a secret prompt") == stream.getvalue().count("fail_over(")


def fail_over(prompt: str) -> None:
    fail_with(len(prompt))


def fail_with(reason: object) -> None:
    raise ValueError(reason)


def test_what_is_foreign_is_shown_on_a_terminal_and_not_obeyed():
    stream = io.StringIO()
    configure_logs(style="console", stream=stream)
    foreign = "a\x1b]52;c;aGk=\x07\x9b\u202eb\nc"
    log = structlog.get_logger("somewhere")
    try:
        fail_with(foreign)
    except ValueError:
        log.exception(foreign, reason=foreign, names=[foreign])
    logging.getLogger("a library").warning(foreign)
    text = stream.getvalue()
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & {*text}
    assert text.count("a␛]52;c;aGk=␇[U+009B][U+202E]b␊c") == 3
    assert "ValueError: a␛]52;c;aGk=␇[U+009B][U+202E]b" in text
