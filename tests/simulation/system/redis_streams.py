"""The stream commands of a simulated Redis; see redis_commands.py."""

from __future__ import annotations

from typing import Any

from tests.simulation.system.redis_commands import OK, Commands
from tests.simulation.system.redis_data import (
    FIRST_ID,
    LAST_ID,
    EntryId,
    Group,
    ReplyError,
    Status,
    Stream,
    format_id,
    parse_id,
)

MAX_NUMBER = LAST_ID[1]


class StreamCommands(Commands):
    """Adds streams and consumer groups."""

    def xadd(self, key: bytes, *arguments: bytes) -> bytes | None:
        rest, bounds = list(arguments), dict[bytes, bytes]()
        if rest[0].upper() == b"NOMKSTREAM":
            rest.pop(0)
            if self.typed(key, Stream) is None:
                return None
        while (word := rest[0].upper()) in (b"MAXLEN", b"MINID"):
            rest.pop(0)
            is_exact = rest[0] != b"~"
            if rest[0] in (b"~", b"="):
                rest.pop(0)
            # A trim that may keep more keeps everything here.
            bounds |= {word: rest.pop(0)} if is_exact else {b"": rest.pop(0)}
        stream = self.typed(key, Stream)
        entry_id = self._next_id(rest.pop(0), stream.last_id if stream else FIRST_ID)
        if not rest or len(rest) % 2:
            raise ReplyError("ERR wrong number of arguments for 'xadd' command")
        if stream is None:
            stream = Stream()
            self.database.values[key] = stream
        stream.ids.append(entry_id)
        stream.fields.append(tuple(rest))
        stream.last_id = entry_id
        for word in (b"MAXLEN", b"MINID"):
            if word in bounds:
                _trim(stream, word, bounds[word])
        self.stream_grew()
        return format_id(entry_id)

    def stream_grew(self) -> None:
        """Called when blocked readers may have something to read."""

    def xlen(self, key: bytes) -> int:
        stream = self.typed(key, Stream)
        return len(stream.ids) if stream else 0

    def xdel(self, key: bytes, *entry_ids: bytes) -> int:
        stream = self.typed(key, Stream)
        return sum(stream.delete(parse_id(i, missing=0)) for i in entry_ids) if stream else 0

    def xtrim(self, key: bytes, *arguments: bytes) -> int:
        stream = self.typed(key, Stream)
        words = [word for word in arguments if word not in (b"~", b"=")]
        if stream is None:
            return 0
        return _trim(stream, words[0].upper(), words[1])

    def xrange(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> list[Any]:
        stream = self.typed(key, Stream)
        if stream is None:
            return []
        start, end = _range_bound(first, missing=0), _range_bound(last, missing=MAX_NUMBER)
        if first.startswith(b"("):
            start = _successor(start)
        places = stream.between(start, end)
        if places and last.startswith(b"(") and stream.ids[places[-1]] == end:
            places = places[:-1]
        if options:
            places = places[: int(options[1])]
        return [_entry(stream, place) for place in places]

    def xrevrange(self, key: bytes, last: bytes, first: bytes, *options: bytes) -> list[Any]:
        found = self.xrange(key, first, last)[::-1]
        return found[: int(options[1])] if options else found

    def xread(self, *arguments: bytes) -> list[Any] | None:
        options, keys, positions = _streams_of(list(arguments))
        count = int(options.get(b"COUNT", b"-1"))
        found = []
        for key, position in zip(keys, positions, strict=True):
            stream = self.typed(key, Stream)
            if stream is None:
                continue
            after = stream.last_id if position == b"$" else parse_id(position, missing=0)
            places = stream.between(_successor(after), LAST_ID)
            if count > 0:
                places = places[:count]
            if places:
                found.append([key, [_entry(stream, place) for place in places]])
        return found or None

    # Groups.

    def xgroup(self, verb: bytes, key: bytes, name: bytes, start: bytes, *options: bytes) -> Status:
        if verb.upper() != b"CREATE":
            raise ReplyError(f"ERR unknown subcommand {verb!r}")
        stream = self.typed(key, Stream)
        if stream is None:
            if b"MKSTREAM" not in (word.upper() for word in options):
                raise ReplyError("ERR The XGROUP subcommand requires the key to exist")
            stream = Stream()
            self.database.values[key] = stream
        if name in stream.groups:
            raise ReplyError("BUSYGROUP Consumer Group name already exists")
        position = stream.last_id if start == b"$" else parse_id(start, missing=0)
        stream.groups[name] = Group(position)
        return OK

    def xreadgroup(self, _word: bytes, name: bytes, _consumer: bytes, *rest: bytes) -> Any:
        options, keys, positions = _streams_of(list(rest))
        count = int(options.get(b"COUNT", b"-1"))
        assert set(positions) == {b">"}, "what was delivered before is never asked for"
        found = []
        for key, group in [(key, self._group(key, name)) for key in keys]:
            stream = self.typed(key, Stream)
            assert stream is not None
            entries = self._deliver(stream, group, count=count, is_kept=b"NOACK" not in options)
            if entries:
                found.append([key, entries])
        return found or None

    def _deliver(self, stream: Stream, group: Group, *, count: int, is_kept: bool) -> list[Any]:
        places = stream.between(_successor(group.last_delivered), LAST_ID)
        if count > 0:
            places = places[:count]
        for place in places:
            group.last_delivered = stream.ids[place]
            if is_kept:
                group.pending.add(group.last_delivered)
        return [_entry(stream, place) for place in places]

    def _group(self, key: bytes, name: bytes) -> Group:
        stream = self.typed(key, Stream)
        if stream is None or name not in stream.groups:
            message = f"NOGROUP No such key '{key.decode()}' or consumer group '{name.decode()}'"
            raise ReplyError(message)
        return stream.groups[name]

    def _next_id(self, wanted: bytes, last: EntryId) -> EntryId:
        if wanted == b"*":
            now = self.now_ms()
            return (now, 0) if now > last[0] else (last[0], last[1] + 1)
        entry_id = parse_id(wanted, missing=0)
        if entry_id <= last or entry_id == FIRST_ID:
            message = "ERR The ID specified in XADD is equal or smaller than the target stream"
            raise ReplyError(f"{message} top item")
        return entry_id


def _streams_of(rest: list[bytes]) -> tuple[dict[bytes, bytes], list[bytes], list[bytes]]:
    """The options of a read, its keys and its positions."""
    options: dict[bytes, bytes] = {}
    while (word := rest.pop(0).upper()) != b"STREAMS":
        options[word] = b"" if word == b"NOACK" else rest.pop(0)
    half = len(rest) // 2
    return options, rest[:half], rest[half:]


def _trim(stream: Stream, word: bytes, bound: bytes) -> int:
    """Drops the oldest entries; returns how many."""
    if word == b"MAXLEN":
        return stream.keep_last(int(bound))
    return stream.keep_last(len(stream.between(parse_id(bound, missing=0), LAST_ID)))


def _entry(stream: Stream, place: int) -> list[Any]:
    return [format_id(stream.ids[place]), list(stream.fields[place])]


def _range_bound(text: bytes, *, missing: int) -> EntryId:
    return parse_id(text.removeprefix(b"("), missing=missing)


def _successor(entry_id: EntryId) -> EntryId:
    return (entry_id[0], entry_id[1] + 1) if entry_id[1] < MAX_NUMBER else (entry_id[0] + 1, 0)
