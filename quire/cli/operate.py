"""The verbs that operate a queue: status, top, queue, dead."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

from quire.cli.console import (
    Console,
    add_server,
    an_id,
    client_of,
    few,
    not_negative,
    of_shard,
    sides_of,
)
from quire.cli.exit_codes import EXIT_ERROR, EXIT_OK, EXIT_PARTIAL, EXIT_USAGE
from quire.cli.tenants import show_tenants
from quire.cli.usage import positive
from quire.errors import UnknownRequest
from quire.queue.repair.dead_letters import DeadLetter
from quire.queue.request.status import RequestStatus
from quire.queue.roles import Observer, Operator
from quire.queue.view.inspection import ShardState
from quire.queue.view.view import Part, QueueView, view_queues
from quire.queue.workers.workers import GONE_SECONDS
from quire.wire.json_values import plain
from quire.wire.protocol import Activity

#: The columns of a worker's load: requests, share of its KV cache, tokens since its start.
_LOAD = ("running", "kv_cache", "tokens")

#: The most dead letters that are searched for an id, or purged at once.
MAX_LETTERS = 10_000


def add_status(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire status`."""
    help_ = "show these requests instead of the queue"
    parser.add_argument("id", nargs="*", type=an_id, help=help_)
    add_server(parser)


def run_status(arguments: argparse.Namespace, console: Console) -> int:
    """Prints the state of the queue once, or that of each named request."""
    if arguments.id:
        return _show_requests(arguments, console)
    _show(_look(sides_of(Observer, arguments)), console)
    return EXIT_OK


def _show_requests(arguments: argparse.Namespace, console: Console) -> int:
    client = client_of(arguments)
    found: list[RequestStatus] = []
    for request_id in arguments.id:
        try:
            found.append(client.status(request_id))
        except UnknownRequest as error:
            console.complain(error)
    if console.is_json:
        for status in found:
            console.data(status)
    elif found:
        rows = [(one.request_id, _doing(one), one.published, one.attempts) for one in found]
        console.table(("request", "state", "tokens", "attempts"), rows)
    if len(found) == len(arguments.id):
        return EXIT_OK
    return EXIT_PARTIAL if found else EXIT_ERROR


def _doing(status: RequestStatus) -> str:
    """The state of a request; for a claimed one what it does in its worker, for a turn its wait."""
    if status.waits_for is not None:
        return f"{status.state}, waits for {status.waits_for}"
    if status.activity is None:
        return str(status.state)
    is_waiting = status.activity is Activity.WAITING
    return "waiting in worker" if is_waiting else str(status.activity)


