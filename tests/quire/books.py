"""The laws of the books: every count equals what it counts, counted again from nothing."""

from __future__ import annotations

from collections import Counter

import redis

from quire.keys import GROUP_SEPARATOR
from quire.queue.broker import Broker
from quire.wire.output import State

WAITING = {State.SCHEDULED, State.QUEUED}


def unbalanced(connection: redis.Redis, broker: Broker) -> list[str]:
    """What does not add up, as sentences.

    A request whose keys have expired before its end is in the books until someone meets its entry,
    its lease or its due time. Of every other open request record and books say the same.
    """
    keys = broker.keys
    states = states_of(connection, broker)
    booked = books_of(connection, broker)
    wrong = [
        f"{name} is {state} and in the books as {booked.get(name)}"
        for name, state in states.items()
        if (None if state.is_terminal else state) != (booked[name][0] if name in booked else None)
    ]
    expected = Counter[str]()
    for state, tokens, tenant in booked.values():
        expected["tokens"] += tokens if state in WAITING else 0
        expected[f"tenant:{tenant}"] += 1
    counts = {k.decode(): int(v) for k, v in connection.hgetall(keys.counts).items()}
    if counts != {name: count for name, count in expected.items() if count}:
        wrong.append(f"the counts are {counts} and should be {dict(expected)}")
    waits = {name.decode() for name in connection.zrange(keys.wait, 0, -1)}
    if waits != {name for name, (state, _, _) in booked.items() if state in WAITING}:
        wrong.append(f"{waits} have a time to wait, the books are {booked}")
    # Members whose records have expired go on counting, as what the books or the ends say of them.
    states |= {name: state for name, (state, _, _) in booked.items() if name not in states}
    groups = {name.partition(GROUP_SEPARATOR)[0] for name in states if GROUP_SEPARATOR in name}
    for group in groups:
        wrong += _unbalanced_group(connection, broker, group, states=states)
    return wrong


def misranked(connection: redis.Redis, broker: Broker) -> list[str]:
    """Whether the rank sets have all queued requests that are not parked, and no other.

    Apart from the others, because a server may lose a rank set while requests wait.
    """
    keys, booked = broker.keys, books_of(connection, broker)
    ranked = [name.decode() for ranks in keys.all_ranks for name in connection.zrange(ranks, 0, -1)]
    parked = parked_of(connection, broker)
    queued = [
        name
        for name, (state, _, _) in booked.items()
        if state is State.QUEUED and name not in parked
    ]
    return [] if sorted(ranked) == sorted(queued) else [f"{ranked} are ranked, booked: {booked}"]


def mistold(connection: redis.Redis, broker: Broker) -> list[str]:
    """I16: the requests that have ended, and whose end was told twice or not at all."""
    told = Counter(
        (fields[b"id"].decode(), fields.get(b"submitted_ms"))
        for _, fields in connection.xrange(broker.keys.ends)
        # A batch has no request.
        if b"batch" not in fields
    )
    wrong = [f"the end of {name} was told {n} times" for (name, _), n in told.items() if n > 1]
    for name, state in states_of(connection, broker).items():
        submitted = connection.hget(broker.keys.request(name), "submitted_ms")
        if state.is_terminal and (name, submitted) not in told:
            wrong.append(f"{name} is {state}, which was not told")
        elif not state.is_terminal and (name, submitted) in told:
            wrong.append(f"{name} is {state}, and its end was told")
    return wrong


def parked_of(connection: redis.Redis, broker: Broker) -> set[str]:
    """The queued turns of sessions that have an earlier open turn."""
    booked, begun, found = books_of(connection, broker), set[str](), set[str]()
    for member in connection.zrange(broker.keys.turns, 0, -1):
        session, _, name = member.decode().split(" ")
        if name in booked:
            if session in begun and booked[name][0] is State.QUEUED:
                found.add(name)
            begun.add(session)
    return found


def states_of(connection: redis.Redis, broker: Broker) -> dict[str, State]:
    """The state of every request that has a record."""
    prefix = broker.keys.request("").encode()
    return {
        key.removeprefix(prefix).decode(): State(connection.hget(key, "state").decode())
        for key in connection.scan_iter(match=prefix + b"*", count=1000)
    }


def books_of(connection: redis.Redis, broker: Broker) -> dict[str, tuple[State, int, str]]:
    entries = connection.hgetall(broker.keys.open)
    parts = {name.decode(): entry.decode().split(" ") for name, entry in entries.items()}
    return {name: (State(state), int(n), tenant) for name, (state, n, tenant) in parts.items()}


def _unbalanced_group(
    connection: redis.Redis, broker: Broker, group: str, *, states: dict[str, State]
) -> list[str]:
    counts_key, open_key, ends_key = broker.keys.of_group(group)
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
