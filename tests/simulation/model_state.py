"""What one queue shard holds, as small immutable values; the model's counterpart of keys.py.

Owners, arrivals and the ids of letters are small integers, a token is its own content, a lease, a
delay or a wait is over or not. Left out, because no decision of a script depends on it: bodies,
metadata, fingerprints, what is asked, time stamps (but for the letters of another request, see
Letter), priorities, sizes. All requests are of one tenant and one group.
"""

from __future__ import annotations

from typing import NamedTuple

#: The owner of a request that nobody runs. Owners and ids count from 1.
NOBODY = 0

#: A rank that is not the arrival of its request. RESTORE corrects it.
OTHER_RANK = -1

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

#: The reasons that a COMMIT writes.
COMMITTED = ("completed", "cancelled", "deadline_exceeded")

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
    """The keys of one request: its record, its log, and whether its body is there.

    `arrival`: when it was queued; 0 before it was. `turn`: its number in the session; 0 for none.
    """

    state: str = ""
    epoch: int = 0
    owner: int = NOBODY
    published: int = 0
    attempts: int = 0
    resumes: int = 0
    cancel: bool = False
    released: int = NOBODY
    resumed_from: int = 0
    losses: int = 0
    arrival: int = 0
    turn: int = 0
    has_body: bool = True
    log: tuple[Chunk | End, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for entry in self.log if isinstance(entry, Chunk) for t in entry.tokens)

    @property
    def end(self) -> End | None:
        return next((entry for entry in self.log if isinstance(entry, End)), None)


class Letter(NamedTuple):
    """A dead letter. `is_old`: a later request has the id of its own, which is gone."""

    letter_id: int
    request: int
    reason: str
    attempts: int
    is_old: bool = False


class Told(NamedTuple):
    """An end that was told, of a log of `at` tokens. `is_old`: as of a Letter."""

    request: int
    at: int
    reason: str
    is_old: bool = False


class Call(NamedTuple):
    """One operation: a script with its arguments, or what else happens to a shard.

    `entry`: the id of a dead letter, which of the tickets, or for a torn file with the end 1 if the
    end was told there. `done`: a reason of STATE_OF that a worker writes, "" for none. `holder`:
    the argument of SUBMIT of that name, -1 for none. `flag`: for SUBMIT that it is for later, for
    FAIL that it may be tried again, for REQUEUE that the tokens are kept, for a torn file that the
    end is in the log, for EXPIRE that a reader asks for this one request, for a lost turn that its
    place among the others is kept.
    """

    name: str
    request: int = 0
    entry: int = 0
    epoch: int = 0
    owner: int = NOBODY
    start: int = 0
    tokens: tuple[int, ...] = ()
    done: str = ""
    holder: int = -1
    flag: bool = False


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
    """What goes on when the server forgets its past: the last arrival and id, deadlines passed."""

    last_arrival: int = 0
    last_letter: int = 0
    late: tuple[int, ...] = ()


class Turn(NamedTuple):
    """An open turn: its number in the session, and its request.

    `moment`: by what it is ranked; 0 as long as its record tells. `has_entry`: its entry is there.
    """

    number: int
    request: int
    moment: int = 0
    has_entry: bool = True


class ShardFields(NamedTuple):
    """What a Shard holds."""

    requests: tuple[Request | tuple[()], ...]
    leases: tuple[str, ...]
    delays: tuple[str, ...]
    waits: tuple[str, ...]
    books: Books
    ranks: tuple[int, ...] = ()
    tickets: tuple[int, ...] = ()
    letters: tuple[Letter, ...] = ()
    key_holder: int = -1
    is_paused: bool = False
    clock: Clock = Clock()
    turns: tuple[Turn, ...] = ()
    told: tuple[Told, ...] = ()


class Shard(ShardFields):
    """All that the scripts read and write.

    `leases`, `delays` and `waits` are "" (none), "live" or "over" for each request. `key_holder`:
    who holds the one idempotency key there is, -1 for nobody. `ranks`: the rank of each request, 0
    for one that is in no rank set; by the model's policy that is its arrival. `tickets`: the
    requests with which the entries of the stream were added, oldest first. `turns`: the
    open turns of the one session there is, in their order. `told`: the ends, oldest first; none is
    trimmed here.
    """

    _hash = 0

    def __hash__(self) -> int:
        # Worlds share their shards, and a search asks for little else than hashes.
        self._hash = self._hash or super().__hash__()
        return self._hash

    @classmethod
    def empty(cls, num_requests: int) -> Shard:
        none = ("",) * num_requests
        ranks = (0,) * num_requests
        return cls((MISSING,) * num_requests, none, none, none, Books(none), ranks)


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


def with_wait(shard: Shard, index: int, wait: str) -> Shard:
    if shard.waits[index] == wait:
        return shard
    return shard._replace(waits=put(shard.waits, index, wait))


def waiting_anew(shard: Shard, index: int) -> Shard:
    """A request may wait from now on; one that is past its deadline is over that at once."""
    return with_wait(shard, index, "over" if index in shard.clock.late else "live")


