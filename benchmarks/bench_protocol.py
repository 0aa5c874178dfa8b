"""The cost of the protocol, as ratios of two sides that alternate on one private Redis.

    python -m benchmarks.bench_protocol [--rounds 9] [--queued 1000000] [--only commits,claims]
                                        [--fairness]

- Commits: fenced commits of 64 requests with one token each, as a worker sends them, compared with
  a plain pipeline that adds the same entries with the same ids and without fencing.
- Claims: the time to read and claim one request from a long queue, compared with a short one. With
  `--fairness`, tenants take turns by tokens in both.
- Memory: the memory of a queued request without its body.
- Streams: see bench_streams.

Each measurement has a gate that refuses wrong results. The figures are also written to --json, or
to the file that BENCH_PROTOCOL_JSON names.
"""

import argparse
import json
import operator
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis

from benchmarks.bench_streams import measure_streams
from benchmarks.common.arguments import names_of
from benchmarks.common.queue_loader import QueueLoader, request_id_of
from quire import Broker, Fairness, LocalRedis, connect
from quire.cli.usage import positive
from quire.queue.claim.claim import Claimed
from quire.queue.publish.commit import CommitItem, CommitStatus
from quire.queue.request.claims import Claim
from quire.wire.codec import pack_ids

#: Requests of one commit, and commits of one round.
NUM_ROWS, NUM_TICKS = 64, 60
NUM_TOKENS = NUM_ROWS * NUM_TICKS

#: The text of each token: a word piece of usual length.
TEXT = " word"

#: A prefix hash of usual length for the plain side, which does not need one and computes none.
PREFIX = "12345678.12345678"

#: Requests in the short queue, and claims per round.
SHORT_QUEUE, NUM_CLAIMS = 1_000, 200

#: The number of requests with a deadline whose memory is measured.
NUM_WITH_DEADLINE = 20_000

PARTS = ("commits", "claims", "streams")

#: The targets: part, figure, and its lower or upper bound.
TARGETS = (
    ("commits", "fenced_over_plain", ">=", 1.0),
    ("queue", "long_over_short", "<=", 1.5),
    ("queue", "bytes_per_request", "<=", 1200),
    ("queue", "bytes_per_request_with_deadline", "<=", 1200),
)

Figures = dict[str, object]


@contextmanager
def private_server() -> Iterator[redis.Redis]:
    """A real server of our own, and not that of QUIRE_REDIS_URL, which may hold other data."""
    os.environ.pop("QUIRE_REDIS_URL", None)
    with LocalRedis.start() as server:
        if not server.is_real:
            raise SystemExit("a fake has nothing to measure: install redis-server")
        with connect(server.url) as connection:
            yield connection


def measure_commits(connection: redis.Redis, *, num_rounds: int) -> Figures:
    """Tokens per second of fenced commits and of a plain pipeline, and their ratio."""
    broker = Broker(connection, queue="commits")
    claims = [answer.claim for answer in _claimed(broker, NUM_ROWS)]
    sides: dict[str, Callable[[Sequence[CommitItem]], None]] = {
        "fenced": lambda items: _commit_tick(broker, items),
        "plain": lambda items: _plain_tick(connection, items),
    }
    commands = {"fenced": "evalsha", "plain": "xadd"}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    server_us: dict[str, list[float]] = {name: [] for name in sides}
    # One extra round: the first is a warm-up and is discarded.
    for number in range(num_rounds + 1):
        for name in sorted(sides, reverse=bool(number % 2)):
            connection.config_resetstat()
            first = number * NUM_TICKS
            ticks = [_items(claims, tick) for tick in range(first, first + NUM_TICKS)]
            began = time.perf_counter()
            for items in ticks:
                sides[name](items)
            seconds[name].append(time.perf_counter() - began)
            server_us[name].append(_server_us(connection, commands[name]) / NUM_TOKENS)
    _check_commits(broker, claims, (num_rounds + 1) * NUM_TICKS)
    pairs = zip(seconds["fenced"][1:], seconds["plain"][1:], strict=True)
    return {
        "fenced_tokens_per_second": NUM_TOKENS / statistics.median(seconds["fenced"][1:]),
        "plain_tokens_per_second": NUM_TOKENS / statistics.median(seconds["plain"][1:]),
        "server_us_per_token": {name: statistics.median(us[1:]) for name, us in server_us.items()},
        "fenced_over_plain": statistics.median(plain / fenced for fenced, plain in pairs),
    }


