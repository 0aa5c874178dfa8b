"""One run of a batch: submits its requests, reads their outputs, and handles those that are lost.

Knows requests and logs. files.py has the files, lines.py the format of the lines.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from quire.batch.answers import LineAnswer, OpenChoice, open_choices
from quire.batch.files import LineReader, ResultFiles, count_lines
from quire.batch.lines import (
    CANCELLED,
    EXPIRED,
    BadLine,
    BatchLine,
    error_line,
    output_line,
    response_body,
)
from quire.batch.open_lines import OpenLines
from quire.batch.progress import (
    FIRST,
    MAX_REASONS,
    BatchOptions,
    BatchProgress,
    Position,
    TokenCounts,
)
from quire.client.following import Following
from quire.client.handle import explain, retried
from quire.errors import InvalidRequest, OutputRewound, ProtocolError, QueueFull, UnknownRequest
from quire.queue.producer import Producer
from quire.queue.publish.output_log import OutputRead
from quire.queue.submit.routing import Parting, shard_of
from quire.queue.submit.submit import Submitted
from quire.transport.patience import Patience
from quire.wire.output import Completion, State, TokenChunk

#: The most logs of one read.
READ_SIZE = 256

#: How long a read waits if no log has new entries.
BLOCK_SECONDS = 0.1

#: After so long without a new entry, the state of a request is read: it may be lost.
SILENT_SECONDS = 5.0

#: How often a request that Redis has lost is submitted again before its line fails.
MAX_LOSSES = 3

#: Pause before the next submit to a full queue, and the longest one that a refusal may ask for.
FULL_PAUSE_SECONDS, MAX_FULL_PAUSE_SECONDS = 0.5, 10.0

#: The begin of the messages of bad lines.
_LINE_NUMBER = re.compile(r"^line [0-9]+: ")

_REASONS = {
    EXPIRED: "the deadline of the batch has passed",
    CANCELLED: "the batch was cancelled",
}

#: The states of requests that the end of an earlier run has ended.
_INTERRUPTED = (State.CANCELLED, State.EXPIRED)


class BatchRun:
    """One run of a batch in one thread: submits requests, reads outputs, writes results.

    `files` have the results of all lines before `start`. An error of `on_progress` ends the run and
    leaves its requests in the queue, where another run finds them.
    """

    def __init__(
        self,
        brokers: Sequence[Producer],
        source: Path,
        files: ResultFiles,
        *,
        options: BatchOptions,
        stop: threading.Event | None,
        start: Position = FIRST,
    ) -> None:
        self._brokers = brokers
        self._files = files
        self._options = options
        self._stop = stop or threading.Event()
        self._patience = Patience(
            None,
            f"the batch {options.name}",
            outage_seconds=brokers[0].outage_seconds,
            has_answered=True,
        )
        self._began = time.monotonic()
        self._deadline_ms: int | None = None
        if options.deadline_seconds is not None:
            self._deadline_ms = brokers[0].now_ms() + int(options.deadline_seconds * 1000)
        self._reader = LineReader(source, options.name, start=start)
        self._lines = (line for line in self._reader if not files.has_result_of(line))
        self._unfinished = OpenLines(self._reader, model=options.model)
        # Ordered by the time of the last read, so that every log is read in turn.
        self._open: dict[str, OpenChoice] = {}
        self._waiting: list[OpenChoice] = []
        self._interrupted: str | None = None
        self._submit_after = 0.0
        self._reasons = Counter[str]()
        self._progress = BatchProgress(
            total=count_lines(source),
            completed=files.num_completed,
            failed=files.num_failed,
            done_before=files.num_completed + files.num_failed,
            usage=files.usage,
            position=start,
        )

    def until_it_ends(self, on_progress: Callable[[BatchProgress], None] | None) -> BatchProgress:
        while (ending := self._ending()) is None:
            self._submit()
            self._read(block_seconds=BLOCK_SECONDS)
            self._check_silent()
            if on_progress is not None:
                on_progress(self._now())
        if ending != State.COMPLETED:
            self._interrupt(EXPIRED if ending == State.EXPIRED else CANCELLED)
        self._progress = replace(self._now(), ending=str(ending))
        if on_progress is not None:
            on_progress(self._progress)
        return self._progress

    @property
    def progress(self) -> BatchProgress:
        """How far the batch is now."""
        return self._now()

    def _ending(self) -> State | None:
        if self._stop.is_set():
            return State.CANCELLED
        limit = self._options.deadline_seconds
        if limit is not None and time.monotonic() - self._began >= limit:
            return State.EXPIRED
        self._refill()
        return None if self._open or self._waiting else State.COMPLETED

    def _now(self) -> BatchProgress:
        seconds = time.monotonic() - self._began
        position = self._unfinished.begin
        return replace(self._progress, inflight=len(self._open), seconds=seconds, position=position)

    def _refill(self) -> None:
        """Takes lines until `max_inflight` requests have no end, or their lines are full."""
        num_bytes = self._unfinished.num_bytes_of(self._waiting)
        most = self._options.max_inflight - len(self._open)
        while len(self._waiting) < most and self._unfinished.has_room(num_bytes):
            line = next(self._lines, None)
            if line is None:
                return
            if isinstance(line, BadLine):
                self._fail(line, line.code, line.message)
            elif line.session_id is not None and len(self._brokers) > 1:
                # The turns of a session share a shard, and the id of a line names its own.
                message = "a batch has no sessions on a queue of many shards"
                self._fail(line, "invalid_session_id", message)
            else:
                self._waiting += open_choices(self._unfinished.add(line))
                num_bytes += self._reader.end.offset - self._reader.begin.offset

    def _submit(self) -> None:
        while self._waiting and time.monotonic() >= self._submit_after:
            size = self._unfinished.num_submitted_of(self._waiting)
            part, self._waiting = self._waiting[:size], self._waiting[size:]
            part = [open_ for open_ in part if self._has_whole_line(open_.answer)]
            by_id = {open_.following.request_id: open_ for open_ in part}
            messages = [
                open_.answer.line.message(
                    open_.choice,
                    attempt=open_.attempt,
                    priority=self._options.priority,
                    tenant=self._options.tenant,
                    deadline_ms=self._deadline_ms,
                )
                for open_ in part
            ]
            answers: dict[str, Submitted] = {}
            for shard, share in Parting(messages, len(self._brokers)).parts():
                try:
                    submit = partial(self._brokers[shard].submit_messages, share)
                    submitted = retried(self._patience, submit)
                except QueueFull as full:
                    answers |= {answer.request_id: answer for answer in full.submitted}
                    pause = max(FULL_PAUSE_SECONDS, full.retry_after_seconds or 0.0)
                    self._submit_after = time.monotonic() + min(pause, MAX_FULL_PAUSE_SECONDS)
                else:
                    answers |= {answer.request_id: answer for answer in submitted}
            for request_id, open_ in by_id.items():
                self._admit(open_, answers.get(request_id))

    def _has_whole_line(self, answer: LineAnswer) -> bool:
        """Whether it can be submitted; else it has failed."""
        if not answer.has_failed and not self._unfinished.complete(answer):
            reason = "the queue has lost the request, and the line has changed since"
            self._fail_answer(answer, "lost", reason)
        return not answer.has_failed

    def _admit(self, open_: OpenChoice, answer: Submitted | None) -> None:
        if answer is None:
            self._unfinished.forget_read_again(open_.answer)
            self._waiting.append(open_)
            return
        # The queue has the pictures now; and what was checked takes as much memory as the line.
        open_.answer.line.call.forget_checked()
        self._unfinished.forget_pictures(open_.answer)
        open_.is_inherited = not answer.created
        if answer.state in (State.CANCELLED, State.EXPIRED):
            self._attempt_again(open_)
            return
        open_.following.known = True
        open_.heard = time.monotonic()
        self._open[open_.following.request_id] = open_

    def _attempt_again(self, open_: OpenChoice) -> None:
        """Repeats a request that an earlier run has ended, under the id of the next attempt."""
        open_.attempt += 1
        request_id = open_.answer.line.request_id(open_.choice, attempt=open_.attempt)
        open_.following = Following(request_id)
        open_.chunks = []
        self._waiting.append(open_)

    def _read(self, *, block_seconds: float | None) -> None:
        """Reads all logs once. If none has new entries, blocks on the group read longest ago."""
        shards: dict[Producer, list[str]] = {}
        for request_id in self._open:
            shards.setdefault(self._broker_of(request_id), []).append(request_id)
        groups = [
            ids[first : first + READ_SIZE]
            for ids in shards.values()
            for first in range(0, len(ids), READ_SIZE)
        ]
        has_news = False
        for group in groups[1:]:
            has_news |= self._read_group(group, block_seconds=None)
        if groups:
            self._read_group(groups[0], block_seconds=None if has_news else block_seconds)
        elif self._waiting and block_seconds is not None:
            self._stop.wait(max(0.0, self._submit_after - time.monotonic()))

    def _broker_of(self, request_id: str) -> Producer:
        return self._brokers[shard_of(request_id, len(self._brokers))]

    def _read_group(self, group: list[str], *, block_seconds: float | None) -> bool:
        """Reads the logs of one shard's requests; returns whether any has new entries."""
        group = [request_id for request_id in group if request_id in self._open]
        if not group:
            return False
        seen = {request_id: self._open[request_id].following.seen for request_id in group}
        broker = self._broker_of(group[0])
        look = partial(broker.read_output, seen, block_seconds=block_seconds)
        news = retried(self._patience, look)
        if news:
            self._patience.has_news()
        else:
            explain(self._patience, broker)
        now = time.monotonic()
        for request_id in group:
            if request_id not in self._open:
                # Another choice of its line has just failed.
                continue
            # Moved to the end: so the first group, which may block, changes in every round.
            open_ = self._open[request_id] = self._open.pop(request_id)
            if read := news.get(request_id):
                open_.heard = now
                self._take_all(open_, read)
        return bool(news)

    def _take_all(self, open_: OpenChoice, read: OutputRead) -> None:
        try:
            for item in open_.following.take(read):
                self._take(open_, item)
        except OutputRewound:
            _read_anew(open_)
        except ProtocolError as error:
            self._fail_open(open_.following.request_id, error)

    def _fail_open(self, request_id: str, error: ProtocolError) -> None:
        self._fail_answer(self._open.pop(request_id).answer, "protocol_error", str(error))

    def _take(self, open_: OpenChoice, item: TokenChunk | Completion) -> None:
        if isinstance(item, TokenChunk):
            open_.chunks.append(item)
            tokens = self._progress.tokens + len(item.token_ids)
            self._progress = replace(self._progress, tokens=tokens)
            return
        del self._open[open_.following.request_id]
        if item.state is State.COMPLETED:
            if choices := open_.complete(item):
                self._write_output(open_.answer.line, choices)
        elif open_.is_inherited and not self._interrupted and item.state in _INTERRUPTED:
            # The earlier run cancelled it or set its deadline, and it ended only now.
            self._attempt_again(open_)
        elif item.state is State.EXPIRED and self._deadline_ms is not None:
            # Each request has the batch's deadline; this one ended before the run noticed it.
            self._fail_answer(open_.answer, EXPIRED, _REASONS[EXPIRED])
        elif item.state is State.CANCELLED and self._interrupted:
            self._fail_answer(open_.answer, self._interrupted, _REASONS[self._interrupted])
        else:
            error = open_.answer.named(item, open_.choice).error
            code, message = (error.code, error.message) if error else (str(item.state), "")
            field_ = f"{error.field}: " if error and error.field else ""
            self._fail_answer(open_.answer, code, f"{field_}{message}")

    def _check_silent(self) -> None:
        """Reads the state of requests without new entries; submits those again that Redis lost."""
        now = time.monotonic()
        for request_id, open_ in list(self._open.items()):
            if now - open_.heard < SILENT_SECONDS or open_.answer.has_failed:
                continue
            open_.heard = now
            try:
                status = partial(self._broker_of(request_id).status, request_id)
                open_.following.silent(retried(self._patience, status))
            except OutputRewound:
                _read_anew(open_)
            except ProtocolError as error:
                self._fail_open(request_id, error)
            except UnknownRequest:
                del self._open[request_id]
                open_.losses += 1
                open_.following, open_.chunks = Following(request_id), []
                if open_.losses > MAX_LOSSES:
                    reason = "the queue has lost the request repeatedly"
                    self._fail_answer(open_.answer, "lost", reason)
                else:
                    self._waiting.append(open_)

    def _interrupt(self, code: str) -> None:
        """Ends the batch early: writes the results that are there, and an error for all others."""
        self._interrupted = code
        for request_id in list(self._open):
            self._cancel(request_id)
        self._read(block_seconds=None)
        reason = _REASONS[code]
        for open_ in [*self._open.values(), *self._waiting]:
            self._fail_answer(open_.answer, code, reason)
        self._open, self._waiting = {}, []
        for line in self._lines:
            if isinstance(line, BadLine):
                self._fail(line, line.code, line.message)
            else:
                self._fail(line, code, reason)

    def _fail_answer(self, answer: LineAnswer, code: str, message: str) -> None:
        """Fails a line because of one choice, and cancels its other choices."""
        if answer.has_failed:
            return
        answer.has_failed = True
        self._fail(answer.line, code, message)
        if answer.line.num_choices == 1:
            return
        self._waiting = [open_ for open_ in self._waiting if open_.answer is not answer]
        for request_id in [name for name, open_ in self._open.items() if open_.answer is answer]:
            del self._open[request_id]
            self._cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        """Cancels a request. A Redis without memory refuses that; then the request continues."""
        with contextlib.suppress(UnknownRequest, QueueFull):
            self._broker_of(request_id).cancel(request_id)

    def _write_output(self, line: BatchLine, choices: Sequence[Completion]) -> None:
        try:
            body = response_body(line, choices)
        except InvalidRequest as error:
            self._fail(line, "invalid_request", str(error))
            return
        self._files.write_output(output_line(line, choices[0].request_id, body))
        self._unfinished.remove(line)
        now, usage = self._progress, TokenCounts.of(body["usage"])
        self._progress = replace(now, completed=now.completed + 1, usage=now.usage + usage)

    def _fail(self, line: BatchLine | BadLine, code: str, message: str) -> None:
        self._files.write_error(error_line(line, code, message))
        self._unfinished.remove(line)
        reason = f"{code}: {_LINE_NUMBER.sub('', message)}"
        if reason in self._reasons or len(self._reasons) < MAX_REASONS:
            self._reasons[reason] += 1
        failed = self._progress.failed + 1
        self._progress = replace(self._progress, failed=failed, reasons=dict(self._reasons))


def _read_anew(open_: OpenChoice) -> None:
    """Restarts at the begin of the log, because Redis has lost a part of what was read."""
    open_.following = Following(open_.following.request_id, known=True)
    open_.chunks = []
