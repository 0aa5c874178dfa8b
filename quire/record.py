"""The record of a request, the hash `r:<id>` in Redis: each of its fields once.

From this table come the lists of the scripts (`python -m quire.record`), the check for damage, and
docs/reference/record.md. All times are unix milliseconds of Redis' own clock, unless a field says
otherwise. The record exists from SUBMIT until the results expire.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Form(StrEnum):
    """How a value is written. `condemn.lua` has the check of each form."""

    STATE = "state"
    PRIORITY = "priority"
    TENANT = "tenant"
    OWNER = "owner"
    SESSION = "session"
    #: At most 15 decimal digits, which Lua can tell from the next number.
    NUMBER = "number"
    #: Unix microseconds: at most 16 decimal digits.
    MOMENT = "moment"
    HASH = "hash"
    SHARE = "share"
    #: Not checked: no script reads more than whether it equals another value.
    ANY = "any"


class Requeue(StrEnum):
    """What becomes of a field if the request of a dead letter is queued again."""

    KEPT = "kept"
    SET = "set anew"
    DELETED = "deleted"
    DELETED_WITH_TOKENS = "deleted with the tokens"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the record.

    `by` names the scripts, or shared parts of them, that write it; CONDEMN, which repairs all, is
    not named. `initial` is its value in a new record, and replaces one that
    cannot be read. `instead` replaces one that cannot be read, but is not set in a new record. A
    field without both may be missing. `in_letter`: a dead letter has it, so that REQUEUE has it
    when the record is gone. `ends`: it is deleted when the request ends. `is_large`: scripts read
    it only where they name it.
    """

    name: str
    form: Form
    meaning: str
    by: str
    initial: str | None = None
    instead: str | None = None
    requeue: Requeue = Requeue.KEPT
    in_letter: bool = False
    ends: bool = False
    is_large: bool = False

    @property
    def replacement(self) -> str | None:
        """What replaces a value that cannot be read; None deletes the field."""
        return self.instead if self.initial is None else self.initial


#: As `instead`: the time of the repair.
NOW = "now"

FIELDS = (
    Field(
        "state",
        Form.STATE,
        "`scheduled`, `queued`, `running`, or how it ended: `completed`, `failed`, `cancelled`, "
        "`expired`",
        by="submit, request",
        instead="queued",
        requeue=Requeue.SET,
    ),
    Field(
        "priority",
        Form.PRIORITY,
        "the class, 0 to 3; larger is more urgent",
        by="submit, requeue",
        instead="1",
        requeue=Requeue.SET,
        in_letter=True,
    ),
    Field(
        "tenant",
        Form.TENANT,
        "whom it is counted for",
        by="submit, requeue",
        instead="default",
        requeue=Requeue.SET,
        in_letter=True,
    ),
    Field(
        "epoch",
        Form.NUMBER,
        "grows with each claim, and whenever a claim is taken away",
        by="submit, claim, running, request, fail, requeue",
        initial="0",
        requeue=Requeue.SET,
    ),
    Field(
        "owner",
        Form.OWNER,
        "hex of 128 random bits while it runs, and after an end that the owner wrote; else empty",
        by="submit, claim, running, request, fail, requeue",
        initial="",
        requeue=Requeue.SET,
    ),
    Field(
        "attempts",
        Form.NUMBER,
        "claims that count against the limit",
        by="submit, claim, running, fail, requeue",
        initial="0",
        requeue=Requeue.SET,
        in_letter=True,
    ),
    Field(
        "resumes",
        Form.NUMBER,
        "claims that continued published tokens",
        by="submit, claim, requeue",
        initial="0",
        requeue=Requeue.SET,
    ),
    Field(
        "published",
        Form.NUMBER,
        "tokens in the log. While it runs, the log may have more, added by EXTEND; then its log "
        "position has the number",
        by="submit, commit, request, requeue",
        initial="0",
        requeue=Requeue.SET,
    ),
    Field(
        "deadline_ms",
        Form.NUMBER,
        "by the clock of its producer; 0 for none",
        by="submit, requeue",
        instead="0",
        requeue=Requeue.SET,
        in_letter=True,
    ),
    Field(
        "submitted_ms",
        Form.NUMBER,
        "when it was submitted, or queued again from a dead letter",
        by="submit, requeue",
        instead=NOW,
        requeue=Requeue.SET,
        in_letter=True,
    ),
    Field("claimed_ms", Form.NUMBER, "its first claim", by="claim", requeue=Requeue.DELETED),
    Field(
        "first_token_ms",
        Form.NUMBER,
        "its first token",
        by="commit",
        requeue=Requeue.DELETED_WITH_TOKENS,
    ),
    Field("finished_ms", Form.NUMBER, "its end", by="request", requeue=Requeue.DELETED),
    Field(
        "asked",
        Form.ANY,
        "digest of the request, made by the producer; empty if it sent none",
        by="submit, requeue",
        in_letter=True,
    ),
    Field(
        "cancel",
        Form.ANY,
        "`1` once a caller has cancelled it",
        by="cancel",
        requeue=Requeue.DELETED,
    ),
    Field(
        "prefix",
        Form.HASH,
        "hash of the published tokens; absent before the first",
        by="commit, request",
        requeue=Requeue.DELETED_WITH_TOKENS,
    ),
    Field(
        "worker",
        Form.ANY,
        "name of the worker that claimed it last; empty if that sent none",
        by="claim",
        requeue=Requeue.DELETED,
    ),
    Field(
        "resumed_from",
        Form.NUMBER,
        "published tokens at the last claim; all later ones are from this claim",
        by="claim",
        requeue=Requeue.DELETED,
    ),
    Field(
        "losses",
        Form.NUMBER,
        "claims in a row that were lost with their workers, each before it had published 64 "
        "tokens; absent before the first loss",
        by="reap",
        requeue=Requeue.DELETED,
    ),
    Field(
        "fingerprint",
        Form.ANY,
        "of the engine that first claimed it. The first token replaces it by that of the engine "
        "that generated it, if its worker sends one",
        by="claim, commit",
        requeue=Requeue.DELETED_WITH_TOKENS,
    ),
    Field(
        "metadata",
        Form.ANY,
        "msgpack map, repeated in the terminal record; absent when empty",
        by="submit, requeue",
        in_letter=True,
        ends=True,
        is_large=True,
    ),
    Field(
        "arrival",
        Form.MOMENT,
        "when it was queued, in microseconds: later than every request queued before it. Kept "
        "when it returns with tokens or is released. Absent before it was queued",
        by="request",
    ),
    Field(
        "released",
        Form.ANY,
        "the owner that released it last, so that RELEASE can be repeated",
        by="release, fail",
        requeue=Requeue.DELETED,
    ),
    Field(
        "answer",
        Form.NUMBER,
        "the most tokens for which its output counts; absent if its producer did not send it",
        by="submit",
    ),
    Field(
        "answer_limit",
        Form.NUMBER,
        "the most tokens of its output if it names none, 0 for the rest of the context; absent if "
        "it [names one](queue-order.md#requests-without-max_tokens)",
        by="submit, requeue",
        in_letter=True,
    ),
    Field(
        "fair",
        Form.SHARE,
        "`<moment> <start> <tokens>`: the microsecond by which it is ranked, its virtual start, "
        "and its tokens by the weight of its tenant; only while its class is shared by tokens",
        by="request",
        requeue=Requeue.DELETED,
        ends=True,
    ),
    Field(
        "rate",
        Form.NUMBER,
        "microseconds that its tokens, without those for the bytes of pictures, took of its "
        "tenant's tokens per minute; absent without such a limit. At the end, a part of `fair` "
        "and `rate` is given back",
        by="submit",
        requeue=Requeue.DELETED,
        ends=True,
    ),
    Field(
        "session",
        Form.SESSION,
        "the [session](sessions.md) of which it is a turn; absent without one",
        by="request",
        in_letter=True,
    ),
    Field(
        "turn",
        Form.MOMENT,
        "the arrival with which it joined its session, in microseconds",
        by="request",
    ),
    Field(
        "due_ms",
        Form.NUMBER,
        "when its [target latency](queue-order.md#target-latency) is over; absent without one",
        by="submit",
        requeue=Requeue.DELETED,
    ),
    Field(
        "kept_ms",
        Form.NUMBER,
        "when another worker first would have claimed this turn, while it is kept for the worker "
        "of the last turn",
        by="affinity",
    ),
    Field(
        "kept",
        Form.ANY,
        "what the producer [keeps with the results](../how-to/responses.md#what-is-kept), "
        "opaque to scripts and workers. Absent for every other request",
        by="submit",
        is_large=True,
    ),
    Field(
        "activity",
        Form.ANY,
        "`<activity> <owner>`: what the claim of this owner does, as its worker last told. It "
        "counts only while the request runs and its owner is this one",
        by="commit",
        ends=True,
    ),
)