def measure_queue(
    connection: redis.Redis, *, num_queued: int, num_rounds: int, by_tokens: bool = False
) -> Figures:
    """Latency of a claim from a long and a short queue, and the memory of a queued request."""
    short, long = (Broker(connection, queue=name) for name in ("short", "long"))
    loaders = {broker: QueueLoader(broker) for broker in (short, long)}
    for broker in loaders:
        broker.set_fairness(Fairness(by_tokens=by_tokens))
    loaders[short].fill(SHORT_QUEUE)
    before = _used_memory(connection)
    began = time.perf_counter()
    loaders[long].fill(num_queued)
    load_seconds = time.perf_counter() - began
    memory = (_used_memory(connection) - before) / num_queued - loaders[long].body_bytes
    for broker in loaders:
        broker.ensure_groups()
    latencies: dict[Broker, list[float]] = {short: [], long: []}
    next_one = {short: 0, long: 0}
    for number in range(num_rounds + 1):
        for broker in (short, long) if number % 2 else (long, short):
            latencies[broker].append(_claim_latency(broker, next_one[broker]))
            next_one[broker] += NUM_CLAIMS
            loaders[broker].fill(NUM_CLAIMS)
    assert sum(long.queue_depth().values()) == num_queued, "the queue has another length"
    pairs = zip(latencies[long][1:], latencies[short][1:], strict=True)
    return {
        "queued": num_queued,
        "by_tokens": by_tokens,
        "submits_per_second": num_queued / load_seconds,
        "claim_us_short": 1e6 * statistics.median(latencies[short][1:]),
        "claim_us_long": 1e6 * statistics.median(latencies[long][1:]),
        "long_over_short": statistics.median(slow / quick for slow, quick in pairs),
        "bytes_per_request": memory,
        "bytes_per_request_with_deadline": _memory_with_deadline(connection),
        "body_bytes": loaders[long].body_bytes,
    }


def _claimed(broker: Broker, count: int) -> list[Claimed]:
    broker.ensure_groups()
    QueueLoader(broker).fill(count)
    answers = broker.claim(broker.peek(count=count, block_seconds=0))
    claimed = [answer for answer in answers if isinstance(answer, Claimed)]
    assert len(claimed) == count, "not all requests could be claimed"
    return claimed


def _items(claims: Sequence[Claim], tick: int) -> list[CommitItem]:
    ends = (len(TEXT),)
    return [
        CommitItem(claim, tick, (_token(tick, row),), TEXT, text_ends=ends)
        for row, claim in enumerate(claims)
    ]


def _commit_tick(broker: Broker, items: Sequence[CommitItem]) -> None:
    for reply in broker.commit(items):
        assert reply.status is CommitStatus.OK, reply


def _plain_tick(connection: redis.Redis, items: Sequence[CommitItem]) -> None:
    with connection.pipeline(transaction=False) as pipeline:
        for row, item in enumerate(items):
            ids, ends = pack_ids(item.token_ids), pack_ids(item.text_ends)
            fields = {"from": item.start, "ids": ids, "text": item.text, "ends": ends}
            fields["prefix"] = PREFIX
            pipeline.xadd(f"plain:{row}", fields, id=f"{item.start}-1")
        replies = pipeline.execute()
    assert len(replies) == NUM_ROWS


