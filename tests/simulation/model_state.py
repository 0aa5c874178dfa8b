"""What one queue shard holds, as small immutable values; the model's counterpart of keys.py.

Owners and the ids of entries and letters are small integers, a token is its own content, a lease or
a delay is over or not. Left out, because no decision of a script depends on it: bodies, metadata,
fingerprints, time stamps, priorities, sizes. All requests belong to one tenant and one group.
"""

from __future__ import annotations

from typing import NamedTuple

#: The owner of a request that nobody runs. Owners and ids count from 1.
NOBODY = 0

#: Where a request whose keys do not exist would stand.
MISSING: tuple[()] = ()

#: The states before the end; in the first two a request waits.
WAITING = ("scheduled", "queued")
OPEN = (*WAITING, "running")

#: The state a request is in after each way to end.
STATE_OF = {
    "completed": "completed",
    "cancelled": "cancelled",
    "deadline_exceeded": "expired",
    "queue_timeout": "expired",
    "attempts_spent": "failed",
    "undecodable": "failed",
    "worker_error": "failed",
}

#: A token is an index, or, from a stateful source of noise, an index plus this times its owner.
STRIDE = 100


class Chunk(NamedTuple):
    """An entry of the output log; its id is `<index of the last token>-<epoch>`."""

    start: int
    tokens: tuple[int, ...]
    epoch: int

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class End(NamedTuple):
    """The terminal entry at `<at>-<epoch>`, with the stamps of the broker. `reason`: STATE_OF."""

    at: int
    epoch: int
    reason: str
    attempts: int
    resumes: int


class Request(NamedTuple):
    """The keys of one request: its record, its log, and whether its body is there."""

    state: str = ""
    epoch: int = 0
    owner: int = NOBODY
    published: int = 0
    attempts: int = 0
    resumes: int = 0
    cancel: bool = False
    released: int = NOBODY
    is_queue_time_over: bool = False
    has_body: bool = True
    log: tuple[Chunk | End, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for entry in self.log if isinstance(entry, Chunk) for t in entry.tokens)

    @property
    def end(self) -> End | None:
        return next((entry for entry in self.log if isinstance(entry, End)), None)


class Entry(NamedTuple):
    """An entry of the ingress; a delivered one is pending for some worker."""

    entry_id: int
    request: int
    is_delivered: bool = False


class Letter(NamedTuple):
    """A dead letter."""

    letter_id: int
    request: int
    reason: str
    attempts: int


class Books(NamedTuple):
    """Every count there is. `open`: the state of each request that has not ended, else "".

    `group`: pairs of a state and how many of the group's requests are in it, none for zero.
    """

    open: tuple[str, ...]
    waiting: int = 0
    unfinished: int = 0
    group: tuple[tuple[str, int], ...] = ()
    members: tuple[int, ...] = ()
    ended: tuple[tuple[int, str], ...] = ()


class Clock(NamedTuple):
    """What goes on when the server forgets its past: ids given so far, and deadlines passed."""

    last_entry: int = 0
    last_letter: int = 0
    late: tuple[int, ...] = ()


class Shard(NamedTuple):
    """All that the scripts read and write.

    `leases` and `delays` are "" (none), "live" or "over" for each request. `key_holder`: who holds
    the one idempotency key there is, -1 for nobody.
    """

    requests: tuple[Request | tuple[()], ...]
    leases: tuple[str, ...]
    delays: tuple[str, ...]
    books: Books
    ingress: tuple[Entry, ...] = ()
    letters: tuple[Letter, ...] = ()
    key_holder: int = -1
    is_paused: bool = False
    clock: Clock = Clock()

    @classmethod
    def empty(cls, num_requests: int) -> Shard:
        none = ("",) * num_requests
        return cls((MISSING,) * num_requests, none, none, Books(none))


def changed(shard: Shard, index: int, **fields: object) -> Shard:
    """The shard with some fields of one request changed."""
    return with_request(shard, index, shard.requests[index]._replace(**fields))


def with_request(shard: Shard, index: int, request: Request | tuple[()]) -> Shard:
    return shard._replace(requests=put(shard.requests, index, request))


def with_lease(shard: Shard, index: int, lease: str) -> Shard:
    if shard.leases[index] == lease:
        return shard
    return shard._replace(leases=put(shard.leases, index, lease))


def with_delay(shard: Shard, index: int, delay: str) -> Shard:
    if shard.delays[index] == delay:
        return shard
    return shard._replace(delays=put(shard.delays, index, delay))


def with_entry(shard: Shard, index: int) -> Shard:
    entry = Entry(shard.clock.last_entry + 1, index)
    clock = shard.clock._replace(last_entry=entry.entry_id)
    return shard._replace(ingress=(*shard.ingress, entry), clock=clock)


def without_entry(shard: Shard, entry_id: int) -> Shard:
    return shard._replace(ingress=tuple(e for e in shard.ingress if e.entry_id != entry_id))


def with_letter(shard: Shard, index: int, reason: str) -> Shard:
    letter_id = shard.clock.last_letter + 1
    letter = Letter(letter_id, index, reason, shard.requests[index].attempts)
    clock = shard.clock._replace(last_letter=letter_id)
    return shard._replace(letters=(*shard.letters, letter), clock=clock)


def entered(shard: Shard, index: int, state: str) -> Shard:
    """Brings a request into another state; what is not in the books stays out of them."""
    if shard.books.open[index]:
        shard = booked(shard, index, shard.books.open[index], state)
    return changed(shard, index, state=state)


def struck_out(shard: Shard, index: int) -> Shard:
    """Ends in the books a request whose keys are gone."""
    state = shard.books.open[index]
    return booked(shard, index, state, "expired") if state else shard


def booked(shard: Shard, index: int, before: str, after: str) -> Shard:
    """Books that a request went from one state ("" for none) to another."""
    books = shard.books
    books = books._replace(
        open=put(books.open, index, after if after in OPEN else ""),
        waiting=books.waiting + (after in WAITING) - (before in WAITING),
        unfinished=books.unfinished + (after in OPEN) - (before in OPEN),
    )
    if before != after:
        counts = dict(books.group)
        counts[before] = max(0, counts.get(before, 0) - 1)
        counts[after] = counts.get(after, 0) + 1
        group = tuple(sorted((state, count) for state, count in counts.items() if count))
        members = set(books.members) - {index} | ({index} if after in OPEN else set())
        ended = books.ended if after in OPEN else (*books.ended, (index, after))
        books = books._replace(group=group, members=tuple(sorted(members)), ended=ended)
    return shard._replace(books=books)


def put(values: tuple, index: int, value: object) -> tuple:
    """The tuple with another value in one place."""
    return (*values[:index], value, *values[index + 1 :])
