"""What a queue did in the last hour: samples in memory, read at a fixed period.

The numbers of a sample come from Redis alone: the state of the queue, what workers tell in the
registry, and the stream of ends. Ends from before the start of the console are in earlier samples
that have nothing else.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from quire.keys import Keys
from quire.queue.clock import ms_of
from quire.queue.view.inspection import read_shards
from quire.queue.view.view import Part, QueueView
from quire.records import State
from quire.transport.procedure import Procedure, RoundTrip, command
from service.console.reading.numbers import refusing_huge_numbers
from service.console.reading.queue import QueueReading

#: The samples of a history.
NUM_SAMPLES = 240

#: The most ends of a shard that one sample reads; later ones are left to the next sample.
MAX_ENDS = 1000

#: How long ends are counted, and the parts in which they are forgotten, in ms.
HOUR_MS, MINUTE_MS = 3_600_000, 60_000

#: A worker that has not signed for so long makes no tokens as far as a sample knows.
FRESH_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment. Without a state only its ends are known.

    `ended` has the ends since the last sample by state, and `ended_tokens` the tokens of their
    outputs. `tokens_per_second` and `kv_usage` (0 to 1, the mean of the workers) are None if no
    worker tells them.
    """

    at_ms: int
    num_waiting: int | None = None
    num_running: int | None = None
    tokens_per_second: float | None = None
    kv_usage: float | None = None
    ended: Mapping[State, int] = field(default_factory=dict)
    ended_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LastHour:
    """The ends of the last hour, to a minute; those since `since_ms` if not all were read."""

    num_completed: int
    num_failed: int
    since_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _Signed:
    """What a worker had made when it signed, and its rate since the time before."""

    at_ms: int
    generated: int
    per_second: float | None = None


@dataclass(frozen=True, slots=True)
class _Ended:
    at_ms: int
    state: State
    tokens: int