def _token(tick: int, row: int) -> int:
    return (7919 * tick + 104_729 * row) % 150_000


def _check_commits(broker: Broker, claims: list[Claim], num_ticks: int) -> None:
    """The gate: both sides have all tokens in order, and the same ones."""
    for row, claim in enumerate(claims):
        wanted = [_token(tick, row) for tick in range(num_ticks)]
        found: list[int] = []
        while len(found) < num_ticks:
            seen = {claim.request_id: len(found)}
            read = broker.read_output(seen, block_seconds=None)
            found += [t for chunk in read[claim.request_id].chunks for t in chunk.token_ids]
        assert found == wanted, f"{claim.request_id} has other tokens"
        entries = broker.connection.xrange(f"plain:{row}")
        assert [fields[b"ids"] for _, fields in entries] == [pack_ids((t,)) for t in wanted]


def _claim_latency(broker: Broker, first: int) -> float:
    """Median seconds of one read and claim. The gate: requests arrive in queue order."""
    seconds = []
    for number in range(first, first + NUM_CLAIMS):
        began = time.perf_counter()
        entries = broker.peek(count=1, block_seconds=0)
        (answer,) = broker.claim(entries)
        seconds.append(time.perf_counter() - began)
        assert isinstance(answer, Claimed), answer
        assert answer.claim.request_id == request_id_of(number), "a request out of its turn"
    return statistics.median(seconds)


def _memory_with_deadline(connection: redis.Redis) -> float:
    loader = QueueLoader(Broker(connection, queue="deadlines"), has_deadline=True)
    before = _used_memory(connection)
    loader.fill(NUM_WITH_DEADLINE)
    return (_used_memory(connection) - before) / NUM_WITH_DEADLINE - loader.body_bytes


def _judged(figures: dict[str, dict[str, object]]) -> list[dict[str, object]]:
    """Each target whose part was measured, with its figure and whether it was met."""
    compare = {">=": operator.ge, "<=": operator.le}
    return [
        {"figure": name, "value": value, "target": f"{sign} {bound}",
         "met": compare[sign](value, bound)}
        for part, name, sign, bound in TARGETS
        if (value := figures.get(part, {}).get(name)) is not None
    ]  # fmt: skip


def _used_memory(connection: redis.Redis) -> int:
    # Without the buffers of clients, which vary: what is left is the data set and its indexes.
    found = connection.memory_stats()
    return int(found["total.allocated"]) - int(found["clients.normal"])


def _server_us(connection: redis.Redis, command: str) -> float:
    """Microseconds that the server has spent in a command since CONFIG RESETSTAT."""
    return float(connection.info("commandstats")[f"cmdstat_{command}"]["usec"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--queued", type=positive, default=1_000_000)
    parser.add_argument(
        "--only", type=names_of("part", PARTS), default=",".join(PARTS), help="some of the parts"
    )
    help_ = "tenants take turns by tokens, in the part `claims`"
    parser.add_argument("--fairness", action="store_true", help=help_)
    file = os.environ.get("BENCH_PROTOCOL_JSON")
    parser.add_argument("--json", type=Path, default=file, help="write the figures there as well")
    arguments = parser.parse_args()
    figures: dict[str, dict[str, object]] = {}
    wanted = arguments.only
    with private_server() as connection:
        version = str(connection.info("server")["redis_version"])
        if "commits" in wanted:
            figures["commits"] = measure_commits(connection, num_rounds=arguments.rounds)
        if "streams" in wanted:
            figures["streams"] = measure_streams(connection)
        if "claims" in wanted:
            figures["queue"] = measure_queue(
                connection,
                num_queued=arguments.queued,
                num_rounds=arguments.rounds,
                by_tokens=arguments.fairness,
            )
    record: dict[str, object] = {**figures, "targets": _judged(figures)}
    record["machine"] = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "redis": version,
        "redis_py": redis.__version__,
    }
    print(json.dumps(record, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
