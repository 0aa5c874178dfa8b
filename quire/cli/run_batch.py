"""`quire run-batch`: OpenAI batch files through the queue."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from quire.batch.batch import DEFAULT_MAX_INFLIGHT, BatchProgress, run_batch
from quire.batch.files import BatchFileError
from quire.cli import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, EXIT_PARTIAL, EXIT_USAGE
from quire.cli.console import Console, add_server, settings_of, url_of
from quire.cli.schemes import scheme_hint
from quire.errors import BrokerUnavailable


def add_run_batch(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire run-batch`."""
    parser.add_argument("-i", "--input", required=True, metavar="FILE", help="requests, JSONL")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="results, JSONL")
    errors = "failures [out.errors.jsonl for out.jsonl]"
    parser.add_argument("-e", "--errors", metavar="FILE", help=errors)
    parser.add_argument("--resume", action="store_true", help="continue an earlier run")
    parser.add_argument("--name", help="tells batches of equal requests apart [the input's name]")
    parser.add_argument(
        "--max-inflight",
        type=int,
        default=DEFAULT_MAX_INFLIGHT,
        metavar="N",
        help=f"requests in flight at once [{DEFAULT_MAX_INFLIGHT}]",
    )
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="for the whole batch")
    parser.add_argument("--priority", default="low", help="low, normal, high or critical [low]")
    parser.add_argument("--tenant", default="default")
    add_server(parser)
    parser.epilog = (
        "Interrupted once, it cancels what is in flight and names the rest in the error file; "
        "interrupted again, or killed, it leaves everything as it is. --resume continues after "
        "either."
    )


def run_run_batch(arguments: argparse.Namespace, console: Console) -> int:
    """Prints how many lines completed and failed; 3 when some failed, 130 when interrupted."""
    if path := _over_stdout(arguments):
        console.complain(f"{path}: is where the summary is written; name another file")
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
                max_inflight=arguments.max_inflight,
                priority=arguments.priority,
                tenant=arguments.tenant,
                deadline_seconds=arguments.deadline,
                stop=stop,
                on_progress=lambda now: console.progress(_line(now)),
                **settings_of(arguments),
            )
    except OSError as error:
        if error.filename is None:
            # Not a file that was named wrongly, but one that cannot be written any more.
            console.complain(f"{error.strerror}; what could be written stays, --resume goes on")
            return EXIT_ERROR
        console.complain(f"{error.filename}: {error.strerror}")
        return EXIT_USAGE
    except (BatchFileError, ValueError) as error:
        console.complain(error)
        return EXIT_USAGE
    except BrokerUnavailable as error:
        told = f"{error}{scheme_hint(arguments.redis_url, error)}"
        console.complain(f"{told}; results so far are in {arguments.output}, --resume goes on")
        return EXIT_ERROR
    console.end_progress()
    text = (
        f"{progress.ending}: {progress.completed} completed, {progress.failed} failed, "
        f"{progress.tokens} tokens in {progress.seconds:.1f} s"
    )
    console.data(progress, text)
    if progress.ending == "cancelled":
        return EXIT_INTERRUPTED
    if progress.failed == 0:
        return EXIT_OK
    return EXIT_PARTIAL if progress.completed else EXIT_ERROR


@contextlib.contextmanager
def _stop_when_interrupted() -> Iterator[threading.Event]:
    """The event is set by the first interruption; the second one is a KeyboardInterrupt."""
    stop = threading.Event()

    def interrupt(*_: object) -> None:
        if stop.is_set():
            # To cancel takes a Redis that answers, and whoever asks again will not wait for that.
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
    """The file for results that stdout is, too: a shell's `>` writes over what is there."""
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
    """The time to go at the pace of this run so far; None before its first result."""
    done_here = now.done - now.done_before
    if done_here <= 0:
        return None
    return (now.total - now.done) * now.seconds / done_here


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
