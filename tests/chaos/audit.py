"""Judges what a schedule left behind: the raw logs against the uninterrupted run, token for token.

Reads entries as Redis holds them and trusts no reader of ours with the order: a log that a client
would refuse must be named here, too. Every violation is a sentence; no sentence, no violation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgpack

from quire.wire.history import EMPTY, extended
from quire.wire.output import Completion, State

Entry = tuple[bytes, Mapping[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Expected:
    """What must come out of one request.

    `tokens` and `text` are those of the run nobody interrupted. `may_be_cancelled`: a caller asked
    for it. `sealed`: the entries there were when the broker had said that the request was over, if
    it said so and has kept its memory since; there must be no others, ever.
    """

    request_id: str
    tokens: tuple[int, ...]
    text: str
    may_be_cancelled: bool = False
    sealed: tuple[Entry, ...] | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """One output log, taken apart without judging it."""

    token_ids: tuple[int, ...]
    text: str
    completion: Completion | None


def read_log(request_id: str, entries: Sequence[Entry]) -> Log:
    """All tokens and the last end in the order of the entries, whatever their indices say."""
    token_ids: list[int] = []
    text = b""
    completion = None
    for entry_id, fields in entries:
        if b"done" in fields:
            completion = Completion.from_entry(request_id, entry_id, fields=fields)
        else:
            token_ids += _ids_in(fields)
            text += fields[b"text"]
    return Log(tuple(token_ids), text.decode(), completion)


def log_violations(
    expected: Expected, entries: Sequence[Entry], *, max_attempts: int
) -> Iterator[str]:
    """What is wrong with one log."""
    name = expected.request_id
    yield from _order_violations(name, entries)
    yield from _seal_violations(expected, entries)
    log = read_log(name, entries)
    wrong = first_difference(log.token_ids, expected.tokens)
    if wrong is not None:
        yield f"{name}: token {wrong} is not that of the uninterrupted run"
    if log.completion is not None:
        yield from _end_violations(expected, log, log.completion, max_attempts=max_attempts)


def first_difference(found: Sequence[int], whole: Sequence[int]) -> int | None:
    """The index at which `found` stops being a beginning of `whole`, None when it never does."""
    for index, token_id in enumerate(found):
        if index >= len(whole) or token_id != whole[index]:
            return index
    return None


def _ids_in(fields: Mapping[bytes, bytes]) -> list[int]:
    """The tokens of an entry: ids alone, or each in a list with its log-probabilities."""
    found = msgpack.unpackb(fields[b"ids"])
    return [item[0] if isinstance(item, list) else item for item in found]


def _order_violations(name: str, entries: Sequence[Entry]) -> Iterator[str]:
    position, last_epoch, ends = 0, 0, 0
    for entry_id, fields in entries:
        index, epoch = (int(part) for part in entry_id.split(b"-"))
        if ends:
            yield f"{name}: entry {entry_id.decode()} comes after the end"
        if epoch < last_epoch:
            yield f"{name}: epoch {epoch} wrote after epoch {last_epoch}: a fenced claim was heard"
        last_epoch = max(last_epoch, epoch)
        if b"done" in fields:
            ends += 1
            if index != position:
                yield f"{name}: the end says {index} tokens, the log holds {position}"
            continue
        start, count = int(fields[b"from"]), len(_ids_in(fields))
        if start > position:
            yield f"{name}: tokens {position} to {start - 1} are missing"
        elif start < position:
            yield f"{name}: tokens {start} to {position - 1} were written twice"
        if index != start + count - 1:
            yield f"{name}: entry {entry_id.decode()} contradicts its own tokens"
        position = max(position, start + count)
    if ends != 1:
        yield f"{name}: {ends} terminal records"


def _seal_violations(expected: Expected, entries: Sequence[Entry]) -> Iterator[str]:
    name, sealed = expected.request_id, expected.sealed
    if sealed is None:
        return
    if not sealed or b"done" not in sealed[-1][1]:
        yield f"{name}: the broker said that it was over before its end was in the log"
    if tuple(entries) != sealed:
        yield f"{name}: the log was changed after the broker had said that it was over"


def _end_violations(
    expected: Expected, log: Log, completion: Completion, *, max_attempts: int
) -> Iterator[str]:
    name, state = expected.request_id, completion.state
    if completion.attempts > max_attempts:
        yield f"{name}: {completion.attempts} attempts, {max_attempts} are allowed"
    if completion.prefix_hash and completion.prefix_hash != extended(EMPTY, log.token_ids):
        yield f"{name}: the hash of the log is not that of its tokens"
    if state is State.COMPLETED:
        if len(log.token_ids) != len(expected.tokens):
            yield f"{name}: completed with {len(log.token_ids)} of {len(expected.tokens)} tokens"
        if log.text != expected.text:
            yield f"{name}: the text is not that of the uninterrupted run"
    elif state is State.CANCELLED:
        if not expected.may_be_cancelled:
            yield f"{name}: cancelled, and nobody asked for it"
    elif not _has_spent_its_attempts(completion, max_attempts):
        yield f"{name}: ended as {state} ({completion.error})"


def _has_spent_its_attempts(completion: Completion, max_attempts: int) -> bool:
    error = completion.error
    is_spent = error is not None and error.code == "attempts_spent"
    return is_spent and completion.attempts == max_attempts
