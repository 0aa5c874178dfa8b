"""The laws of the books: every count equals what it counts, counted again from nothing."""

from __future__ import annotations

from collections import Counter

import redis

from quire.keys import GROUP_SEPARATOR
from quire.queue.broker import Broker
from quire.wire.output import State

WAITING = {State.SCHEDULED, State.QUEUED}


class Books:
    """What a queue says of its requests, read in a few trips however many there are."""

    def __init__(self, connection: redis.Redis, broker: Broker) -> None:
        self.connection, self.keys = connection, broker.keys
        prefix = self.keys.request("").encode()
        records = list(connection.scan_iter(match=prefix + b"*", count=1000))
        with connection.pipeline(transaction=False) as pipeline:
            for key in records:
                pipeline.hmget(key, "state", "submitted_ms")
            pipeline.hgetall(self.keys.open).hgetall(self.keys.counts)
            for ranks in (self.keys.wait, self.keys.turns, *self.keys.all_ranks):
                pipeline.zrange(ranks, 0, -1)
            found = pipeline.execute()
        entries, counts, waits, turns, *ranked = found[len(records) :]
        names = [key.removeprefix(prefix).decode() for key in records]
        # A record may expire between the two trips.
        self.submitted = {
            name: at for name, (state, at) in zip(names, found, strict=False) if state
        }
        self.states = {
            name: State(state.decode())
            for name, (state, _) in zip(names, found, strict=False)
            if state
        }
        parts = {name.decode(): entry.decode().split(" ") for name, entry in entries.items()}
        #: The state, the tokens and the tenant of each open request.
        self.booked = {name: (State(state), int(n), who) for name, (state, n, who) in parts.items()}
        self.counts = {name.decode(): int(count) for name, count in counts.items()}
        self.waits = {name.decode() for name in waits}
        self.turns = [member.decode() for member in turns]
        self.ranked = [name.decode() for names in ranked for name in names]

    @property
    def parked(self) -> set[str]:
        """The queued turns of sessions that have an earlier open turn."""
        begun, found = set[str](), set[str]()
        for member in self.turns:
            session, _, name = member.split(" ")
            if name in self.booked:
                if session in begun and self.booked[name][0] is State.QUEUED:
                    found.add(name)
                begun.add(session)
        return found

    def unbalanced(self) -> list[str]:
        """What does not add up, as sentences.

        A request whose keys have expired before its end is in the books until someone meets its
        entry, its lease or its due time. Of every other open request record and books say the same.
        """
        states, booked = self.states, self.booked
        wrong = [
            f"{name} is {state} and in the books as {booked.get(name)}"
            for name, state in states.items()
            if (None if state.is_terminal else state)
            != (booked[name][0] if name in booked else None)
        ]
        expected = Counter[str]()
        for state, tokens, tenant in booked.values():
            expected["tokens"] += tokens if state in WAITING else 0
            expected[f"tenant:{tenant}"] += 1
        if self.counts != {name: count for name, count in expected.items() if count}:
            wrong.append(f"the counts are {self.counts} and should be {dict(expected)}")
        if self.waits != {name for name, (state, _, _) in booked.items() if state in WAITING}:
            wrong.append(f"{self.waits} have a time to wait, the books are {booked}")
        # Members whose records have expired go on counting, as what the books or the ends say.
        states = {name: state for name, (state, _, _) in booked.items()} | states
        groups = {name.partition(GROUP_SEPARATOR)[0] for name in states if GROUP_SEPARATOR in name}
        for group in groups:
            wrong += _unbalanced_group(self, group, states=states)
        return wrong

    def misranked(self) -> list[str]:
        """Whether the rank sets have all queued requests that are not parked, and no other.

        Apart from the others, because a server may lose a rank set while requests wait.
        """
        parked = self.parked
        queued = [
            name
            for name, (state, _, _) in self.booked.items()
            if state is State.QUEUED and name not in parked
        ]
        if sorted(self.ranked) == sorted(queued):
            return []
        return [f"{self.ranked} are ranked, booked: {self.booked}"]

    def mistold(self) -> list[str]:
        """I16: the requests that have ended, and whose end was told twice or not at all."""
        told = Counter(
            (fields[b"id"].decode(), fields.get(b"submitted_ms"))
            for _, fields in self.connection.xrange(self.keys.ends)
            # A batch has no request.
            if b"batch" not in fields
        )
        wrong = [f"the end of {name} was told {n} times" for (name, _), n in told.items() if n > 1]
        for name, state in self.states.items():
            is_told = (name, self.submitted[name]) in told
            if state.is_terminal and not is_told:
                wrong.append(f"{name} is {state}, which was not told")
            elif is_told and not state.is_terminal:
                wrong.append(f"{name} is {state}, and its end was told")
        return wrong


def unbalanced(connection: redis.Redis, broker: Broker) -> list[str]:
    """What of the books does not add up at this moment, as sentences."""
    return Books(connection, broker).unbalanced()


def _unbalanced_group(books: Books, group: str, *, states: dict[str, State]) -> list[str]:
    connection = books.connection
    counts_key, open_key, ends_key = books.keys.of_group(group)
    members = {
        fields[b"id"].decode(): State(fields[b"state"].decode())
        for _, fields in connection.xrange(ends_key)
    } | {n: s for n, s in states.items() if n.startswith(group + GROUP_SEPARATOR)}
    counts = {k.decode(): int(v) for k, v in connection.hgetall(counts_key).items() if int(v)}
    wrong = []
    if counts != {str(state): n for state, n in Counter(members.values()).items()}:
        wrong.append(f"group {group} counts {counts}, its members are {members}")
    left = {name.decode() for name in connection.smembers(open_key)}
    if left != {name for name, state in members.items() if not state.is_terminal}:
        wrong.append(f"group {group} has {left} open, its members are {members}")
    return wrong
