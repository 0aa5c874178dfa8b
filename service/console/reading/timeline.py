"""The life of a request as events in order, and as spans of a bar. Knows no Redis."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.records import Execution
from service.console.reading.request import Life, Stint


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """Something that happened to a request. `at_ms` is None where the time is not recorded.

    `kind` is one of submit, due, claim, token, resume, preempt, cancel, now and end.
    """

    kind: str
    title: str
    detail: str = ""
    at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the life: `kind` is one of waiting, prefill, decode and gap; times in unix ms."""

    kind: str
    title: str
    began_ms: int
    ended_ms: int


def events_of(life: Life) -> Sequence[LifeEvent]:
    """What happened, first things first."""
    status, log = life.status, life.log
    events = [LifeEvent("submit", "Submitted", _submitted(life), status.submitted_ms)]
    if life.scheduled_ms is not None:
        events.append(
            LifeEvent("due", "Due", "Workers may claim it from then on.", life.scheduled_ms)
        )
    if life.claimed_ms is not None:
        waited = _seconds(life.claimed_ms - status.submitted_ms)
        events.append(LifeEvent("claim", "First claim", f"after {waited}", life.claimed_ms))
    events += [_event_of(stint, number) for number, stint in enumerate(log.stints)]
    if log.stints and life.epoch > log.stints[-1].epoch and life.is_open:
        detail = "This claim has published nothing yet."
        events.append(LifeEvent("claim", f"Claimed again, epoch {life.epoch}", detail))
    if not log.is_whole:
        events.append(LifeEvent("now", "Not shown", "The middle of this log was not read."))
    if status.cancel_requested:
        events.append(
            LifeEvent("cancel", "Cancel requested", "The worker sees it at its next commit.")
        )
    return [*events, *_ending(life)]


def _submitted(life: Life) -> str:
    status = life.status
    parts = [f"class {status.priority.name.lower()}", f"tenant {status.tenant}"]
    if status.session_id is not None:
        parts.append(f"session {status.session_id}")
    if life.max_tokens is not None:
        parts.append(f"at most {life.max_tokens:,} tokens")
    return ", ".join(parts)


def _event_of(stint: Stint, number: int) -> LifeEvent:
    pieces = "1 chunk" if stint.num_chunks == 1 else f"{stint.num_chunks:,} chunks"
    tokens = f"tokens {stint.start:,} to {stint.end - 1:,} in {pieces}"
    if stint.num_chunks > 1 and stint.began_ms is not None and stint.ended_ms is not None:
        tokens += f", within {_seconds(stint.ended_ms - stint.began_ms)}"
    if number == 0 and stint.start == 0:
        return LifeEvent("token", f"First token, epoch {stint.epoch}", tokens, stint.began_ms)
    title = f"Resumed after token {stint.start - 1:,}, epoch {stint.epoch}"
    return LifeEvent("resume", title, tokens, stint.began_ms)


def _ending(life: Life) -> list[LifeEvent]:
    """What a request does now, or its preemptions and its end."""
    status, completion = life.status, life.log.completion
    if life.is_open:
        doing = str(status.activity or status.state)
        detail = f"waits for the turn {status.waits_for}" if status.waits_for else ""
        if life.num_losses:
            detail = f"{life.num_losses} claims in a row were lost with their workers"
        return [LifeEvent("now", doing.capitalize(), detail, status.at_ms)]
    events = []
    if completion is not None and completion.preemptions:
        detail = _preempted(completion.execution)
        events.append(LifeEvent("preempt", f"Preempted {completion.preemptions} times", detail))
    detail = ""
    if completion is not None:
        detail = f"{completion.finish_reason}, {completion.usage.completion_tokens:,} tokens"
        if completion.error is not None:
            detail = f"{completion.error.code}: {completion.error.message}"
    return [*events, LifeEvent("end", str(status.state).capitalize(), detail, life.finished_ms)]


def _preempted(execution: Execution | None) -> str:
    if execution is None:
        return ""
    swaps = f", {execution.swaps} of them by swap" if execution.swaps else ""
    return f"for {execution.preempted_seconds:.2f} s in the last claim{swaps}"


def spans_of(life: Life) -> Sequence[Span]:
    """The life as spans without gaps, from the submit to the end or to now."""
    status = life.status
    end_ms = life.finished_ms or status.at_ms
    spans: list[Span] = []

    def add(kind: str, title: str, ended_ms: int | None) -> None:
        began = spans[-1].ended_ms if spans else status.submitted_ms
        ended = min(end_ms if ended_ms is None else ended_ms, end_ms)
        if ended > began:
            spans.append(Span(kind, title, began, ended))

    add("waiting", "in the queue", life.claimed_ms)
    if life.claimed_ms is None:
        return spans
    stints = [one for one in life.log.stints if one.began_ms is not None]
    add("prefill", "before the first token", stints[0].began_ms if stints else None)
    for number, stint in enumerate(stints):
        if number:
            add("gap", f"until epoch {stint.epoch} went on", stint.began_ms)
        add("decode", f"epoch {stint.epoch}", stint.ended_ms)
    if stints:
        add("decode" if life.is_open else "gap", "after the last token", None)
    return spans


def _seconds(milliseconds: int) -> str:
    seconds = max(0, milliseconds) / 1000
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:,.1f} s"
