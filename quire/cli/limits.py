"""The verb `limits`: what a queue accepts before it refuses, and how its tenants share it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

from quire.cli.console import Console, add_server, not_negative, sides_of
from quire.cli.exit_codes import EXIT_OK
from quire.cli.usage import limit
from quire.errors import InvalidRequest
from quire.queue.control.control import ENDS_KEPT, Control
from quire.queue.control.defaults import QueueDefaults
from quire.queue.rank.fairness import MAX_WEIGHT, Fairness
from quire.queue.roles import Operator
from quire.wire.protocol import is_tenant_name

#: Shown for a limit that nobody has set.
NONE = "-"


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire limits`."""
    parser.add_argument("--requests", type=limit, metavar="N", help="most waiting requests")
    parser.add_argument("--tokens", type=limit, metavar="N", help="most tokens of waiting requests")
    help_ = "most open requests of any one tenant, waiting or running"
    parser.add_argument("--per-tenant", type=limit, metavar="N", help=help_)
    help_ = "the same for this tenant alone; N is 0 for no limit, empty to use --per-tenant again"
    parser.add_argument(
        "--of", type=_of_tenant, action="append", default=[], metavar="TENANT=N", help=help_
    )
    help_ = "most tokens that any one tenant may submit per minute, prompt and answer"
    parser.add_argument("--tokens-per-minute", type=limit, metavar="N", help=help_)
    help_ = "the same for this tenant alone; N is 0 for no limit, empty to use --tokens-per-minute"
    parser.add_argument(
        "--tokens-per-minute-of",
        type=_of_tenant,
        action="append",
        default=[],
        metavar="TENANT=N",
        help=help_,
    )
    help_ = "`tokens`: the tenants of a class take turns by tokens; `none`: by the policy alone"
    parser.add_argument("--fairness", choices=("tokens", "none"), help=help_)
    help_ = f"a tenant's share of the tokens, 1 to {MAX_WEIGHT}, 1 for all others; empty removes it"
    parser.add_argument(
        "--weight", type=_weight_of, action="append", default=[], metavar="TENANT=N", help=help_
    )
    help_ = "deadline of requests without one, from when they may be claimed; 0 for none"
    parser.add_argument("--request-timeout", type=not_negative, metavar="SECONDS", help=help_)
    help_ = "target latency of requests without one, from when they may be claimed; 0 for none"
    parser.add_argument("--target-latency", type=not_negative, metavar="SECONDS", help=help_)
    help_ = "most tokens of answers to requests without `max_tokens`; 0: what the context has left"
    parser.add_argument("--default-max-tokens", type=limit, metavar="N", help=help_)
    help_ = f"about how many ends are kept for readers, {ENDS_KEPT} unless set; 0 tells none"
    parser.add_argument("--ends", type=limit, metavar="N", help=help_)
    help_ = "keep requests of up to so many bytes, prompts included, with their results; 0: none"
    parser.add_argument("--keep-prompts", type=limit, metavar="BYTES", help=help_)
    add_server(parser)
    parser.epilog = (
        "Without a flag it shows the limits. 0 removes a limit; a limit without its flag stays. "
        "Each shard applies them separately: a queue of four shards accepts four times as much."
    )


def run_limits(arguments: argparse.Namespace, console: Console) -> int:
    """Changes the given limits, and prints all limits as they are then."""
    brokers = sides_of(Operator, arguments)
    given = {
        "requests": arguments.requests,
        "tokens": arguments.tokens,
        "per_tenant": arguments.per_tenant,
        "rate": arguments.tokens_per_minute,
    }
    plain = {name: value or None for name, value in given.items() if value is not None}
    for broker in brokers:
        before = broker.control()
        limits = replace(
            before.limits,
            **plain,
            tenants=_merged(before.limits.tenants, arguments.of),
            rates=_merged(before.limits.rates, arguments.tokens_per_minute_of),
        )
        if limits != before.limits:
            broker.set_limits(limits)
        _share(broker, before.fairness, arguments)
        _set_defaults(broker, before.defaults, arguments)
        _keep(broker, before, arguments)
    _show(brokers, console)
    return EXIT_OK