def add_top(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire top`."""
    parser.add_argument(
        "--interval",
        type=not_negative,
        default=2.0,
        metavar="SECONDS",
        help="time between two prints [2]",
    )
    parser.add_argument("--count", type=positive, metavar="N", help="stop after printing N times")
    add_server(parser)


def run_top(arguments: argparse.Namespace, console: Console) -> int:
    """Prints the state every --interval seconds, in place on a terminal, until interrupted."""
    brokers = sides_of(Observer, arguments)
    in_place = sys.stdout.isatty() and not console.is_json
    looks = 0
    while True:
        view = _look(brokers)
        if in_place:
            console.clear()
        _show(view, console)
        console.piece("")
        looks += 1
        if arguments.count is not None and looks >= arguments.count:
            return EXIT_OK
        time.sleep(arguments.interval)


def add_queue(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire queue`."""
    actions = parser.add_subparsers(dest="action", required=True)
    pause = actions.add_parser("pause", help="stop claims; running requests continue")
    pause.add_argument("reason", nargs="?", default="", help="shown to operators")
    add_server(pause)
    add_server(actions.add_parser("resume", help="end a pause"))
    expire_help = "end requests that have waited past their deadline, as workers do"
    add_server(actions.add_parser("expire", help=expire_help))


def run_queue(arguments: argparse.Namespace, console: Console) -> int:
    """Prints whether the queue is now paused; for `expire`, the requests that it has ended."""
    brokers = sides_of(Operator, arguments)
    if arguments.action == "expire":
        return _expire(brokers, console)
    for broker in brokers:
        if arguments.action == "pause":
            broker.pause(arguments.reason)
        else:
            broker.resume()
    reason = brokers[0].pause_reason()
    state = "running" if reason is None else f"paused  {reason}".rstrip()
    value = {"queue": arguments.queue, "paused": reason is not None, "reason": reason}
    console.data(value, f"{arguments.queue}  {state}")
    return EXIT_OK


def _expire(brokers: Sequence[Operator], console: Console) -> int:
    for broker in brokers:
        while ended := broker.expire():
            for request in ended:
                value = {"request_id": request.request_id, "state": str(request.state)}
                console.data(value, f"{request.request_id}  {request.state}")
    return EXIT_OK


def add_dead(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire dead`."""
    actions = parser.add_subparsers(dest="action", required=True)
    ls = actions.add_parser("ls", help="list dead letters, newest first")
    ls.add_argument(
        "--count", type=positive, default=100, metavar="N", help="at most this many [100]"
    )
    add_server(ls)
    show = actions.add_parser("show", help="print one letter with its request")
    show.add_argument("id", help="id of the request or of the letter")
    add_server(show)
    requeue = actions.add_parser("requeue", help="queue their requests again, under the same ids")
    requeue.add_argument("id", nargs="+", help="id of the request or of the letter")
    requeue.add_argument(
        "--keep-tokens", action="store_true", help="continue after the published tokens"
    )
    add_server(requeue)
    purge = actions.add_parser("purge", help="delete letters; their requests stay ended")
    purge.add_argument("id", nargs="*", help="id of the request or of the letter")
    purge.add_argument("--all", action="store_true", help="every letter")
    add_server(purge)


def run_dead(arguments: argparse.Namespace, console: Console) -> int:
    """Runs the chosen action on dead letters."""
    brokers = sides_of(Operator, arguments)
    if arguments.action == "purge" and arguments.all != (not arguments.id):
        console.complain("purge takes either ids or --all")
        return EXIT_USAGE
    if arguments.action == "purge" and arguments.all:
        count = sum(_purge_all(broker) for broker in brokers)
        console.data({"purged": count}, f"purged {count}")
        return EXIT_OK
    count = arguments.count if arguments.action == "ls" else MAX_LETTERS
    letters = [(letter, b) for b in brokers for letter in b.dead_letters(count=count)]
    if arguments.action == "ls":
        return _list([letter for letter, _ in letters], console)
    wanted = [arguments.id] if arguments.action == "show" else arguments.id
    good = []
    for name in wanted:
        try:
            letter, broker = _letter(letters, name)
            _act(arguments, broker, letter, console)
            good.append(True)
        except UnknownRequest as error:
            console.complain(error)
            good.append(False)
    if all(good):
        return EXIT_OK
    return EXIT_PARTIAL if any(good) else EXIT_ERROR


def _letter(letters: list[tuple[DeadLetter, Operator]], name: str) -> tuple[DeadLetter, Operator]:
    """The newest letter with this id or request id, and its broker. UnknownRequest if none."""
    for letter, broker in letters:
        if name in (letter.request_id, letter.entry_id):
            return letter, broker
    raise UnknownRequest(name, "no such dead letter")


def _act(
    arguments: argparse.Namespace, broker: Operator, letter: DeadLetter, console: Console
) -> None:
    if arguments.action == "show":
        console.data(_record(letter) | {"original": _readable(letter.original)})
    elif arguments.action == "requeue":
        state = broker.requeue(letter, keep_tokens=arguments.keep_tokens)
        value = {"request_id": letter.request_id, "state": str(state)}
        console.data(value, f"{letter.request_id}  {state}")
    else:
        broker.purge([letter.entry_id])
        console.data({"purged": letter.request_id}, f"{letter.request_id}  purged")


def _list(letters: list[DeadLetter], console: Console) -> int:
    if console.is_json:
        for letter in letters:
            console.data(_record(letter))
        return EXIT_OK
    rows = [(one.entry_id, one.request_id, one.attempts, one.reason) for one in letters]
    console.table(("letter", "request", "attempts", "reason"), rows)
    return EXIT_OK


def _record(letter: DeadLetter) -> dict[str, object]:
    return {
        "letter": letter.entry_id,
        "request_id": letter.request_id,
        "reason": letter.reason,
        "attempts": letter.attempts,
    }


def _readable(original: bytes) -> object:
    """The request as a map, or the bytes in hex if they cannot be decoded."""
    from quire.errors import ProtocolError
    from quire.wire.codec import unpack_map

    try:
        return plain(unpack_map(original))
    except ProtocolError:
        return original.hex()


def _purge_all(broker: Operator) -> int:
    # By id, and not all at once: a letter that arrives now has not been seen by the operator.
    return broker.purge([letter.entry_id for letter in broker.dead_letters(count=MAX_LETTERS)])


def _look(brokers: Sequence[Observer]) -> QueueView:
    keys = [broker.keys for broker in brokers]
    parts = (Part.SHARDS, Part.SHARING, Part.TENANTS)
    return view_queues(brokers[0].connection, {keys[0].queue: keys}, *parts)[0]


def _show(view: QueueView, console: Console) -> None:
    shards = view.shards
    if console.is_json:
        for number, shard in enumerate(shards):
            derived = {
                "num_lost": shard.num_lost, "activities": plain(shard.activities),
                "sharing": plain(view.sharing[number]), "tenants": plain(view.tenants[number]),
            }  # fmt: skip
            console.data({"shard": number} | plain(shard) | derived)
        return
    sums = [
        (number, s.num_queued, s.num_leases, s.num_scheduled, s.num_expired_leases,
         s.num_dead_letters, "PAUSED" if s.is_paused else "no")
        for number, s in enumerate(shards)
    ]  # fmt: skip
    header = (
        "shard",
        "waiting",
        "running",
        "scheduled",
        "expired_leases",
        "dead_letters",
        "paused",
    )
    console.table_of_shards(header, sums, len(shards))
    for number, shard in enumerate(shards):
        if told := _told(shard):
            console.data(None, f"{of_shard(number, len(shards))}{told}")
    console.data(None, "")
    streams = [
        (
            number,
            ingress.priority.name.lower(),
            ingress.num_queued,
            f"{ingress.undelivered_seconds:.1f}" if ingress.num_queued else "-",
        )
        for number, shard in enumerate(shards)
        for ingress in reversed(shard.ingress)
    ]
    console.table_of_shards(("shard", "priority", "waiting", "oldest_s"), streams, len(shards))
    for number, shard in enumerate(shards):
        if shard.num_lost:
            detail = "queued requests are lost: no rank set has them; see `quire doctor`"
            prefix = of_shard(number, len(shards))
            console.data(None, f"{prefix}at least {shard.num_lost} {detail}")
        if shard.policy:
            console.data(None, f"{of_shard(number, len(shards))}ranked by {shard.policy}")
    show_tenants(view, console)
    console.data(None, "")
    _show_workers(view, console)


def _show_workers(view: QueueView, console: Console) -> None:
    """Prints what each shard knows of workers that were seen lately, and the number of others."""
    known = [
        (number, worker)
        for number, shard in enumerate(view.shards)
        for worker in sorted(shard.workers, key=lambda worker: worker.name)
    ]
    shown = [
        (
            number,
            worker.name,
            worker.shown_state,
            worker.model or "-",
            few(sorted(worker.adapters)) or "-",
            *_load(worker.load),
            f"{worker.seen_seconds:.1f}",
        )
        for number, worker in known
        if not worker.is_gone
    ]
    header = ("shard", "worker", "state", "model", "adapters", *_LOAD, "seen_s")
    console.table_of_shards(header, shown, len(view.shards))
    if gone := len(known) - len(shown):
        console.data(None, f"{gone} more, not seen for {GONE_SECONDS / 60:g} minutes")


def _told(shard: ShardState) -> str:
    """What the running requests do, as the workers told it; empty if none told anything.

    The numbers are some seconds old, so they need not add up to those that run now.
    """
    counts = [
        f"{count} {'waiting in a worker' if one is Activity.WAITING else one}"
        for one, count in shard.activities.items()
        if count
    ]
    if not counts:
        return ""
    seconds = max(worker.seen_seconds for worker in shard.workers if worker.is_alive)
    return f"{', '.join(counts)}, as workers told up to {seconds:.1f} s ago"


def _load(load: Mapping[str, float]) -> tuple[str, str, str]:
    """The cells of _LOAD; a dash for what a worker does not tell."""
    claims, usage, tokens = (load.get(name) for name in ("claims", "kv_usage", "generated"))
    return (
        "-" if claims is None else f"{claims:.0f}",
        "-" if usage is None else f"{usage:.0%}",
        "-" if tokens is None else f"{tokens:.0f}",
    )
