"""A thousand streams through one gateway process, compared with reading them from Redis.

    python -m benchmarks.bench_gateway [--streams 1000] [--tokens 32] [--rounds 5] [--json FILE]

Calls are made over HTTP. In place of a worker, this process commits the tokens, one per entry.

- Throughput: all tokens are in Redis; the streams are read to their ends, alternately through the
  gateway and by an event loop directly from Redis.
- Lag: tokens are committed at a steady rate, each with its time in its text; the reader compares
  that with the time of arrival. Meanwhile the processor time of the gateway is counted.
- Memory: the growth of the gateway's process while all streams are open.

The gate: each stream ends and has all its tokens in order.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks.bench_protocol import private_server
from benchmarks.bench_streams import (
    GIVE_UP_SECONDS,
    NUM_TICKS,
    TICK_SECONDS,
    Arrivals,
    check_arrivals,
    lags_of,
    read_in_a_loop,
    write,
)
from benchmarks.common.figures import machine, process_seconds
from quire import Broker, connect
from quire.cli.usage import positive
from quire.queue.claim.claim import Claimed

_Found = TypeVar("_Found")

QUEUE = "gateway"
HOST = "127.0.0.1"
#: The body of each call. No model computes its output: the writer commits tokens and the end.
CALL = json.dumps({"prompt": [1, 2, 3], "max_tokens": 64, "stream": True}).encode()


class Gateway:
    """A gateway process, and a client with many connections to it in one event loop."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        #: The largest resident size of the process, read at the first token of each stream.
        self.peak_bytes = 0
        self._pid = process.pid
        self.port = port

    def resident_bytes(self) -> int:
        """The resident size of its process."""
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    def processor_seconds(self) -> float:
        """The processor time that its process has used."""
        return process_seconds(self._pid)

    def read(self, request_ids: Sequence[str]) -> dict[str, Arrivals]:
        """Read all streams to their ends, concurrently."""
        return asyncio.run(self._all(request_ids, self._read_one))

    def call(self, count: int, *, name: str) -> list[str]:
        """Make `count` calls, disconnect, and return the ids of their requests.

        Each call has an idempotency key, so its request continues without a connection.
        """
        keys = [f"{name}-{number}" for number in range(count)]
        return list(asyncio.run(self._all(keys, self._call_one)).values())

    async def _all(
        self, names: Sequence[str], one: Callable[[str], Awaitable[_Found]]
    ) -> dict[str, _Found]:
        async with asyncio.timeout(GIVE_UP_SECONDS):
            found = await asyncio.gather(*map(one, names))
        return dict(zip(names, found, strict=True))

    async def _call_one(self, key: str) -> str:
        head = f"POST /v1/completions HTTP/1.1\r\nIdempotency-Key: {key}\r\n"
        async with aclosing(self._lines(f"{head}Content-Length: {len(CALL)}\r\n", CALL)) as lines:
            async for line in lines:
                name, _, value = line.decode().partition(": ")
                if name.lower() == "x-request-id":
                    return value.strip()
        raise AssertionError("the gateway has not named the request")

    async def _read_one(self, request_id: str) -> Arrivals:
        arrivals = []
        async for line in self._lines(f"GET /v1/requests/{request_id}/events HTTP/1.1\r\n"):
            if not line.startswith(b"data: {"):
                continue
            text = json.loads(line[6:])["choices"][0]["text"]
            if not text:
                continue
            arrivals.append((time.monotonic(), text))
            if len(arrivals) == 1:
                self.peak_bytes = max(self.peak_bytes, self.resident_bytes())
        return arrivals

    async def _lines(self, head: str, body: bytes = b"") -> AsyncGenerator[bytes, None]:
        """Yields the lines of a response, including its chunk sizes."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        try:
            writer.write(f"{head}Host: {HOST}\r\nConnection: close\r\n\r\n".encode() + body)
            async for line in reader:
                yield line
        finally:
            writer.close()


@contextmanager
def gateway_process(url: str, *, max_open: int) -> Iterator[Gateway]:
    """Starts a gateway and waits until it is ready."""
    flags = ("--redis-url", url, "--queue", QUEUE, "--max-open-answers", str(max_open))
    command = (sys.executable, "-m", "service.gateway", *flags)
    process = subprocess.Popen(
        [*command, "--http-port", "0", "--log-format", "json"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        events = (json.loads(line) for line in process.stderr)
        ready = next(event for event in events if event["event"] == "gateway ready")
        yield Gateway(process, ready["http_port"])
    finally:
        process.kill()
        process.wait()


def claim_all(url: str, count: int) -> list[Claimed]:
    """Claims `count` requests, as a worker would."""
    claimed: list[Claimed] = []
    with connect(url) as connection:
        broker = Broker(connection, queue=QUEUE)
        broker.ensure_groups()
        while len(claimed) < count:
            deliveries = broker.peek(count=count, block_seconds=1.0)
            answers = broker.claim(deliveries) if deliveries else []
            claimed += [answer for answer in answers if isinstance(answer, Claimed)]
    return claimed


def measure_throughput(
    url: str, gateway: Gateway, *, num_streams: int, num_tokens: int, rounds: int
) -> dict[str, object]:
    """Tokens per second of complete streams, read in both ways alternately."""
    names = gateway.call(num_streams, name="throughput")
    write(url, QUEUE, claim_all(url, num_streams), num_ticks=num_tokens, tick_seconds=0.0)
    ways: dict[str, Callable[[Sequence[str]], dict[str, Arrivals]]] = {
        "gateway": gateway.read,
        "redis": partial(read_in_a_loop, url, QUEUE),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in sorted(ways, reverse=number % 2 == 1):
            began = time.perf_counter()
            arrivals = ways[way](names)
            rates[way].append(num_streams * num_tokens / (time.perf_counter() - began))
            check_arrivals(arrivals, names, num_tokens)
    ratios = [ours / direct for ours, direct in zip(*rates.values(), strict=True)]
    medians = {f"{way}_tokens_per_second": statistics.median(each) for way, each in rates.items()}
    return {**medians, "gateway_over_redis": statistics.median(ratios)}


def measure_lag(url: str, gateway: Gateway, *, num_streams: int) -> dict[str, object]:
    """Lag from before a commit to the arrival of its event; processor time and memory."""
    before = gateway.resident_bytes()
    names = gateway.call(num_streams, name="lag")
    claimed = claim_all(url, num_streams)
    # In a separate process, so that the writer does not slow down the interpreter of the reader.
    writer = multiprocessing.get_context("spawn").Process(
        target=write,
        args=(url, QUEUE, claimed),
        kwargs={"num_ticks": NUM_TICKS, "tick_seconds": TICK_SECONDS},
    )
    writer.start()
    used = gateway.processor_seconds()
    arrivals = gateway.read(names)
    used = gateway.processor_seconds() - used
    writer.join()
    check_arrivals(arrivals, names, NUM_TICKS)
    grown = gateway.peak_bytes - before
    return {
        "lag_ms": lags_of(arrivals),
        "processor_us_per_event": 1e6 * used / (num_streams * NUM_TICKS),
        "kib_per_stream": grown / 1024 / num_streams,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=positive, default=1000)
    parser.add_argument("--tokens", type=positive, default=32)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    record: dict[str, object] = {"machine": machine(), "streams": arguments.streams}
    with private_server() as connection:
        settings = connection.connection_pool.connection_kwargs
        url = f"redis://{settings['host']}:{settings['port']}/{settings['db']}"
        with gateway_process(url, max_open=arguments.streams) as gateway:
            record |= measure_lag(url, gateway, num_streams=arguments.streams)
            record |= measure_throughput(
                url,
                gateway,
                num_streams=arguments.streams,
                num_tokens=arguments.tokens,
                rounds=arguments.rounds,
            )
    print(json.dumps(record, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
