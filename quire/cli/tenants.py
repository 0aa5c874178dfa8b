"""What the tenants of a queue do: in `quire status` and `quire top`, and the verb `usage`."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from quire.cli.console import Console, add_server, client_of, of_shard
from quire.cli.exit_codes import EXIT_OK
from quire.queue.view.view import QueueView

#: What is counted of each tenant.
COUNTED = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")


def add_usage(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire usage`."""
    help_ = "count ends from this time on: ISO 8601, in UTC without a zone"
    parser.add_argument("--since", type=_moment, metavar="TIME", help=help_)
    parser.add_argument("--until", type=_moment, metavar="TIME", help="count ends before this time")
    add_server(parser)
    parser.epilog = (
        "Counts the ends that the queue has kept (see `quire limits --ends`). Tokens of a request "
        "that no worker has ended are counted without its prompt."
    )


def run_usage(arguments: argparse.Namespace, console: Console) -> int:
    """Prints what each tenant has used."""
    since, until = arguments.since or 0.0, arguments.until or float("inf")
    used: dict[str, list[int]] = {}
    oldest: float | None = None
    with client_of(arguments) as client:
        for end in client.ends(timeout=0.01):
            oldest = end.ended_at if oldest is None else min(oldest, end.ended_at)
            if since <= end.ended_at < until:
                usage = end.usage
                row = used.setdefault(end.tenant, [0, 0, 0, 0])
                counted = (1, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
                row[:] = [before + more for before, more in zip(row, counted, strict=True)]
    if console.is_json:
        for tenant, row in sorted(used.items()):
            console.data({"tenant": tenant, **dict(zip(COUNTED, row, strict=True))})
        return EXIT_OK
    console.table(("tenant", *COUNTED), [(tenant, *row) for tenant, row in sorted(used.items())])
    if oldest is not None and since < oldest:
        begin = datetime.fromtimestamp(oldest, UTC).isoformat(timespec="seconds")
        console.note(f"the ends that are kept begin at {begin}")
    return EXIT_OK


def _moment(text: str) -> float:
    """The type of a time: seconds since the Unix epoch."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a time of ISO 8601") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def show_tenants(view: QueueView, console: Console) -> None:
    """Prints them as a table, unless no shard has more than one tenant, limits or turns."""
    has_limits = any(one.tokens_per_minute is not None for shown in view.tenants for one in shown)
    has_several = any(one.num_tenants > 1 for one in view.sharing)
    if not (has_limits or has_several or view.shared.by_tokens):
        return
    num_shards = len(view.sharing)
    for number, one in enumerate(view.sharing):
        if one.by_tokens:
            console.data(None, f"{of_shard(number, num_shards)}tenants take turns by tokens")
    console.data(None, "")
    rows = [
        (number, state.tenant, state.num_open, state.weight, state.ahead_tokens,
         _text(state.tokens_per_minute), _text(state.tokens_left))
        for number, shown in enumerate(view.tenants)
        for state in shown
    ]  # fmt: skip
    header = ("shard", "tenant", "open", "weight", "ahead", "per_minute", "left")
    console.table_of_shards(header, rows, num_shards)
    left_out = view.shared.num_tenants - sum(map(len, view.tenants))
    if left_out > 0:
        console.data(None, f"{left_out} more tenants with fewer open requests")


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)
