"""The commands of a simulated Redis on keys, strings, hashes, sets and sorted sets.

Replies are those of protocol 2: ints, bytes, None, lists, Status; an error reply is raised. A test
holds them to a real server. Each method is the command of its name.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any, TypeVar

from tests.simulation.system.redis_data import (
    Database,
    Hash,
    Members,
    ReplyError,
    Scores,
    Status,
    Stream,
    Value,
)

OK = Status(b"OK")

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"

_Kind = TypeVar("_Kind", Hash, Members, Scores, Stream, bytes)
_Aggregate = TypeVar("_Aggregate", Hash, Members, Scores)


class Commands:
    """What can be asked of a database. `clock` gives unix microseconds."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.database = Database()
        self._clock = clock

    def now_ms(self) -> int:
        return self._clock() // 1000

    # Keys.

    def value(self, key: bytes) -> Value | None:
        """The value of a key, None when there is none or its time is over."""
        expiry = self.database.expiries.get(key)
        if expiry is not None and self.now_ms() >= expiry:
            self.remove(key)
        return self.database.values.get(key)

    def typed(self, key: bytes, kind: type[_Kind]) -> _Kind | None:
        value = self.value(key)
        if value is None or type(value) is kind:
            return value
        raise ReplyError(WRONG_TYPE)

    def made(self, key: bytes, kind: type[_Aggregate]) -> _Aggregate:
        value = self.typed(key, kind)
        if value is None:
            value = kind()
            self.database.values[key] = value
        return value

    def remove(self, key: bytes) -> bool:
        self.database.expiries.pop(key, None)
        return self.database.values.pop(key, None) is not None

    def drop_if_empty(self, key: bytes) -> None:
        """A hash or set without anything in it does not exist."""
        if not self.database.values[key]:
            self.remove(key)

    def ping(self) -> bytes:
        return Status(b"PONG")

    def time(self) -> list[bytes]:
        now = self._clock()
        return [b"%d" % (now // 1_000_000), b"%d" % (now % 1_000_000)]

    def del_(self, *keys: bytes) -> int:
        return sum(self.value(key) is not None and self.remove(key) for key in keys)

    def exists(self, *keys: bytes) -> int:
        return sum(self.value(key) is not None for key in keys)

    def type(self, key: bytes) -> Status:
        names = {bytes: b"string", Hash: b"hash", Members: b"set", Scores: b"zset"}
        value = self.value(key)
        kind = b"none" if value is None else names.get(type(value), b"stream")
        return Status(kind)

    def pexpire(self, key: bytes, milliseconds: bytes) -> int:
        if self.value(key) is None:
            return 0
        if int(milliseconds) <= 0:
            self.remove(key)
        else:
            self.database.expiries[key] = self.now_ms() + int(milliseconds)
        return 1

    def pttl(self, key: bytes) -> int:
        if self.value(key) is None:
            return -2
        expiry = self.database.expiries.get(key)
        return -1 if expiry is None else expiry - self.now_ms()

    def scan(self, _cursor: bytes, *options: bytes) -> list[Any]:
        """Everything at once, whatever COUNT says."""
        given = dict(zip((o.upper() for o in options[::2]), options[1::2], strict=True))
        pattern = given.get(b"MATCH", b"*").replace(b"[", b"[[]")
        keys = [key for key in list(self.database.values) if self.value(key) is not None]
        return [b"0", [key for key in keys if fnmatch.fnmatchcase(key, pattern)]]

    # Strings.

    def get(self, key: bytes) -> bytes | None:
        return self.typed(key, bytes)

    def set(self, key: bytes, value: bytes, *options: bytes) -> Status | None:
        words = [option.upper() for option in options]
        exists = self.value(key) is not None
        if (b"NX" in words and exists) or (b"XX" in words and not exists):
            return None
        if b"KEEPTTL" not in words:
            self.database.expiries.pop(key, None)
        self.database.values[key] = value
        for unit, factor in ((b"PX", 1), (b"EX", 1000)):
            if unit in words:
                milliseconds = int(options[words.index(unit) + 1]) * factor
                if milliseconds <= 0:
                    raise ReplyError("ERR invalid expire time in 'set' command")
                self.database.expiries[key] = self.now_ms() + milliseconds
        return OK

    def strlen(self, key: bytes) -> int:
        return len(self.typed(key, bytes) or b"")

    # Hashes.

    def hset(self, key: bytes, *pairs: bytes) -> int:
        fields = self.made(key, Hash)
        before = len(fields)
        if len(pairs) % 2 or not pairs:
            raise ReplyError("ERR wrong number of arguments for 'hset' command")
        fields.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(fields) - before

    def hget(self, key: bytes, field: bytes) -> bytes | None:
        return (self.typed(key, Hash) or {}).get(field)

    def hmget(self, key: bytes, *names: bytes) -> list[bytes | None]:
        fields = self.typed(key, Hash) or {}
        return [fields.get(name) for name in names]

    def hgetall(self, key: bytes) -> list[bytes]:
        fields = self.typed(key, Hash) or {}
        return [part for pair in fields.items() for part in pair]

    def hscan(self, key: bytes, _cursor: bytes, *_options: bytes) -> list[Any]:
        """Everything at once, whatever COUNT says."""
        return [b"0", self.hgetall(key)]

    def hkeys(self, key: bytes) -> list[bytes]:
        return list(self.typed(key, Hash) or {})

    def hlen(self, key: bytes) -> int:
        return len(self.typed(key, Hash) or {})

    def hexists(self, key: bytes, field: bytes) -> int:
        return int(field in (self.typed(key, Hash) or {}))

    def hdel(self, key: bytes, *names: bytes) -> int:
        fields = self.typed(key, Hash)
        if fields is None:
            return 0
        gone = sum(fields.pop(name, None) is not None for name in names)
        self.drop_if_empty(key)
        return gone

    def hincrby(self, key: bytes, field: bytes, change: bytes) -> int:
        fields = self.made(key, Hash)
        try:
            number = int(fields.get(field, b"0")) + int(change)
        except ValueError:
            raise ReplyError("ERR hash value is not an integer") from None
        fields[field] = b"%d" % number
        return number

    # Sets.

    def sadd(self, key: bytes, *members: bytes) -> int:
        held = self.made(key, Members)
        before = len(held)
        held.update(dict.fromkeys(members))
        return len(held) - before

    def srem(self, key: bytes, *members: bytes) -> int:
        held = self.typed(key, Members)
        if held is None:
            return 0
        present = [member for member in dict.fromkeys(members) if member in held]
        for member in present:
            del held[member]
        self.drop_if_empty(key)
        return len(present)

    def smembers(self, key: bytes) -> list[bytes]:
        return list(self.typed(key, Members) or {})

    def scard(self, key: bytes) -> int:
        return len(self.typed(key, Members) or {})

    # Sorted sets.

    def zadd(self, key: bytes, *arguments: bytes) -> int:
        words, rest = set[bytes](), list(arguments)
        while rest and rest[0].upper() in (b"NX", b"XX", b"GT", b"LT", b"CH"):
            words.add(rest.pop(0).upper())
        held = self.typed(key, Scores)
        if held is None and b"XX" in words:
            return 0
        held = self.made(key, Scores)
        added = changed = 0
        for score, member in zip(map(float, rest[::2]), rest[1::2], strict=True):
            old = held.get(member)
            refused = (
                (old is None and b"XX" in words)
                or (old is not None and b"NX" in words)
                or (old is not None and b"GT" in words and score <= old)
                or (old is not None and b"LT" in words and score >= old)
            )
            if not refused:
                held[member] = score
                added += old is None
                changed += old != score
        return changed if b"CH" in words else added

    def zrem(self, key: bytes, *members: bytes) -> int:
        held = self.typed(key, Scores)
        if held is None:
            return 0
        gone = sum(held.pop(member, None) is not None for member in members)
        self.drop_if_empty(key)
        return gone

    def zscore(self, key: bytes, member: bytes) -> bytes | None:
        score = (self.typed(key, Scores) or {}).get(member)
        return None if score is None else score_text(score)

    def zcard(self, key: bytes) -> int:
        return len(self.typed(key, Scores) or {})

    def zcount(self, key: bytes, least: bytes, most: bytes) -> int:
        return len(self._by_score(key, least, most))

    def zrange(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> list[bytes]:
        ordered = (self.typed(key, Scores) or Scores()).ordered()
        start, end = (i + len(ordered) if i < 0 else i for i in (int(first), int(last)))
        return told(ordered[max(0, start) : end + 1], with_scores=bool(options))

    def zrangebyscore(self, key: bytes, least: bytes, most: bytes, *options: bytes) -> list[bytes]:
        words = [option.upper() for option in options]
        found = self._by_score(key, least, most)
        if b"LIMIT" in words:
            place = words.index(b"LIMIT")
            skip, count = int(words[place + 1]), int(words[place + 2])
            found = found[skip : skip + count if count >= 0 else None]
        return told(found, with_scores=b"WITHSCORES" in words)

    def zrangebylex(self, key: bytes, least: bytes, most: bytes, *options: bytes) -> list[bytes]:
        """In a set whose members all have the same score, the only kind that the scripts ask."""
        above, below = _lex_bound(least), _lex_bound(most)
        found = [
            member
            for member, _ in (self.typed(key, Scores) or Scores()).ordered()
            if above[0] <= member <= below[0]
            and not (member == above[0] and above[1])
            and not (member == below[0] and below[1])
        ]
        if options:
            skip, count = int(options[1]), int(options[2])
            found = found[skip : skip + count if count >= 0 else None]
        return found

    def zremrangebyscore(self, key: bytes, least: bytes, most: bytes) -> int:
        return self.zrem(key, *(member for member, _ in self._by_score(key, least, most)))

    def _by_score(self, key: bytes, least: bytes, most: bytes) -> list[tuple[bytes, float]]:
        above, below = _bound(least), _bound(most)
        return [
            (member, score)
            for member, score in (self.typed(key, Scores) or Scores()).ordered()
            if (score > above[0] or (score == above[0] and not above[1]))
            and (score < below[0] or (score == below[0] and not below[1]))
        ]


def score_text(score: float) -> bytes:
    """A score as Redis writes it."""
    text = repr(int(score)) if score.is_integer() and abs(score) < 1e17 else repr(score)
    return text.encode()


def told(found: list[tuple[bytes, float]], *, with_scores: bool) -> list[bytes]:
    if not with_scores:
        return [member for member, _ in found]
    return [part for member, score in found for part in (member, score_text(score))]


def _lex_bound(text: bytes) -> tuple[bytes, bool]:
    """A bound of a range of members, and whether it is left out itself."""
    if text[:1] not in (b"[", b"("):
        raise ReplyError("ERR min or max not valid string range item")
    return text[1:], text.startswith(b"(")


def _bound(text: bytes) -> tuple[float, bool]:
    """A bound of a range of scores, and whether it is left out itself."""
    return float(text.removeprefix(b"(")), text.startswith(b"(")
