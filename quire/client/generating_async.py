"""Carries out a run of many prompts: a window of requests in flight, and their ends in order."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from quire.client.following import joined_items
from quire.client.generations import Generation
from quire.client.handle_async import explain, retried
from quire.client.plan import Row, RunPlan
from quire.client.progress import Progress, showing
from quire.errors import (
    InvalidRequest,
    OutputRewound,
    ProtocolError,
    QueueFull,
    QuireError,
    UnknownRequest,
)
from quire.queue.producer_async import AsyncProducer
from quire.queue.publish.output_log import OutputRead
from quire.queue.submit.messages import Item
from quire.queue.submit.routing import shard_of
from quire.queue.submit.submit import Submitted
from quire.transport.concurrency_async import list_of, pause
from quire.transport.patience import Patience
from quire.wire.message import Message
from quire.wire.output import State

#: The most requests of one submit, and the most logs of one read.
PART_SIZE = 256

#: If a source needs longer for some prompts, the next one is submitted at once.
DRAW_SECONDS = 0.1

#: How long a read waits if no log has new entries: of one part, and of several that take turns.
BLOCK_SECONDS, SHARED_BLOCK_SECONDS = 1.0, 0.1

#: After so long without a new entry, the state of a request is read: it may be lost.
SILENT_SECONDS = 5.0

#: After so long without news in any log, the reason is sought.
QUIET_SECONDS = 10.0

#: The most states that are read between two reads of logs: each takes a round trip.
MAX_SILENT_CHECKS = 32

#: How often a request that Redis has lost is submitted again.
MAX_LOSSES = 3

#: Pause before the next submit to a full queue, and the longest one that a refusal may ask for.
FULL_PAUSE_SECONDS, MAX_FULL_PAUSE_SECONDS = 0.5, 10.0

_Ready = Callable[..., Awaitable[list[Message]]]
_Send = Callable[[Sequence[Message]], Awaitable[list[Submitted]]]


async def generations_of(
    plan: RunPlan, brokers: Sequence[AsyncProducer], *, ready: _Ready, send: _Send
) -> AsyncIterator[Generation[Any]]:
    """The results of a run, in order; see `AsyncClient.generate_each`.

    `ready` checks and encodes requests, as members of a group; `send` submits them.
    """
    with showing(plan.name, plan.total, is_wanted=plan.shows_progress) as progress:
        run = AsyncRun(plan, brokers, progress, ready=partial(ready, group=plan.name), send=send)
        is_whole = False
        try:
            async for row in run.ended():
                yield plan.generation(row)
            is_whole = True
        finally:
            # Nobody could continue a run whose name was drawn.
            if not (is_whole or plan.is_named):
                await run.cancel()


class AsyncRun:
    """One run of a plan. Its rows leave in order; requests of up to a window are open."""

    def __init__(
        self,
        plan: RunPlan,
        brokers: Sequence[AsyncProducer],
        progress: Progress,
        *,
        ready: _Ready,
        send: _Send,
    ) -> None:
        self._plan = plan
        self._brokers = brokers
        self._progress = progress
        self._ready = ready
        self._send = send
        outage_seconds = brokers[0].outage_seconds
        who = f"the run {plan.name}"
        self._patience = Patience(
            plan.timeout,
            who,
            outage_seconds=outage_seconds,
            again_seconds=QUIET_SECONDS,
            so_far=lambda: progress.counts,
        )
        # In the order of the prompts, from the first one that has not left.
        self._rows = deque[Row]()
        self._waiting = deque[Row]()
        # By id; ordered by the time of the last read, so that every log is read in turn.
        self._open: dict[str, Row] = {}
        # How many prompts are drawn before the next submit; none when there is no further one.
        self._num_drawn = 1
        self._submit_after = 0.0
        # Of a submit whose answers have not come: an interrupt may be between the two.
        self._sent = frozenset[str]()

    async def ended(self) -> AsyncIterator[Row]:
        """Each row, when it and all before it have ended. WaitTimeout, BrokerUnavailable."""
        while await self._refill():
            while self._rows and self._rows[0].has_ended:
                yield self._rows.popleft()
            if self._open:
                await self._read()
                await self._check_silent()
            elif self._waiting:
                longest = self._patience.left(MAX_FULL_PAUSE_SECONDS)
                await pause(min(longest, max(0.0, self._submit_after - time.monotonic())))

    async def cancel(self) -> None:
        """Cancels all open requests, of all shards that answer."""
        for broker, ids in self._parts({*self._open, *self._sent}):
            with contextlib.suppress(QuireError):
                await broker.cancel_many(ids)

    async def _refill(self) -> bool:
        """Draws and submits prompts, as far as the window goes; returns whether a row is left.

        A slow source does not keep the prompts before from running.
        """
        began = time.monotonic()
        for _ in range(min(self._num_drawn, self._plan.window - len(self._rows))):
            row = next(self._plan.rows, None)
            if row is None:
                self._num_drawn = 0
                break
            self._rows.append(row)
            if row.has_ended:
                self._progress.has_ended(is_failed=True)
            else:
                self._waiting.append(row)
        is_slow = time.monotonic() - began >= DRAW_SECONDS
        self._num_drawn = min(2 * self._num_drawn, 1 if is_slow else PART_SIZE)
        while self._waiting and time.monotonic() >= self._submit_after:
            size = min(PART_SIZE, len(self._waiting))
            await self._submit([self._waiting.popleft() for _ in range(size)])
        return bool(self._rows)

    async def _submit(self, part: Sequence[Row]) -> None:
        pairs = await self._encoded(part)
        if not pairs:
            return
        messages = [message for _, message in pairs]
        self._sent = frozenset(message.id for message in messages)
        try:
            submitted = await retried(self._patience, partial(self._send, messages))
        except QueueFull as full:
            submitted = list(full.submitted)
            seconds = max(FULL_PAUSE_SECONDS, full.retry_after_seconds or 0.0)
            self._submit_after = time.monotonic() + min(seconds, MAX_FULL_PAUSE_SECONDS)
        answers = {one.request_id: one for one in submitted}
        refused = []
        for row, message in pairs:
            answer = answers.get(message.id)
            if answer is None:
                refused.append(row)
            elif answer.state.is_terminal and answer.state is not State.COMPLETED:
                # It ended so in an earlier call, which told its error; this one tries again.
                row.attempt += 1
                self._waiting.append(row)
            else:
                row.follow(answer.request_id)
                row.is_earlier = answer.state is State.COMPLETED
                self._open[answer.request_id] = row
        self._sent = frozenset()
        self._waiting.extendleft(reversed(refused))

    async def _encoded(self, part: Sequence[Row]) -> list[tuple[Row, Message]]:
        """The rows with their messages, without those that are refused."""
        items: list[Item] = [row.numbered for row in part]
        try:
            return list(zip(part, await self._ready(items), strict=True))
        except InvalidRequest:
            pairs = []
        for row, item in zip(part, items, strict=True):
            try:
                (message,) = await self._ready([item])
            except InvalidRequest as error:
                self._end(row, InvalidRequest(error.field, error.message, index=row.index))
            else:
                pairs.append((row, message))
        return pairs

    def _parts(self, names: Iterable[str]) -> list[tuple[AsyncProducer, list[str]]]:
        """These requests, in parts of one shard."""
        shards: dict[AsyncProducer, list[str]] = {}
        for request_id in names:
            broker = self._brokers[shard_of(request_id, len(self._brokers))]
            shards.setdefault(broker, []).append(request_id)
        return [
            (broker, ids[first : first + PART_SIZE])
            for broker, ids in shards.items()
            for first in range(0, len(ids), PART_SIZE)
        ]

    async def _read(self) -> None:
        """Reads all logs once. If none has new entries, waits for the part read longest ago."""
        first, *others = self._parts(self._open)
        has_news = False
        for broker, ids in others:
            has_news |= await self._read_part(broker, ids, block_seconds=None)
        longest = SHARED_BLOCK_SECONDS if others or self._waiting else BLOCK_SECONDS
        has_room = self._num_drawn > 0 and len(self._rows) < self._plan.window
        is_busy = has_news or has_room
        await self._read_part(*first, block_seconds=None if is_busy else longest)

    async def _read_part(
        self, broker: AsyncProducer, ids: Sequence[str], *, block_seconds: float | None
    ) -> bool:
        seen = dict[str, int]()
        for request_id in ids:
            # To the end: so the first part, which may wait, changes in every round.
            row = self._open[request_id] = self._open.pop(request_id)
            assert row.following is not None, "an open request is followed"
            seen[request_id] = row.following.seen
        block = None if block_seconds is None else self._patience.left(block_seconds)
        look = partial(broker.read_output, seen, block_seconds=block)
        news: dict[str, OutputRead] = await retried(self._patience, look)
        if news:
            self._patience.has_news()
        else:
            await explain(self._patience, broker)
        for request_id, read in news.items():
            await self._take(request_id, read)
        return bool(news)

    async def _take(self, request_id: str, read: OutputRead) -> None:
        row = self._open[request_id]
        assert row.following is not None, "an open request is followed"
        row.heard = time.monotonic()
        try:
            row.items += await list_of(row.following.take(read))
        except OutputRewound:
            row.follow(request_id)
        except ProtocolError as error:
            self._end(row, error)
            del self._open[request_id]
            return
        if row.following is not None and row.following.has_ended:
            row.completion, row.items = joined_items(row.items), []
            del self._open[request_id]
            is_failed = row.completion.state is not State.COMPLETED
            self._progress.has_ended(is_failed=is_failed, is_earlier=row.is_earlier)

    async def _check_silent(self) -> None:
        """Reads the state of requests without new entries; submits those again that Redis lost."""
        now = time.monotonic()
        silent = [item for item in self._open.items() if now - item[1].heard >= SILENT_SECONDS]
        # The others are next: reads go on meanwhile.
        for request_id, row in silent[:MAX_SILENT_CHECKS]:
            row.heard = now
            await self._check(request_id, row)

    async def _check(self, request_id: str, row: Row) -> None:
        assert row.following is not None, "an open request is followed"
        broker = self._brokers[shard_of(request_id, len(self._brokers))]
        try:
            row.following.silent(await retried(self._patience, partial(broker.status, request_id)))
        except OutputRewound:
            row.follow(request_id)
        except ProtocolError as error:
            self._end(row, error)
            del self._open[request_id]
        except UnknownRequest as error:
            del self._open[request_id]
            row.losses += 1
            if row.losses > MAX_LOSSES:
                self._end(row, error)
            else:
                self._waiting.append(row)
        else:
            if row.following.is_overdue:
                # There may be no worker to end it. A lasting error is raised by the next read.
                with contextlib.suppress(QuireError):
                    await broker.end_overdue([request_id])

    def _end(self, row: Row, error: QuireError) -> None:
        row.error = error
        self._progress.has_ended(is_failed=True)