def _share(broker: Operator, before: Fairness, arguments: argparse.Namespace) -> None:
    by_tokens = before.by_tokens
    if arguments.fairness:
        by_tokens = arguments.fairness == "tokens"
    fairness = Fairness(by_tokens, _merged(before.weights, arguments.weight))
    if fairness != before:
        broker.set_fairness(fairness)


def _set_defaults(broker: Operator, before: QueueDefaults, arguments: argparse.Namespace) -> None:
    given = {
        "request_timeout_seconds": arguments.request_timeout,
        "target_latency_seconds": arguments.target_latency,
        "max_tokens": arguments.default_max_tokens,
    }
    plain = {name: value or None for name, value in given.items() if value is not None}
    try:
        defaults = replace(before, **plain)
    except ValueError as error:
        raise InvalidRequest("defaults", str(error)) from None
    if defaults != before:
        broker.set_defaults(defaults)


def _keep(broker: Operator, before: Control, arguments: argparse.Namespace) -> None:
    kinds = (
        ("ends", arguments.ends, before.ends_kept, broker.keep_ends),
        ("keep_prompts", arguments.keep_prompts, before.prompts_kept, broker.keep_prompts),
    )
    for name, wanted, known, keep in kinds:
        try:
            if wanted is not None and wanted != known:
                keep(wanted)
        except ValueError as error:
            raise InvalidRequest(name, str(error)) from None


def _merged(
    before: Mapping[str, int], changes: Sequence[tuple[str, int | None]]
) -> Mapping[str, int]:
    after: dict[str, int | None] = {**before, **dict(changes)}
    return {tenant: limit for tenant, limit in after.items() if limit is not None}


def _show(brokers: Sequence[Operator], console: Console) -> None:
    found = [(broker.keys.shard, broker.control(), broker.backlog()) for broker in brokers]
    if console.is_json:
        for shard, of, backlog in found:
            console.data(
                {"shard": shard, "limits": of.limits, "fairness": of.fairness, "backlog": backlog,
                 "defaults": of.defaults, "ends": of.ends_kept, "keep_prompts": of.prompts_kept}
            )  # fmt: skip
        return
    header = ("shard", "requests", "tokens", "waiting_tokens", "per_tenant", "per_minute",
              "fairness", "timeout_s", "target_s", "max_tokens", "keep_prompts",
              "ends")  # fmt: skip
    rows = [
        (shard, _text(of.limits.requests), _text(of.limits.tokens), backlog.tokens,
         _text(of.limits.per_tenant), _text(of.limits.rate),
         "tokens" if of.fairness.by_tokens else NONE,
         _seconds(of.defaults.request_timeout_seconds),
         _seconds(of.defaults.target_latency_seconds),
         _text(of.defaults.max_tokens), of.prompts_kept, of.ends_kept)
        for shard, of, backlog in found
    ]  # fmt: skip
    console.table(header, rows)
    console.data(None, "")
    tenants = [
        (shard, tenant, _text(of.limits.of(tenant)), _text(of.limits.rate_of(tenant)),
         of.fairness.weights.get(tenant, 1), backlog.tenants.get(tenant, 0))
        for shard, of, backlog in found
        for tenant in sorted({*of.tenants, *backlog.tenants})
    ]  # fmt: skip
    console.table(("shard", "tenant", "limit", "per_minute", "weight", "open"), tenants)


def _seconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{seconds:g}"


def _text(limit: int | None) -> str:
    return NONE if limit is None else str(limit)


def _weight_of(text: str) -> tuple[str, int | None]:
    """The type of `TENANT=N`: the tenant and its weight, or None for that of all others."""
    tenant, weight = _of_tenant(text)
    if weight is not None and not 1 <= weight <= MAX_WEIGHT:
        raise argparse.ArgumentTypeError(f"a weight is from 1 to {MAX_WEIGHT}")
    return tenant, weight


def _of_tenant(text: str) -> tuple[str, int | None]:
    """The type of `TENANT=N`: the tenant and its limit, or None to use --per-tenant."""
    tenant, equals, number = text.partition("=")
    if not equals or not is_tenant_name(tenant):
        raise argparse.ArgumentTypeError(f"{text} is not a tenant's name, `=` and a number")
    return tenant, limit(number) if number else None