class History:
    """The samples of one queue. `read` runs on one thread at a time; any thread may see them."""

    def __init__(self, queue: QueueReading, *, sample_seconds: float) -> None:
        self._queue = queue
        self.sample_seconds = sample_seconds
        #: Replaced as a whole, so that readers need no lock.
        self.samples: tuple[Sample, ...] = ()
        #: None before the first sample.
        self.last_hour: LastHour | None = None
        self._ended = Counter[tuple[int, State]]()
        self._known_since_ms = 0
        self._cursors: dict[Keys, bytes] = {}
        self._signed: dict[str, _Signed] = {}

    def read(self) -> None:
        """Adds a sample. BrokerUnavailable, ProtocolError."""
        with refusing_huge_numbers():
            self._read()

    def _read(self) -> None:
        view = self._queue.view(Part.SHARDS)
        is_first = not self._cursors
        ends, now_ms = self._new_ends()
        self.last_hour = self._hour(ends, now_ms=now_ms)
        earlier = self.samples
        if is_first:
            earlier, ends = _past(ends, now_ms=now_ms, period_ms=self._period_ms)
        sample = Sample(
            at_ms=now_ms,
            num_waiting=view.total("num_queued"),
            num_running=view.total("num_leases"),
            tokens_per_second=self._rate(view, now_ms=now_ms),
            kv_usage=_mean(w.kv_usage for w in view.workers if w.is_alive),
            ended=Counter(end.state for end in ends),
            ended_tokens=sum(end.tokens for end in ends),
        )
        self.samples = (*earlier, sample)[-NUM_SAMPLES:]

    @property
    def _period_ms(self) -> int:
        return int(self.sample_seconds * 1000)

    def _hour(self, ends: Sequence[_Ended], *, now_ms: int) -> LastHour:
        """The last hour with these ends."""
        self._ended.update((end.at_ms // MINUTE_MS, end.state) for end in ends)
        begin_ms = now_ms - HOUR_MS
        for key in [key for key in self._ended if key[0] < begin_ms // MINUTE_MS]:
            del self._ended[key]
        totals = Counter[State]()
        for (_, state), number in self._ended.items():
            totals[state] += number
        since_ms = self._known_since_ms if self._known_since_ms > begin_ms else None
        return LastHour(totals[State.COMPLETED], totals[State.FAILED], since_ms)

    def _new_ends(self) -> tuple[list[_Ended], int]:
        """The ends since the last call, at first the newest ones; and the time of Redis."""
        shards, read = self._queue.keys, partial(_ends, cursors=self._cursors)
        found = read_shards(read, self._queue.connection, shards)
        ends: list[_Ended] = []
        for keys, (entries, _) in zip(shards, found, strict=True):
            if keys not in self._cursors and len(entries) >= MAX_ENDS:
                oldest_ms, _ = _order(entries[-1][0])
                self._known_since_ms = max(self._known_since_ms, oldest_ms)
            earlier = self._cursors.get(keys, b"0-0")
            self._cursors[keys] = max([earlier, *(one for one, _ in entries)], key=_order)
            ends += [end for entry_id, fields in entries if (end := _end_of(entry_id, fields))]
        return ends, max(now_ms for _, now_ms in found)

    def _rate(self, view: QueueView, *, now_ms: int) -> float | None:
        """The tokens per second of all workers that tell, since each of them signed before."""
        told: dict[str, _Signed] = {}
        for worker in view.workers:
            if worker.generated is None or worker.seen_seconds > FRESH_SECONDS:
                continue
            at_ms = now_ms - int(worker.seen_seconds * 1000)
            told[worker.name] = _signed_again(
                self._signed.get(worker.name), _Signed(at_ms, worker.generated)
            )
        self._signed = told
        rates = [one.per_second for one in told.values() if one.per_second is not None]
        return sum(rates) if rates else None


def _signed_again(before: _Signed | None, now: _Signed) -> _Signed:
    if before is None or now.generated < before.generated:
        # A new worker, or a new process under its name.
        return now
    seconds = (now.at_ms - before.at_ms) / 1000
    if seconds < 0.5:
        # It has not signed since. The moments differ by what the two reads took.
        return before
    return replace(now, per_second=(now.generated - before.generated) / seconds)


def _ends(
    shards: Sequence[Keys], *, cursors: Mapping[Keys, bytes]
) -> Procedure[list[tuple[list[Any], int]]]:
    """The entries of each shard after its cursor, without one the newest; and the time of Redis."""
    *found, time = yield RoundTrip(
        (
            *(
                command("xrange", keys.ends, b"(" + cursors[keys], "+", count=MAX_ENDS)
                if keys in cursors
                else command("xrevrange", keys.ends, count=MAX_ENDS)
                for keys in shards
            ),
            command("time"),
        )
    )
    return [(entries, ms_of(time)) for entries in found]


def _end_of(entry_id: bytes, fields: Mapping[bytes, bytes]) -> _Ended | None:
    try:
        state = State(fields[b"state"].decode())
        return _Ended(_order(entry_id)[0], state, int(fields[b"tokens"]))
    except (KeyError, ValueError):
        return None


def _past(
    ends: Sequence[_Ended], *, now_ms: int, period_ms: int
) -> tuple[tuple[Sample, ...], list[_Ended]]:
    """Samples of the past from its ends alone, the oldest first, and the ends of this period."""
    if not ends:
        return (), []
    periods: dict[int, list[_Ended]] = {}
    for end in ends:
        periods.setdefault(max(0, now_ms - end.at_ms) // period_ms, []).append(end)
    oldest = min(NUM_SAMPLES - 1, max(periods))
    if len(ends) >= MAX_ENDS:
        # Only a part of the oldest period was read.
        oldest -= 1
    past = tuple(
        Sample(
            at_ms=now_ms - number * period_ms,
            ended=Counter(end.state for end in periods.get(number, ())),
            ended_tokens=sum(end.tokens for end in periods.get(number, ())),
        )
        for number in range(oldest, 0, -1)
    )
    return past, periods.get(0, [])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _order(entry_id: bytes) -> tuple[int, int]:
    first, _, second = entry_id.partition(b"-")
    return int(first), int(second)
