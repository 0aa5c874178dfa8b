"""The verb `models`: which workers announce which model, on which queue."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import redis

from quire.cli.console import Console, add_server, few, sides_of
from quire.cli.exit_codes import EXIT_ERROR, EXIT_OK
from quire.errors import InvalidRequest
from quire.keys import Keys
from quire.queue.roles import Observer
from quire.queue.view.view import Part, view_queues
from quire.queue.workers.workers import WorkerInfo, adapters_of, kinds_of
from quire.transport.cluster.parts import servers_of

#: How many keys one step of the search for queues looks at. Other clients wait no longer than it.
SCAN_SIZE = 1000

#: The registry of workers of a shard; see `Keys.workers`.
_REGISTRY = re.compile(r"quire:\{([A-Za-z0-9._-]+)\.([0-9]+)\}:w")


@dataclass(frozen=True, slots=True)
class Served:
    """One model on one queue. `workers` are the live workers that announce it."""

    queue: str
    model: str
    kind: str
    adapters: Sequence[str]
    workers: Sequence[str]


def add_models(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire models`."""
    help_ = "these queues, each with --shards shards [--queue]"
    parser.add_argument("name", nargs="*", metavar="queue", help=help_)
    help_ = "every queue of the server; reads the names of all keys"
    parser.add_argument("--all", action="store_true", help=help_)
    add_server(parser)


def run_models(arguments: argparse.Namespace, console: Console) -> int:
    """Prints the models that live workers announce; the exit code is 1 if there is none."""
    # Of a cluster, the connection of any shard reaches all others.
    connection = sides_of(Observer, arguments)[0].connection
    shards: dict[str, list[Keys]] = {}
    for keys in _shards_of(arguments, connection):
        shards.setdefault(keys.queue, []).append(keys)
    views = view_queues(connection, dict(sorted(shards.items())), Part.SHARDS)
    found = [one for view in views for one in _served(view.name, view.words)]
    if console.is_json:
        for one in found:
            console.data(one)
    elif found:
        rows = [
            (one.queue, one.model, one.kind, few(one.adapters) or "-", few(one.workers))
            for one in found
        ]
        console.table(("queue", "model", "kind", "adapters", "workers"), rows)
    else:
        console.complain("no live worker announces a model")
    return EXIT_OK if found else EXIT_ERROR


def _shards_of(arguments: argparse.Namespace, connection: redis.Redis) -> list[Keys]:
    if arguments.all:
        return sorted(_all_shards(connection), key=lambda keys: (keys.queue, keys.shard))
    names = arguments.name or [arguments.queue]
    try:
        return [
            Keys(name, shard) for name in dict.fromkeys(names) for shard in range(arguments.shards)
        ]
    except ValueError as error:
        raise InvalidRequest("queue", str(error)) from error


def _all_shards(connection: redis.Redis) -> Iterator[Keys]:
    """Every shard that a worker has signed. The same key may come twice from a scan."""
    names = {
        name
        for server in servers_of(connection).values()
        for name in server.scan_iter(match="quire:{*}:w", count=SCAN_SIZE)
    }
    for name in names:
        if found := _REGISTRY.fullmatch(name.decode(errors="replace")):
            yield Keys(found[1], int(found[2]))


def _served(queue: str, workers: Sequence[WorkerInfo]) -> Iterator[Served]:
    kinds = kinds_of(workers)
    for model, adapters in adapters_of(workers).items():
        # A worker of several shards signs the registry of each.
        names = sorted({one.name for one in workers if one.is_alive and one.model == model})
        yield Served(queue, model, kinds.get(model, "text"), adapters, names)
