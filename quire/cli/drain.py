"""`quire drain`: asks workers to exit, from any machine, and waits until they have.

A draining worker claims nothing new, finishes what it can within its grace period, releases the
rest with its tokens, and exits with 0. A supervisor that restarts exited processes restarts it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.cli.console import Console, add_server, few, not_negative, sides_of
from quire.cli.exit_codes import EXIT_ERROR, EXIT_OK, EXIT_PARTIAL, EXIT_USAGE
from quire.queue.roles import Operator
from quire.queue.workers.workers import LAST_STATES, WorkerInfo

#: The pause between two reads of the registry.
LOOK_SECONDS = 0.5

#: The outcomes that are printed for a worker, with an explanation if the word needs one.
OUTCOMES = {
    "stopped": "",
    "failed": "its requests are taken over when their leases expire",
    "restarted": "",
    "silent": "no sign of life for a minute",
    "unknown": "no such worker",
    "timeout": "",
    "asked": "with --no-wait",
}


def add_drain(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire drain`."""
    parser.add_argument("worker", nargs="*", help="its name in `quire status`")
    parser.add_argument("--all", action="store_true", help="every live worker")
    wait = parser.add_mutually_exclusive_group()
    wait.add_argument("--no-wait", action="store_true", help="ask them and return")
    help_ = "stop waiting; they drain all the same [300]"
    wait.add_argument("--timeout", type=not_negative, default=300.0, metavar="SECONDS", help=help_)
    add_server(parser)
    *others, last = (f"{one} ({why})" if why else one for one, why in OUTCOMES.items())
    parser.epilog = (
        f"Prints each worker with its outcome: {', '.join(others)} or {last}. Exit codes: 0 all "
        "stopped, restarted or asked, 3 some, 1 none. A supervisor that restarts processes also "
        "restarts a drained worker: to remove workers, scale down there."
    )


def run_drain(arguments: argparse.Namespace, console: Console) -> int:
    """Prints one line per worker as it ends; 3 when some have not ended well, 1 when none has."""
    if arguments.all != (not arguments.worker):
        console.complain("drain takes either workers or --all")
        return EXIT_USAGE
    brokers = sides_of(Operator, arguments)
    known = _look(brokers)
    names = _living(known) if arguments.all else list(dict.fromkeys(arguments.worker))
    if not names:
        console.note("no live worker")
    watch = _Watch(brokers, console)
    for name in names:
        watch.ask(name, known)
    if arguments.no_wait:
        for name in list(watch.draining):
            watch.report(name, "asked")
    else:
        watch.wait(arguments.timeout)
    good = [outcome in ("asked", "restarted", "stopped") for outcome in watch.outcomes.values()]
    if all(good):
        return EXIT_OK
    return EXIT_PARTIAL if any(good) else EXIT_ERROR


@dataclass(slots=True)
class _Watch:
    """The workers that were asked to drain, and the outcomes of those that have ended."""

    brokers: Sequence[Operator]
    console: Console
    #: The workers that have not ended, with the shards that they serve.
    draining: dict[str, list[int]] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)

    def ask(self, name: str, known: Sequence[Mapping[str, WorkerInfo]]) -> None:
        """Asks one worker to drain, or reports at once that it is unknown or has ended."""
        shards = [number for number, workers in enumerate(known) if name in workers]
        if not shards:
            self.report(name, "unknown")
            self.console.complain(f"no worker has the name {name}; {_named(_living(known))}")
        elif end := _end_of([known[shard][name] for shard in shards]):
            self.report(name, end)
        else:
            if any(known[shard][name].load.get("twins") for shard in shards):
                self.console.complain(
                    f"{name} is the name of several workers; only one of them may end"
                )
            for shard in shards:
                self.brokers[shard].drain(name)
            self.draining[name] = shards

    def wait(self, timeout: float) -> None:
        """Reads the registry until all have ended, or the timeout has passed."""
        give_up = time.monotonic() + timeout
        while self.draining:
            # In this order: the command is removed when the worker registers as draining. So if the
            # command is gone, the registry that is read after it shows the drain.
            wishes = [broker.control().drain_wishes for broker in self.brokers]
            workers = _look(self.brokers)
            for name, shards in list(self.draining.items()):
                # An ended worker stays in the registry for a day, unless its entry is deleted.
                infos = [workers[shard][name] for shard in shards if name in workers[shard]]
                is_accepted = not any(name in wishes[shard] for shard in shards)
                if end := _end_of(infos, is_accepted=is_accepted):
                    self.report(name, end)
            if self.draining and time.monotonic() >= give_up:
                for name in list(self.draining):
                    self.report(name, "timeout")
            elif self.draining:
                self.console.progress(f"waiting for {_described(self.draining, workers)}")
                time.sleep(LOOK_SECONDS)
        self.console.end_progress()

    def report(self, name: str, outcome: str) -> None:
        """Prints the outcome of a worker, and stops waiting for it."""
        assert outcome in OUTCOMES, f"{outcome} is not in the help"
        self.draining.pop(name, None)
        self.outcomes[name] = outcome
        self.console.end_progress()
        self.console.data({"worker": name, "outcome": outcome}, f"{name}  {outcome}")
        self.console.piece("")


def _look(brokers: Sequence[Operator]) -> list[dict[str, WorkerInfo]]:
    """The registry of each shard, by worker name."""
    return [{info.name: info for info in broker.workers()} for broker in brokers]


def _living(known: Sequence[Mapping[str, WorkerInfo]]) -> list[str]:
    names = {name for workers in known for name in workers}
    return [
        name
        for name in sorted(names)
        if not _end_of([workers[name] for workers in known if name in workers])
    ]


def _named(living: Sequence[str]) -> str:
    return f"there are {few(living)}" if living else "none is alive"


def _end_of(infos: Sequence[WorkerInfo], *, is_accepted: bool = False) -> str | None:
    """How a worker ended; None while it has not. `is_accepted`: it has accepted the drain."""
    if not infos:
        return "unknown"
    for end in LAST_STATES:
        if all(info.state == end for info in infos):
            return end
    if all(info.is_silent for info in infos):
        return "silent"
    if is_accepted and not any(info.is_draining for info in infos):
        # It has ended, and a new process has registered under its name.
        return "restarted"
    return None


def _described(
    draining: Mapping[str, Sequence[int]], workers: Sequence[Mapping[str, WorkerInfo]]
) -> str:
    """The draining workers with their states and claims: the first three, and how many more."""
    parts = []
    for name, shards in draining.items():
        info = next((workers[shard][name] for shard in shards if name in workers[shard]), None)
        if info is not None:
            parts.append(f"{name} ({info.state}, {info.load.get('claims', 0):g} claims)")
    shown = ", ".join(parts[:3])
    return shown if len(parts) <= 3 else f"{shown} and {len(parts) - 3} more"
