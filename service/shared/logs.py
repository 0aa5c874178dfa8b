"""Sets up logging: one event per line on stderr, as JSON unless stderr is a terminal.

Libraries that log or warn through the standard library use the same handler and format. Prompts and
outputs are never logged; a line may name the id of a request.
"""

import logging
import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor

from quire.pictures import in_one_line, pictured
from quire.tracing import TRACE_HEADER

#: Libraries whose events below `warning` are not logged, because there are too many.
QUIET_LIBRARIES = ("httpx", "urllib3", "filelock", "transformers", "asyncio")

#: Libraries that add their own handlers, which print to stderr.
PRINTING_LIBRARIES = ("transformers", "huggingface_hub")

#: Version, trace id, span id and flags.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?"
)


def configure_logs(
    *,
    level: str = "info",
    style: Literal["auto", "json", "console"] = "auto",
    stream: TextIO | None = None,
    worker: str | None = None,
) -> None:
    """Send every event of this process to `stream`, stderr by default.

    In JSON every event names the `worker`. So when the logs of many workers are collected, a
    request can be followed from one worker to the next.
    """
    target = sys.stderr if stream is None else stream
    as_json = style == "json" or (style == "auto" and not target.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if as_json:
        renderers: list[Processor] = [
            partial(_name_worker, worker=worker),
            _begin_with_event,
            structlog.processors.JSONRenderer(),
        ]
    else:
        # The default traceback shows local variables, which may contain prompts.
        plain = structlog.dev.plain_traceback
        renderers = [
            _show_control_characters,
            structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=plain),
        ]
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                *renderers,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Python would print a warning as two lines that a program cannot parse.
    logging.captureWarnings(capture=True)
    for name in QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(root.level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


def _begin_with_event(_: object, __: str, event: EventDict) -> EventDict:
    """Put first what a person looks for in a line."""
    first = {name: event[name] for name in ("event", "level") if name in event}
    return {**first, **event}


def take_over_libraries() -> None:
    """Remove the handlers of libraries that print, so that they log through our handler.

    Call it after they have been imported, because the import adds the handlers.
    """
    for name in PRINTING_LIBRARIES:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True


def _name_worker(_: object, __: str, event: EventDict, *, worker: str | None) -> EventDict:
    return event if worker is None else {"worker": worker, **event}


def _show_control_characters(_: object, __: str, event: EventDict) -> EventDict:
    """A text may be of others, and a terminal would obey it. Other values are shown escaped."""
    lines = {name: pictured(event[name]) for name in ("exception", "stack") if name in event}
    texts = {name: in_one_line(text) for name, text in event.items() if isinstance(text, str)}
    return {**event, **texts, **lines}


def trace_ids(headers: Mapping[str, str]) -> dict[str, str]:
    """`trace_id` and `span_id` of the caller, for the log lines of its request.

    Empty without a valid header: the standard says that an invalid one is ignored.
    """
    found = _TRACEPARENT.fullmatch(headers.get(TRACE_HEADER, ""))
    return {} if found is None else {"trace_id": found[1], "span_id": found[2]}


def warn_of_settings(clauses: Iterable[str]) -> None:
    """Log one warning for each clause about the settings of a process."""
    for clause in clauses:
        structlog.get_logger("service.settings").warning(clause)