def render_lua() -> str:
    """`quire/queue/request/record.lua`, whole."""
    lists = {
        "RECORD_FIELDS": (one.name for one in FIELDS if not one.is_large),
        "LETTER_FIELDS": (one.name for one in FIELDS if one.in_letter),
        "END_FIELDS": (one.name for one in FIELDS if one.ends),
        "DELETED_FIELDS": _of(Requeue.DELETED),
        "TOKEN_FIELDS": _of(Requeue.DELETED_WITH_TOKENS),
        "INITIAL_FIELDS": _initial(),
    }
    lines = [_HEADER]
    for name, words in lists.items():
        listed = ", ".join(f"'{word}'" for word in words)
        lines += textwrap.wrap(f"local {name} = {{ {listed} }}", 98, subsequent_indent="  ")
    return "\n".join([*lines, "local FIELD_FORMS = [[", *_forms(), "]]", ""])


_HEADER = """\
-- The lists of the fields of a record: `python -m quire.record` makes this file; do not edit it.
--
-- RECORD_FIELDS: all that are not large. LETTER_FIELDS: those that a dead letter has. END_FIELDS:
-- deleted at the end. DELETED_FIELDS, TOKEN_FIELDS: deleted by a requeue, and by one without the
-- tokens. INITIAL_FIELDS: names and values of a new record. FIELD_FORMS: a line for each field that
-- CONDEMN checks, with its form and in quotes what replaces a value that cannot be read, `now` for
-- the time, or nothing if it is deleted.
"""


def _of(requeue: Requeue) -> Iterator[str]:
    return (one.name for one in FIELDS if one.requeue is requeue)


def _initial() -> Iterator[str]:
    for one in FIELDS:
        if one.initial is not None:
            yield from (one.name, one.initial)


def _forms() -> Iterator[str]:
    for one in FIELDS:
        if one.form is not Form.ANY:
            replacement = "" if one.replacement is None else f" '{one.replacement}'"
            yield f"{one.name} {one.form}{replacement}"


if __name__ == "__main__":
    sys.stdout.write(render_lua())