def with_late_waits(shard: Shard) -> Shard:
    """Those that are past their deadline have waited long enough."""
    for index in shard.clock.late:
        if shard.waits[index]:
            shard = with_wait(shard, index, "over")
    return shard


def num_ranked(shard: Shard) -> int:
    return sum(rank != 0 for rank in shard.ranks)


def with_rank(shard: Shard, index: int, rank: int) -> Shard:
    if shard.ranks[index] == rank:
        return shard
    return shard._replace(ranks=put(shard.ranks, index, rank))


def with_ticket(shard: Shard, index: int) -> Shard:
    return shard._replace(tickets=(*shard.tickets, index))


def with_new_arrival(shard: Shard, index: int, *, number: int = 0) -> Shard:
    """`number`: an arrival that it has got by the same call already, 0 for none."""
    if number:
        return changed(shard, index, arrival=number)
    clock = shard.clock._replace(last_arrival=shard.clock.last_arrival + 1)
    return changed(shard._replace(clock=clock), index, arrival=clock.last_arrival)


def lined_up(shard: Shard, index: int) -> Shard:
    """A queued request is ranked by its arrival, and has a ticket, unless it is parked."""
    if is_parked(shard, index):
        return with_first_turn_ranked(shard)
    return with_ticket(with_rank(shard, index, shard.requests[index].arrival), index)


def is_turn(shard: Shard, index: int) -> bool:
    return any(turn.request == index and turn.has_entry for turn in shard.turns)


def is_parked(shard: Shard, index: int) -> bool:
    """Whether an earlier turn of its session is open."""
    return any(turn.request == index and turn.has_entry for turn in shard.turns[1:])


def with_turn(shard: Shard, index: int) -> Shard:
    """A request is the last turn of its session."""
    number = shard.clock.last_arrival + 1
    shard = shard._replace(clock=shard.clock._replace(last_arrival=number))
    shard = changed(shard, index, turn=number)
    return shard._replace(turns=(*shard.turns, Turn(number, index)))


def without_turn(shard: Shard, index: int, *, keeps_place: bool = False) -> Shard:
    others = [turn for turn in shard.turns if turn.request != index]
    left = [turn._replace(has_entry=False) for turn in shard.turns if turn.request == index]
    return shard._replace(turns=tuple(sorted(others + left if keeps_place else others)))


def with_first_turn_ranked(shard: Shard) -> Shard:
    """The first open turn is found by workers, if it is queued."""
    for turn in shard.turns[:1]:
        index = turn.request
        is_waiting = shard.books.open[index] == "queued" and not shard.ranks[index]
        if is_waiting and turn.has_entry:
            moment = turn.moment or shard.requests[index].arrival
            return with_ticket(with_rank(shard, index, moment), index)
    return shard


def with_moments_kept(shard: Shard, index: int) -> Shard:
    """The record of a turn is going to be gone."""
    request, turns = shard.requests[index], list(shard.turns)
    for place, turn in enumerate(turns):
        if turn.request == index and request and turn.has_entry:
            turns[place] = turn._replace(moment=request.arrival or turn.number)
    return shard._replace(turns=tuple(turns))


def with_letter(shard: Shard, index: int, reason: str) -> Shard:
    letter_id = shard.clock.last_letter + 1
    letter = Letter(letter_id, index, reason, shard.requests[index].attempts)
    clock = shard.clock._replace(last_letter=letter_id)
    return shard._replace(letters=(*shard.letters, letter), clock=clock)


def with_old_letters(shard: Shard, index: int, *, is_old: bool = True) -> Shard:
    """Another request has the id of these letters' own; or, if not `is_old`, there is none."""
    letters = tuple(
        letter._replace(is_old=is_old) if letter.request == index else letter
        for letter in shard.letters
    )
    return shard._replace(letters=letters)


def with_told(shard: Shard, index: int, end: End) -> Shard:
    return shard._replace(told=(*shard.told, Told(index, end.at, end.reason)))


def told_of(shard: Shard, index: int) -> list[Told]:
    """The ends of this request that were told, without those of earlier ones of its id."""
    return [told for told in shard.told if told.request == index and not told.is_old]


def with_old_ends(shard: Shard, index: int, *, is_old: bool = True) -> Shard:
    """As `with_old_letters`, of the ends that were told."""
    told = (one._replace(is_old=is_old) if one.request == index else one for one in shard.told)
    return shard._replace(told=tuple(told))


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
    if before in WAITING and after not in WAITING:
        shard = with_wait(shard, index, "")
    if before == "queued" and after != "queued":
        shard = with_rank(shard, index, 0)
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
    shard = shard._replace(books=books)
    had_turn = is_turn(shard, index) or (shard.requests[index] or Request()).turn
    if before in OPEN and after not in OPEN and had_turn:
        return with_first_turn_ranked(without_turn(shard, index))
    return shard


def put(values: tuple, index: int, value: object) -> tuple:
    """The tuple with another value in one place."""
    return (*values[:index], value, *values[index + 1 :])
