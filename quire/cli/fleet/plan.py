"""The verb `plan`: how many workers and how much Redis a load needs, from measured numbers.

docs/how-to/capacity.md has the numbers of Redis. Those of a worker depend on model and device:
`quire bench` measures them.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from quire.cli.console import Console, add_json
from quire.cli.exit_codes import EXIT_OK
from quire.cli.usage import limit, positive
from quire.errors import InvalidRequest

#: Redis' memory for an ended request: a base, and the output. From 5.0 kB with 64 tokens and 9.5 kB
#: with 400.
ENDED_BYTES = 4_140.0
OUTPUT_TOKEN_BYTES = 13.4
#: For a waiting request: a base, and the prompt as text. From 1.4 kB with 10 words and 4.1 kB with
#: 500. A word is 1.3 tokens.
WAITING_BYTES = 1_345.0
PROMPT_TOKEN_BYTES = 4.2
#: For a request that is kept after its end, prompt included: a base, and the prompt as text. From
#: 0.36 kB with 10 words and 3.22 kB with 500.
KEPT_BYTES = 300.0
KEPT_TOKEN_BYTES = 4.49
#: Redis' processor time of a whole request, from its submit to its end.
REDIS_SECONDS = 350e-6

#: Which share of a worker, and of a core of Redis, a plan uses. Requests arrive in bursts, and
#: above this share waiting times grow faster than the load.
WORKER_SHARE = 0.7
REDIS_SHARE = 0.5
#: The largest number of a plan; sums of larger ones would not be finite.
MAX_NUMBER = 1e12

#: Redis' memory beside its data: fragmentation, buffers, and pages that change during a save.
MEMORY_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class Load:
    """What comes: requests per second, tokens of each, and how long things stay in Redis.

    `waiting` is the most requests that wait at once. `keep_prompts` is the setting of the queue: up
    to how many bytes a request is kept with its results.
    """

    requests_per_second: float
    prompt_tokens: float
    output_tokens: float
    kept_seconds: float
    waiting: int = 0
    keep_prompts: int = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """What one worker does alone, in tokens per second: of outputs, and of prompts if measured."""

    output_tokens: float
    prompt_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Price:
    """Money for workers alone: per hour, and per million output tokens.

    `per_million` spreads the hour over the tokens of the load; None without any. `busy_per_million`
    is that of a worker which computes all the time, so no plan is below it.
    """

    per_hour: float
    per_million: float | None
    busy_per_million: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a load needs. `redis_cores` above one core ask for shards on several servers.

    `redis_bytes` is for `maxmemory`; `busy_workers` are those that compute all the time, and
    `workers` leaves room and one to spare. `price` is None unless that of a worker is known.
    """

    busy_workers: float
    workers: int
    ended_requests: int
    ended_bytes: int
    waiting_bytes: int
    redis_bytes: int
    redis_cores: float
    redis_servers: int
    price: Price | None = None


def plan_for(load: Load, speed: Speed, *, worker_price: float | None = None) -> Plan:
    """The plan for a load. `worker_price` is money for an hour of one worker, in any currency."""
    seconds = load.output_tokens / speed.output_tokens
    if speed.prompt_tokens is not None:
        seconds += load.prompt_tokens / speed.prompt_tokens
    busy = load.requests_per_second * seconds
    ended = math.ceil(load.requests_per_second * load.kept_seconds)
    prompt_bytes = PROMPT_TOKEN_BYTES * load.prompt_tokens
    ended_bytes = math.ceil(
        ended * (ENDED_BYTES + OUTPUT_TOKEN_BYTES * load.output_tokens + _kept_bytes(load))
    )
    waiting_bytes = math.ceil(load.waiting * (WAITING_BYTES + prompt_bytes))
    cores = load.requests_per_second * REDIS_SECONDS
    workers = math.ceil(busy / WORKER_SHARE) + 1
    return Plan(
        busy_workers=busy,
        workers=workers,
        ended_requests=ended,
        ended_bytes=ended_bytes,
        waiting_bytes=waiting_bytes,
        redis_bytes=math.ceil(MEMORY_FACTOR * (ended_bytes + waiting_bytes)),
        redis_cores=cores,
        redis_servers=max(1, math.ceil(cores / REDIS_SHARE)),
        price=None if worker_price is None else _price(load, busy, workers, worker_price),
    )


