"""The verb `cancel`: ends requests by id, all requests of a group, or all of a tenant."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from quire.cli.console import Console, add_server, sides_of
from quire.cli.exit_codes import EXIT_ERROR, EXIT_OK, EXIT_PARTIAL, EXIT_USAGE
from quire.errors import UnknownRequest
from quire.queue.roles import Operator
from quire.queue.submit.routing import check_group_name, shard_of

#: Requests cancelled by one call; the server is busy with it for some milliseconds.
CANCELS_PER_CALL = 256


def add_cancel(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire cancel`."""
    parser.add_argument("id", nargs="*", help="ids of the requests")
    parser.add_argument("--group", metavar="NAME", help="every open request of the group")
    parser.add_argument("--tenant", metavar="NAME", help="every open request of the tenant")
    add_server(parser)


def run_cancel(arguments: argparse.Namespace, console: Console) -> int:
    """Cancels requests, and prints the new state of each."""
    choices = (arguments.id, arguments.group, arguments.tenant)
    if sum(one not in ([], None) for one in choices) != 1:
        console.complain("cancel takes either ids, or --group, or --tenant")
        return EXIT_USAGE
    num_chosen = num_cancelled = 0
    unknown: list[str] = []
    for broker, ids in _chosen(sides_of(Operator, arguments), arguments):
        num_chosen += len(ids)
        for start in range(0, len(ids), CANCELS_PER_CALL):
            part = ids[start : start + CANCELS_PER_CALL]
            states = broker.cancel_many(part)
            for request_id, state in states.items():
                value = {"request_id": request_id, "state": str(state)}
                console.data(value, f"{request_id}  {state}")
            num_cancelled += len(states)
            # An unknown id from a group or tenant is no error: its record has just expired.
            unknown += [one for one in part if one not in states and arguments.id]
    if not num_chosen:
        # Not an error, but printed, because the name may be misspelt.
        kind = "group" if arguments.tenant is None else "tenant"
        console.note(f"the {kind} {arguments.group or arguments.tenant} has no open request")
    for request_id in unknown:
        console.complain(UnknownRequest(request_id))
    if not unknown:
        return EXIT_OK
    return EXIT_PARTIAL if num_cancelled else EXIT_ERROR


def _chosen(
    brokers: Sequence[Operator], arguments: argparse.Namespace
) -> Iterator[tuple[Operator, Sequence[str]]]:
    """Each shard's broker with the ids of its requests to cancel."""
    for shard, broker in enumerate(brokers):
        if arguments.group is not None:
            yield broker, broker.open_members(check_group_name(arguments.group))
        elif arguments.tenant is not None:
            yield broker, broker.open_of(arguments.tenant)
        else:
            yield broker, [one for one in arguments.id if shard_of(one, len(brokers)) == shard]
