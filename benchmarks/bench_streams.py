"""A thousand streams read by one client process, compared with one stream. See bench_protocol.

- Throughput: complete logs with one token per entry are read to their ends.
- Lag: a writer in a separate process commits a token to each log at a steady rate, with the time in
  its text. The reader compares it with the time of arrival; both use the monotonic clock of the
  machine.

The gate: each stream ends and has all its tokens in order.
"""

import asyncio
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import redis

from benchmarks.common.figures import percentile
from benchmarks.common.queue_loader import QueueLoader
from quire import (
    AsyncClient,
    Broker,
    Client,
    Completion,
    FinishReason,
    SharedReadsBroker,
    State,
    connect,
    connect_async,
)
from quire.queue.claim.claim import Claimed
from quire.queue.publish.commit import CommitItem

#: Streams read at once, and the tokens of each.
NUM_STREAMS, NUM_TOKENS = 1_000, 32

#: How often the writer commits to all logs while the lag is measured.
TICK_SECONDS = 0.5

#: The number of these commits.
NUM_TICKS = 20

#: A measurement that takes longer has failed.
GIVE_UP_SECONDS = 120.0

#: For each chunk its time of arrival and its text.
Arrivals = list[tuple[float, str]]

Reading = Callable[[str, str, Sequence[str]], dict[str, Arrivals]]


def measure_streams(connection: redis.Redis) -> dict[str, object]:
    """Throughput and lag of both kinds of client."""
    settings = connection.connection_pool.connection_kwargs
    url = f"redis://{settings['host']}:{settings['port']}/{settings['db']}"
    kinds: dict[str, Reading] = {"threads": read_in_threads, "event_loop": read_in_a_loop}
    figures: dict[str, object] = {"streams": NUM_STREAMS}
    for kind, read in kinds.items():
        for count in (1, NUM_STREAMS):
            name = f"{kind}_{count}"
            figures[f"{name}_tokens_per_second"] = _throughput(url, name, read, count)
            figures[f"{name}_lag_ms"] = _lag(url, f"{name}_paced", read, count)
    return figures


def read_in_threads(url: str, queue: str, request_ids: Sequence[str]) -> dict[str, Arrivals]:
    """Reads each stream in its own thread, all with one SharedReadsBroker."""
    arrivals: dict[str, Arrivals] = {}
    with connect(url) as connection:
        client = Client(SharedReadsBroker(connection, queue=queue))

        def read(request_id: str) -> None:
            mine = [(time.monotonic(), chunk.text) for chunk in client.stream(request_id)]
            arrivals[request_id] = mine

        threads = [threading.Thread(target=read, args=(name,)) for name in request_ids]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GIVE_UP_SECONDS)
    return arrivals


def read_in_a_loop(url: str, queue: str, request_ids: Sequence[str]) -> dict[str, Arrivals]:
    """Reads each stream in its own task, all with one AsyncClient."""

    async def read(client: AsyncClient, request_id: str) -> Arrivals:
        return [(time.monotonic(), chunk.text) async for chunk in client.stream(request_id)]

    async def read_all() -> list[Arrivals]:
        connection = connect_async(url)
        try:
            async with asyncio.timeout(GIVE_UP_SECONDS), AsyncClient(connection, queue=queue) as c:
                return await asyncio.gather(*(read(c, name) for name in request_ids))
        finally:
            await connection.aclose()

    return dict(zip(request_ids, asyncio.run(read_all()), strict=True))


def _throughput(url: str, queue: str, read: Reading, count: int) -> float:
    """Tokens per second of complete logs. A single stream has as many tokens as the thousand."""
    num_tokens = NUM_TOKENS * NUM_STREAMS // count
    with connect(url) as connection:
        claimed = _claim_all(Broker(connection, queue=queue), count)
        write(url, queue, claimed, num_ticks=num_tokens, tick_seconds=0.0)
    names = [one.claim.request_id for one in claimed]
    began = time.perf_counter()
    arrivals = read(url, queue, names)
    seconds = time.perf_counter() - began
    check_arrivals(arrivals, names, num_tokens)
    return num_tokens * count / seconds


def _lag(url: str, queue: str, read: Reading, count: int) -> dict[str, float]:
    """Milliseconds from before a commit to the arrival of its chunk at its reader."""
    with connect(url) as connection:
        claimed = _claim_all(Broker(connection, queue=queue), count)
    names = [one.claim.request_id for one in claimed]
    # In a separate process, so that the writer does not slow down the interpreter of the reader.
    writer = multiprocessing.get_context("spawn").Process(
        target=write,
        args=(url, queue, claimed),
        kwargs={"num_ticks": NUM_TICKS, "tick_seconds": TICK_SECONDS},
    )
    writer.start()
    arrivals = read(url, queue, names)
    writer.join()
    check_arrivals(arrivals, names, NUM_TICKS)
    return lags_of(arrivals)


def lags_of(arrivals: dict[str, Arrivals]) -> dict[str, float]:
    """Milliseconds from the times that `write` has put into the texts to their arrivals."""
    lags = [
        1e3 * (moment - float(text.split()[1])) for pieces in arrivals.values()
        for moment, text in pieces
    ]  # fmt: skip
    return {"p50": statistics.median(lags), "p99": percentile(lags, 0.99)}


def write(
    url: str, queue: str, claimed: Sequence[Claimed], *, num_ticks: int, tick_seconds: float
) -> None:
    """Commits one token to each log per tick; the text of a token is its index and the time."""
    with connect(url) as connection:
        broker = Broker(connection, queue=queue)
        began = time.monotonic()
        for tick in range(num_ticks):
            time.sleep(max(0.0, began + (tick + 1) * tick_seconds - time.monotonic()))
            is_last = tick == num_ticks - 1
            text = f"{tick} {time.monotonic():.6f}\n"
            broker.commit([_item(one, tick, text, is_last=is_last) for one in claimed])


def _item(claimed: Claimed, tick: int, text: str, *, is_last: bool) -> CommitItem:
    end = None
    if is_last:
        name = claimed.claim.request_id
        end = Completion(name, State.COMPLETED, FinishReason.LENGTH)
    return CommitItem(claimed.claim, tick, (tick,), text, completion=end)


def _claim_all(broker: Broker, count: int) -> list[Claimed]:
    broker.ensure_groups()
    QueueLoader(broker).fill(count)
    answers = broker.claim(broker.peek(count=count, block_seconds=0))
    claimed = [answer for answer in answers if isinstance(answer, Claimed)]
    assert len(claimed) == count, "not all requests could be claimed"
    return claimed


def check_arrivals(arrivals: dict[str, Arrivals], names: Sequence[str], num_tokens: int) -> None:
    """The gate of both measurements."""
    assert sorted(arrivals) == sorted(names), "a stream has not ended"
    wanted = [str(index) for index in range(num_tokens)]
    for pieces in arrivals.values():
        lines = "".join(text for _, text in pieces).splitlines()
        assert [line.split()[0] for line in lines] == wanted, "a stream has other tokens"
