"""The audit's controls that need no process: damage planted in a sound log, to be named by it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgpack

from tests.chaos.audit import Expected, log_violations

Log = list[tuple[bytes, dict[bytes, bytes]]]

#: Attempts that a log may say it took.
MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Plant:
    """Damage done to a sound log in place, and what the audit has to say of it, in its words.

    `is_sealed`: the log was sealed while it was sound.
    """

    damage: Callable[[Log], None]
    words: str
    is_sealed: bool = False

    @property
    def is_found(self) -> bool:
        """The audit names this damage."""
        expected, log = sound_log(is_sealed=self.is_sealed)
        self.damage(log)
        found = log_violations(expected, log, max_attempts=MAX_ATTEMPTS)
        return any(self.words in sentence for sentence in found)


def sound_log(*, is_sealed: bool = True) -> tuple[Expected, Log]:
    """A log of four tokens written one by one by two claims, as it should be."""
    expected = Expected("planted", (10, 20, 30, 40), "abcd")
    log = [
        (
            f"{index}-{1 + index // 2}".encode(),
            {b"from": b"%d" % index, b"ids": msgpack.packb([token]), b"text": text.encode()},
        )
        for index, (token, text) in enumerate(zip(expected.tokens, expected.text, strict=True))
    ]
    end = {"state": "completed", "finish_reason": "length"}
    log.append((b"4-2", {b"done": msgpack.packb(end), b"attempts": b"2", b"resumes": b"1"}))
    sealed = tuple((entry_id, dict(fields)) for entry_id, fields in log)
    return replace(expected, sealed=sealed if is_sealed else None), log


def _missing_token(log: Log) -> None:
    del log[2]


def _repeated_token(log: Log) -> None:
    log.insert(3, (b"2-2", dict(log[2][1])))


def _wrong_token(log: Log) -> None:
    (token,) = msgpack.unpackb(log[1][1][b"ids"])
    log[1][1][b"ids"] = msgpack.packb([token + 1])


def _shorter_log(log: Log) -> None:
    del log[3]
    log[3] = (b"3-2", log[3][1])


def _no_end(log: Log) -> None:
    log.pop()


def _second_end(log: Log) -> None:
    log.append((b"4-3", dict(log[-1][1])))


def _words_after_the_end(log: Log) -> None:
    log.append((b"4-3", dict(log[1][1])))


def _fenced_claim_heard(log: Log) -> None:
    log[3] = (b"3-1", log[3][1])
    log[2] = (b"2-3", log[2][1])


def _lost_text(log: Log) -> None:
    log[1][1][b"text"] = b""


def _two_entries_made_one(log: Log) -> None:
    """Reads as before."""
    (_, first), (entry_id, second) = log[:2]
    ids = msgpack.unpackb(first[b"ids"]) + msgpack.unpackb(second[b"ids"])
    text = first[b"text"] + second[b"text"]
    log[:2] = [(entry_id, {b"from": b"0", b"ids": msgpack.packb(ids), b"text": text})]


PLANTS: dict[str, Plant] = {
    "a missing token": Plant(_missing_token, "tokens 2 to 2 are missing"),
    "a repeated token": Plant(_repeated_token, "tokens 2 to 2 were written twice"),
    "a wrong token": Plant(_wrong_token, "token 1 is not that of the uninterrupted run"),
    "a shorter log": Plant(_shorter_log, "completed with 3 of 4 tokens"),
    "no end": Plant(_no_end, "0 terminal records"),
    "a second end": Plant(_second_end, "2 terminal records"),
    "words after the end": Plant(_words_after_the_end, "comes after the end"),
    "a fenced claim heard": Plant(_fenced_claim_heard, "a fenced claim was heard"),
    "lost text": Plant(_lost_text, "the text is not that of the uninterrupted run"),
    "two entries made one": Plant(
        _two_entries_made_one, "was changed after the broker", is_sealed=True
    ),
}
