"""The verbs of the command: finds one, loads its module, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.cli import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE
from quire.cli.usage import Parser

if TYPE_CHECKING:
    from quire.cli.console import Console


#: How many calls of Python may be open. A message may be nested a thousand deep, and whatever
#: prints it calls itself up to three times for each level.
MAX_OPEN_CALLS = 4000


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: the module under `quire.cli` that has `add_<verb>` and `run_<verb>`.

    All arguments of one that `passes_on` are another program's.
    """

    name: str
    module: str
    help: str
    passes_on: bool = False

    @property
    def function(self) -> str:
        return self.name.replace("-", "_")


VERBS = (
    Verb("submit", "requests", "enqueue prompts, and follow or await their output"),
    Verb("tail", "requests", "print the output of a request as it comes"),
    Verb("result", "requests", "wait for the end of a request and print its text"),
    Verb("cancel", "cancel", "cancel requests, a group, or all requests of a tenant"),
    Verb("inspect", "requests", "show everything the queue knows of a request"),
    Verb("status", "operate", "show what waits, what runs, and the workers"),
    Verb("top", "operate", "the same as status, refreshed until interrupted"),
    Verb("queue", "operate", "pause or resume a queue, end requests that wait too long"),
    Verb("limits", "limits", "show or set how much a queue takes in before it refuses"),
    Verb("drain", "drain", "ask workers to finish and exit, and wait until they have"),
    Verb("dead", "operate", "dead letters: ls, show, requeue, purge"),
    Verb("run-batch", "run_batch", "run a file of OpenAI batch requests"),
    Verb("bench", "bench", "load a queue and measure its latencies"),
    Verb("doctor", "doctor", "check Redis, Python, torch and the model folder"),
    Verb("schema", "local", "print the JSON schema of a request"),
    Verb("worker", "local", "run a worker (needs the checkout)", passes_on=True),
    Verb("gateway", "local", "serve OpenAI's API (needs the checkout)", passes_on=True),
    Verb("demo", "local", "two workers, one killed (needs the checkout)", passes_on=True),
)

_EPILOG = """\
`quire VERB --help` tells more. The server is --redis-url or QUIRE_REDIS_URL
(its password QUIRE_REDIS_PASSWORD), the queue --queue or QUIRE_QUEUE;
quire.toml may say so, too. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 some
failed, 130 interrupted. What a verb found goes to stdout, with --json as a
record per line; everything else to stderr."""


def run(arguments: list[str]) -> int:
    """Runs one command line, without the name of the program; returns the exit code."""
    _open_what_was_closed()
    sys.setrecursionlimit(max(sys.getrecursionlimit(), MAX_OPEN_CALLS))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Not every terminal has every letter that a model may say.
        sys.stdout.reconfigure(errors="backslashreplace")
    verb = next((verb for verb in VERBS if arguments and arguments[0] == verb.name), None)
    if verb is None:
        # Only now: a parser of all verbs would need all their modules.
        _overview().parse_args(arguments or ["--help"])
        return EXIT_USAGE
    module = importlib.import_module(f"quire.cli.{verb.module}")
    parser = Parser(
        prog=f"quire {verb.name}", description=f"{verb.help[0].upper()}{verb.help[1:]}."
    )
    if verb.passes_on:
        parsed = argparse.Namespace(rest=arguments[1:])
    else:
        from quire.errors import InvalidRequest

        try:
            getattr(module, f"add_{verb.function}")(parser)
        except InvalidRequest as error:
            # A file of settings that cannot be right.
            sys.stderr.write(f"error: {error}\n")
            return EXIT_USAGE
        parsed = parser.parse_args(arguments[1:])
    from quire.cli.console import Console

    return _guarded(getattr(module, f"run_{verb.function}"), parsed, Console.of(parsed))


def _guarded(
    run: Callable[[argparse.Namespace, Console], int],
    arguments: argparse.Namespace,
    console: Console,
) -> int:
    from redis.exceptions import RedisError

    from quire.cli.console import telling_warnings
    from quire.errors import InvalidRequest, QuireError
    from quire.transport.connection import translated

    try:
        with telling_warnings(console):
            code = run(arguments, console)
        sys.stdout.flush()
    except InvalidRequest as error:
        console.complain(error)
        return EXIT_USAGE
    except QuireError as error:
        console.complain(f"{error}{_hint(arguments, error)}")
        return EXIT_ERROR
    except RedisError as error:
        # From the few looks that go around the broker.
        console.complain(f"{translated(error)}{_hint(arguments, error)}")
        return EXIT_ERROR
    except KeyboardInterrupt:
        console.end_progress()
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone, as `head` does.
        _leave_stdout()
        return EXIT_ERROR
    except OSError as error:
        # No verb lets one of a file of its own come so far: stdout is a file on a full disk.
        console.complain(f"the output cannot be written: {error.strerror or error}")
        _leave_stdout()
        return EXIT_ERROR
    return code


def _hint(arguments: argparse.Namespace, error: Exception) -> str:
    from quire.cli.schemes import scheme_hint

    return scheme_hint(getattr(arguments, "redis_url", ""), error)


def _leave_stdout() -> None:
    """What is written from now on is lost: the interpreter must not flush into it once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_what_was_closed() -> None:
    """Whoever closed a stream of ours has nothing to say by it, or wants to hear nothing.

    Python has None there, and the next socket would take its number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _overview() -> argparse.ArgumentParser:
    width = max(len(verb.name) for verb in VERBS)
    table = "\n".join(f"  {verb.name:{width}}  {verb.help}" for verb in VERBS)
    parser = Parser(
        prog="quire",
        usage="quire VERB ...",
        description=f"Batch inference through a message queue.\n\nverbs:\n{table}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parser.add_argument("verb", choices=[verb.name for verb in VERBS], help=argparse.SUPPRESS)
    return parser


class _Version(argparse.Action):
    """Prints the version; looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from quire.version import quire_version

        sys.stdout.write(f"quire {quire_version()}\n")
        parser.exit()
