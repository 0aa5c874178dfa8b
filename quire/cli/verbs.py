"""The verbs of the command: imports the module of a verb, runs it, maps errors to exit codes."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.cli.exit_codes import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE
from quire.cli.usage import Parser
from quire.pictures import protect_terminals

if TYPE_CHECKING:
    from quire.cli.console import Console


#: The recursion limit. A message may be nested a thousand levels deep, and the code that prints it
#: needs up to three calls for each level.
RECURSION_LIMIT = 4000


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb; its module in `quire.cli` has the functions `add_<verb>` and `run_<verb>`.

    With `passes_on`, all its arguments are passed to another program.
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
    Verb("tail", "requests", "print the output of a request while it is generated"),
    Verb("result", "requests", "wait for the end of a request and print its text"),
    Verb("cancel", "cancel", "cancel requests, a group, or all requests of a tenant"),
    Verb("inspect", "requests", "show everything that Redis holds of a request"),
    Verb(
        "status",
        "operate",
        "show what waits and what runs, or the state of one request",
    ),
    Verb("top", "operate", "the same as status, refreshed until interrupted"),
    Verb("models", "fleet.models", "show which workers serve which model, on which queue"),
    Verb("queue", "operate", "pause or resume a queue, end requests that wait too long"),
    Verb("limits", "limits", "show or set how much a queue accepts before it refuses"),
    Verb("usage", "tenants", "show how many tokens each tenant has used"),
    Verb("drain", "drain", "ask workers to finish and exit, and wait until they have"),
    Verb("dead", "operate", "dead letters: ls, show, requeue, purge"),
    Verb("run-batch", "run_batch", "run a file of OpenAI batch requests"),
    Verb("bench", "bench", "load a queue and measure its latencies"),
    Verb("plan", "fleet.plan", "compute how many workers and how much Redis a load needs"),
    Verb("doctor", "doctor", "check Redis, Python, torch and the model folder"),
    Verb("schema", "local", "print the JSON schema of a request"),
    Verb("serve", "serve.command", "serve a model on this machine, with all that it needs"),
    Verb("local", "local", "run a Redis on this machine: an installed one, or Valkey's package"),
    Verb("config", "programs", "with `show`: print a worker's settings", passes_on=True),
    Verb("worker", "programs", "run a worker", passes_on=True),
    Verb("gateway", "programs", "serve OpenAI's API", passes_on=True),
    Verb("batcher", "programs", "run the batches that callers create over HTTP", passes_on=True),
    Verb("notifier", "programs", "post webhooks for the ends of requests", passes_on=True),
    Verb("exporter", "programs", "serve metrics of whole queues", passes_on=True),
    Verb("console", "programs", "serve pages that show a queue", passes_on=True),
    Verb(
        "demo",
        "programs",
        "run the demo of a checkout: one of two workers is killed",
        passes_on=True,
    ),
)

_EPILOG = """\
`quire VERB --help` shows the flags of a verb. Set the server with --redis-url
or QUIRE_REDIS_URL (its password with QUIRE_REDIS_PASSWORD), the queue with
--queue or QUIRE_QUEUE, or both in quire.toml. Exit codes: 0 success, 1 failure,
2 wrong usage, 3 some items failed, 130 interrupted. Results go to stdout, with
--json as one record per line; everything else goes to stderr."""


def run(arguments: list[str]) -> int:
    """Runs one command line, without the name of the program; returns the exit code."""
    _reopen_closed_streams()
    sys.setrecursionlimit(max(sys.getrecursionlimit(), RECURSION_LIMIT))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An output may have characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    protect_terminals()
    verb = next((verb for verb in VERBS if arguments and arguments[0] == verb.name), None)
    if verb is None:
        # Without the flags of the verbs: those would need the modules of all verbs.
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
            # The file of settings is invalid.
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

    from quire.cli.console import printing_warnings
    from quire.errors import InvalidRequest, QuireError
    from quire.transport.connection import translated

    try:
        with printing_warnings(console):
            code = run(arguments, console)
        sys.stdout.flush()
    except InvalidRequest as error:
        console.complain(error)
        return EXIT_USAGE
    except QuireError as error:
        console.complain(_with_hint(arguments, error))
        return EXIT_ERROR
    except RedisError as error:
        # From the few calls that do not use the broker, which translates its errors.
        console.complain(_with_hint(arguments, translated(error)))
        return EXIT_ERROR
    except KeyboardInterrupt:
        console.end_progress()
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe, as `head` does.
        _discard_stdout()
        return EXIT_ERROR
    except OSError as error:
        # Verbs handle errors of their own files, so this one is of stdout: a full disk.
        console.complain(f"the output cannot be written: {error.strerror or error}")
        _discard_stdout()
        return EXIT_ERROR
    return code


def _with_hint(arguments: argparse.Namespace, error: Exception) -> str:
    from quire.cli.schemes import with_hint

    return with_hint(getattr(arguments, "redis_url", None) or "", error)


def _discard_stdout() -> None:
    """Discards all further output, because the interpreter's last flush would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reopen_closed_streams() -> None:
    """Opens the null device for each standard stream that the caller has closed.

    Python has None for a closed stream, and the next socket would get its file descriptor.
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
    """Prints the version, which is read only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from quire.version import quire_version

        sys.stdout.write(f"quire {quire_version()}\n")
        parser.exit()
