"""`quire run-batch`: runs files of OpenAI batch requests through the queue."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from quire.batch.batch import DEFAULT_MAX_INFLIGHT, BatchProgress, failures_beside, run_batch
from quire.batch.files import BatchFileError
from quire.cli.console import Console, add_server, settings_of, url_of
from quire.cli.exit_codes import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, EXIT_PARTIAL, EXIT_USAGE
from quire.cli.schemes import with_hint
from quire.errors import BrokerUnavailable

#: How many reasons of failures the summary names.
MAX_SHOWN_REASONS = 3

#: Seconds between two lines of progress where there is no terminal.
LINE_SECONDS = 15.0


class _Showing:
    """Shows the progress in place in a terminal; elsewhere as a line from time to time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = time.monotonic() + LINE_SECONDS

    def __call__(self, now: BatchProgress) -> None:
        if self._console.has_terminal:
            self._console.progress(_line(now))
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_SECONDS
            sys.stderr.write(f"{_line(now)}\n")
            sys.stderr.flush()


def add_run_batch(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire run-batch`."""
    parser.add_argument("-i", "--input", required=True, metavar="FILE", help="requests, JSONL")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="results, JSONL")
    errors = "failures [out.errors.jsonl for out.jsonl]"
    parser.add_argument("-e", "--errors", metavar="FILE", help=errors)
    parser.add_argument("--resume", action="store_true", help="continue an earlier run")
    parser.add_argument("--name", help="separates batches of equal requests [the input's name]")
    parser.add_argument(
        "--max-inflight",
        type=int,
        default=DEFAULT_MAX_INFLIGHT,
        metavar="N",
        help=f"requests in flight at once [{DEFAULT_MAX_INFLIGHT}]",
    )
    parser.add_argument("--model", help="runs all lines with it, whatever model they name")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="for the whole batch")
    parser.add_argument("--priority", default="low", help="low, normal, high or critical [low]")
    parser.add_argument("--tenant", default="default", help="tenant of the requests [default]")
    add_server(parser)
    parser.epilog = (
        "The first interruption cancels the requests in flight and writes an error for each line "
        "without a result. A second one, or a kill, leaves everything as it is. --resume continues "
        "after both."
    )


def run_run_batch(arguments: argparse.Namespace, console: Console) -> int:
    """Prints how many lines completed and failed; 3 when some failed, 130 when interrupted."""
    if path := _over_stdout(arguments):
        console.complain(f"{path}: the summary is written to it (stdout); name another file")
        return EXIT_USAGE
    try:
        with _stop_when_interrupted() as stop:
            progress = run_batch(
                url_of(arguments),
                arguments.input,
                arguments.output,
                errors_path=arguments.errors,
                queue=arguments.queue,
                shards=arguments.shards,
                resume=arguments.resume,
                name=arguments.name,
                model=arguments.model,
                max_inflight=arguments.max_inflight,
                priority=arguments.priority,
                tenant=arguments.tenant,
                deadline_seconds=arguments.deadline,
                stop=stop,
                on_progress=_Showing(console),
                **settings_of(arguments),
            )
    except OSError as error:
        if error.filename is None:
            # Not a wrong file name, but a write that failed, for instance on a full disk.
            console.complain(f"{error.strerror}; written results stay, --resume continues")
            return EXIT_ERROR
        console.complain(f"{error.filename}: {error.strerror}")
        return EXIT_USAGE
    except (BatchFileError, ValueError) as error:
        console.complain(error)
        return EXIT_USAGE
    except BrokerUnavailable as error:
        message = with_hint(arguments.redis_url, error)
        console.complain(f"{message}; results so far are in {arguments.output}, --resume continues")
        return EXIT_ERROR
    console.end_progress()
    text = (
        f"{progress.ending}: {progress.completed} completed, {progress.failed} failed, "
        f"{progress.tokens} tokens in {progress.seconds:.1f} s"
    )
    if progress.failed:
        most = sorted(progress.reasons.items(), key=lambda one: -one[1])[:MAX_SHOWN_REASONS]
        text += "".join(f"\n  {times} x {reason}" for reason, times in most)
        text += f"\n  each line: {arguments.errors or failures_beside(Path(arguments.output))}"
    console.data(progress, text)
    if progress.ending == "cancelled":
        return EXIT_INTERRUPTED
    if progress.failed == 0:
        return EXIT_OK
    return EXIT_PARTIAL if progress.completed else EXIT_ERROR


@contextlib.contextmanager
def _stop_when_interrupted() -> Iterator[threading.Event]:
    """The first interruption sets the event; the second one raises KeyboardInterrupt."""
    stop = threading.Event()

    def interrupt(*_: object) -> None:
        if stop.is_set():
            # Cancelling needs Redis, which may not answer; a second interruption does not wait.
            raise KeyboardInterrupt
        stop.set()

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _over_stdout(arguments: argparse.Namespace) -> str | None:
    """The result file that stdout is redirected to, if any: the summary would overwrite it."""
    with contextlib.suppress(OSError, ValueError):
        ours = os.fstat(sys.stdout.fileno())
        for path in filter(None, (arguments.output, arguments.errors)):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(ours.st_mode) and os.path.samestat(Path(path).stat(), ours):
                    return str(path)
    return None


def _line(now: BatchProgress) -> str:
    rate = now.tokens / now.seconds if now.seconds else 0.0
    line = f"{now.done}/{now.total} done, {now.failed} failed, {now.inflight} in flight"
    line += f", {rate:.0f} tokens/s"
    eta = remaining_seconds(now)
    return line if eta is None else f"{line}, {_clock(eta)} left"


def remaining_seconds(now: BatchProgress) -> float | None:
    """The remaining time at the average rate of this run; None before its first result."""
    done_here = now.done - now.done_before
    if done_here <= 0:
        return None
    return (now.total - now.done) * now.seconds / done_here


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