def _kept_bytes(load: Load) -> float:
    """The bytes of the prompt of an ended request; 0 if it is deleted at the end."""
    num_bytes = KEPT_BYTES + KEPT_TOKEN_BYTES * load.prompt_tokens
    return num_bytes if num_bytes <= load.keep_prompts else 0.0


def _price(load: Load, busy: float, workers: int, worker_price: float) -> Price:
    millions_per_hour = load.requests_per_second * load.output_tokens * 3600 / 1e6
    if not millions_per_hour:
        return Price(workers * worker_price, None, None)
    return Price(
        workers * worker_price,
        workers * worker_price / millions_per_hour,
        busy * worker_price / millions_per_hour,
    )


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire plan`."""
    parser.epilog = "for instance: quire plan --rate 20 --output-tokens 300 --worker-speed 2500"
    numbers = (
        ("--rate", "requests per second, over the busiest hour [1]", 1.0),
        ("--prompt-tokens", "tokens of a prompt [500]", 500.0),
        ("--output-tokens", "tokens of an output [300]", 300.0),
        (
            "--worker-speed",
            "output tokens per second of one worker; measure yours: quire bench [100]",
            100.0,
        ),
        ("--prompt-speed", "prompt tokens per second of one worker; unset: prompts are free", 0.0),
        ("--kept", "seconds for which results stay: retention_seconds [3600]", 3600.0),
    )
    for flag, help_, default in numbers:
        parser.add_argument(flag, type=_number, default=default, metavar="N", help=help_)
    help_ = "as `quire limits --keep-prompts`; unset: prompts are deleted at the end"
    parser.add_argument("--keep-prompts", type=limit, default=0, metavar="BYTES", help=help_)
    parser.add_argument(
        "--waiting", type=positive, default=1000, metavar="N", help="most that wait at once [1000]"
    )
    help_ = "money per hour of one worker, in any currency; unset: no row of money"
    parser.add_argument("--worker-price", type=_number, metavar="N", help=help_)
    add_json(parser)


def run_plan(arguments: argparse.Namespace, console: Console) -> int:
    """Prints what the load needs. Reads nothing and asks no server."""
    load = Load(
        arguments.rate,
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.kept,
        arguments.waiting,
        arguments.keep_prompts,
    )
    if not arguments.worker_speed:
        raise InvalidRequest("--worker-speed", "must be more than 0: measure it with quire bench")
    speed = Speed(arguments.worker_speed, arguments.prompt_speed or None)
    plan = plan_for(load, speed, worker_price=arguments.worker_price)
    if console.is_json:
        console.data(plan)
        return EXIT_OK
    rows = [
        ("workers", plan.workers, f"{plan.busy_workers:.1f} busy, {WORKER_SHARE:.0%} used, 1 more"),
        ("Redis memory", size(plan.redis_bytes), f"maxmemory; {MEMORY_FACTOR:g} times its data"),
        ("- ended requests", size(plan.ended_bytes), f"{plan.ended_requests} are kept"),
        ("- waiting requests", size(plan.waiting_bytes), f"{load.waiting} at once"),
        ("Redis cores", f"{plan.redis_cores:.2f}", f"{REDIS_SECONDS * 1e6:.0f} us per request"),
        ("Redis servers", plan.redis_servers, f"{REDIS_SHARE:.0%} of a core each; one per shard"),
    ]
    if (price := plan.price) is not None:
        rows.append(("money per hour", money(price.per_hour), f"{plan.workers} workers"))
        if price.per_million is not None and price.busy_per_million is not None:
            least = f"output tokens; {money(price.busy_per_million)} if all workers were busy"
            rows.append(("money per million", money(price.per_million), least))
    console.table(("what", "needed", "because"), rows)
    return EXIT_OK


def _number(text: str) -> float:
    """The type of a flag that is a number of a plan."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to {MAX_NUMBER:g}")
    return number


def money(amount: float) -> str:
    """The amount to three digits, or to the whole unit: `0.0557`, `1.2`, `1,254`."""
    return f"{amount:.3g}" if amount < 1000 else f"{amount:,.0f}"


def size(num_bytes: int) -> str:
    """The bytes in decimal units: `1.5 GB`."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"
