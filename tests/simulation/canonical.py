"""One representative for all worlds that differ in nothing any later step or law depends on.

Each reduction is sound for a reason of its own: owners are only compared for equality and
arrivals for order, so they may be renumbered; the two workers are alike, so they may change
places; a log is read and extended as one sequence of tokens; a lease, a delay or a wait that is
live may be over at any moment, so both are one; a claim has moved its request or not, no matter how
far; a claim that no record will name again is nothing.

Most of a search is spent here. What depends on a shard alone is worked out once for each shard, and
what is as it should be is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tests.simulation.model_state import (
    NOBODY,
    OPEN,
    STRIDE,
    Call,
    Chunk,
    End,
    Letter,
    Request,
    Shard,
)
from tests.simulation.shared_parts import SUSPICIOUS
from tests.simulation.world import EXPLICIT_EVENTS, NOTHING, Reader, Session, Worker, World

#: A shard, or what stands for none where a server has nothing on its disk.
Disk = Shard | tuple[()]


@dataclass(frozen=True, slots=True)
class Reductions:
    """Which of the reductions are sound that depend on what is on trial.

    `knows_owners`: claims that no record will ever name again are forgotten, as nothing they say
    has an effect, and epochs are, as each owner has one and is compared with it; true of the real
    fence alone.
    """

    knows_owners: bool = True


def canonical(world: World, reductions: Reductions) -> World:
    """The representative of `world`."""
    ground = ground_of(world.shard, world.disk, reductions)
    (first, second), reader, network = world.workers, world.reader, world.network
    if reader.told in EXPLICIT_EVENTS and reader.seen:
        reader = Reader((), reader.told)
    if reductions.knows_owners:
        held = owners_held(ground.running, world)
        first, second = without_lost_claims(first, held), without_lost_claims(second, held)
        if network:
            network = tuple(without_epoch(c) for c in network if c.owner in held)
    one = World(ground.shard, ground.disk, (first, second), reader, network, world.left)
    if first == second:
        return with_numbered_owners(one)
    keys = shape(first), shape(second)
    if keys[0] < keys[1]:
        return with_numbered_owners(one)
    other = with_numbered_owners(one._replace(workers=(second, first)))
    return other if keys[0] > keys[1] else min(with_numbered_owners(one), other)


class Ground(NamedTuple):
    """A shard and what is on disk, reduced, and what of them the rest of a world goes by.

    `running`: the owners of running requests.
    """

    shard: Shard
    disk: Disk
    running: frozenset[int]


@cache
def ground_of(shard: Shard, disk: Disk, reductions: Reductions) -> Ground:
    plain = shard_without_epochs if reductions.knows_owners else plain_shard
    shards = [plain(one) for one in (shard, disk) if one]
    running = frozenset(r.owner for one in shards for r in one.requests if r and is_running(r))
    shards = [with_numbered_arrivals(one) for one in shards]
    return Ground(shards[0], shards[1] if disk else NOTHING, running)


def is_running(request: Request) -> bool:
    return request.state == "running"


@cache
def plain_shard(shard: Shard) -> Shard:
    """The shard with what no decision reads taken out."""
    letters = sorted((lt.request, lt.reason, lt.is_old) for lt in shard.letters)
    plain = shard._replace(
        requests=tuple(request and plain_request(request) for request in shard.requests),
        leases=tuple(lease and "live" for lease in shard.leases),
        delays=tuple(delay and "live" for delay in shard.delays),
        waits=tuple(wait and "live" for wait in shard.waits),
        books=shard.books._replace(ended=()),
        letters=tuple(
            Letter(place, request, reason, 0, is_old)
            for place, (request, reason, is_old) in enumerate(letters, start=1)
        ),
        clock=shard.clock._replace(last_letter=len(letters)),
        # An end of an earlier request of the id is never asked for again.
        told=tuple(
            sorted(one for one in shard.told if shard.requests[one.request] and not one.is_old)
        ),
    )
    return shard if plain == shard else plain


def plain_request(request: Request) -> Request:
    tokens, end = request.tokens, request.end
    log: tuple[Chunk | End, ...] = (Chunk(0, tokens, 0),) if tokens else ()
    if end:
        log += (End(end.at, end.epoch, end.reason, 0, 0),)
    if request.state not in OPEN:
        # A request that has ended makes no more attempts.
        request = request._replace(attempts=0, cancel=False, released=NOBODY, losses=0, turn=0)
    has_moved = request.published > request.resumed_from
    resumed_from = request.published - has_moved if request.state == "running" else 0
    losses = min(request.losses, SUSPICIOUS)
    return request._replace(log=log, resumes=0, resumed_from=resumed_from, losses=losses)


@cache
def shard_without_epochs(shard: Shard) -> Shard:
    """The plain shard; the fence compares epoch and owner, and an owner has one epoch for ever."""

    def without_epochs(request: Request) -> Request:
        log = tuple(entry._replace(epoch=0) for entry in request.log)
        return request._replace(epoch=0, log=log)

    plain = plain_shard(shard)
    requests = tuple(request and without_epochs(request) for request in plain.requests)
    return plain if requests == plain.requests else plain._replace(requests=requests)


def owners_held(running: frozenset[int], world: World) -> Collection[int]:
    """The owners that are in a record or may come into one; all others are fenced for ever.

    An owner comes into a record through a CLAIM alone. So one that is in no running record, neither
    now nor on disk, nor in a CLAIM still to come, will never hold anything, whatever its epoch.
    """
    coming = [call.owner for worker in world.workers for call in worker.asking]
    coming += [call.owner for call in world.network if call.name == "claim"]
    return running.union(coming) if coming else running


def without_lost_claims(worker: Worker, held: Collection[int]) -> Worker:
    """The worker without the claims that will never be held again, and without epochs."""
    for session in worker.sessions:
        if session.epoch or session.owner not in held:
            kept = tuple(s._replace(epoch=0) for s in worker.sessions if s.owner in held)
            return worker._replace(sessions=kept)
    return worker


def without_epoch(call: Call) -> Call:
    return call._replace(epoch=0) if call.epoch else call


@cache
def with_numbered_arrivals(shard: Shard) -> Shard:
    """Arrivals, and the ranks and turns that are arrivals, are numbered in their order."""
    arrivals = {request.arrival for request in shard.requests if request}
    arrivals.update(shard.ranks)
    arrivals.update(request.turn for request in shard.requests if request)
    arrivals.update(moment for turn in shard.turns for moment in (turn.number, turn.moment))
    numbers = {arrival: number for number, arrival in enumerate(sorted({0} | arrivals))}

    def numbered(request: Request) -> Request:
        return request._replace(arrival=numbers[request.arrival], turn=numbers[request.turn])

    return shard._replace(
        requests=tuple(request and numbered(request) for request in shard.requests),
        ranks=tuple(numbers[rank] for rank in shard.ranks),
        turns=tuple(
            turn._replace(number=numbers[turn.number], moment=numbers[turn.moment])
            for turn in shard.turns
        ),
        clock=shard.clock._replace(last_arrival=len(numbers)),
    )


def shape(worker: Worker) -> tuple[object, ...]:
    """What of a worker does not depend on the names of owners."""
    sessions = tuple((s.request, s.epoch, s.sent, s.cancel) for s in worker.sessions)
    return worker.held, tuple(call.request for call in worker.asking), sessions


def with_numbered_owners(world: World) -> World:
    """Owners are numbered in the order in which one comes upon them."""
    numbers = {NOBODY: NOBODY}
    for owner in owners_in_order(world):
        if owner not in numbers:
            numbers[owner] = len(numbers)
    last = len(numbers) - 1
    if list(numbers) == list(range(len(numbers))):
        return World(*world[:-1], last)

    def numbered(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(t % STRIDE + STRIDE * numbers[t // STRIDE] for t in tokens)

    def numbered_call(call: Call) -> Call:
        return call._replace(owner=numbers[call.owner], tokens=numbered(call.tokens))

    def numbered_session(session: Session) -> Session:
        owner = numbers[session.owner]
        return session._replace(owner=owner, prefix=numbered(session.prefix))

    def numbered_worker(worker: Worker) -> Worker:
        asking = tuple(numbered_call(call) for call in worker.asking)
        sessions = tuple(numbered_session(session) for session in worker.sessions)
        return Worker(worker.held, asking, sessions)

    def numbered_in(shard: Shard) -> Shard:
        return renamed_shard(shard, tuple(numbers[owner] for owner in shard_owners(shard)))

    return World(
        shard=numbered_in(world.shard),
        disk=world.disk and numbered_in(world.disk),
        workers=tuple(numbered_worker(worker) for worker in world.workers),
        reader=world.reader._replace(seen=numbered(world.reader.seen)),
        network=tuple(sorted(numbered_call(call) for call in world.network)),
        left=world.left,
        last_owner=last,
    )


@cache
def renamed_shard(shard: Shard, names: tuple[int, ...]) -> Shard:
    """The shard with other names for those that `shard_owners` tells, in its order."""
    name_of = dict(zip(shard_owners(shard), names, strict=True))

    def renamed(request: Request) -> Request:
        log = tuple(
            entry._replace(
                tokens=tuple(t % STRIDE + STRIDE * name_of[t // STRIDE] for t in entry.tokens)
            )
            if isinstance(entry, Chunk)
            else entry
            for entry in request.log
        )
        owner, released = name_of[request.owner], name_of[request.released]
        return request._replace(owner=owner, released=released, log=log)

    return shard._replace(
        requests=tuple(request and renamed(request) for request in shard.requests)
    )


def owners_in_order(world: World) -> list[int]:
    owners = list(shard_owners(world.shard))
    if world.disk:
        owners += shard_owners(world.disk)
    tokens: list[int] = []
    for worker in world.workers:
        owners += [call.owner for call in worker.asking]
        for session in worker.sessions:
            owners.append(session.owner)
            tokens += session.prefix
    for call in world.network:
        owners.append(call.owner)
        tokens += call.tokens
    owners += [token // STRIDE for token in (*tokens, *world.reader.seen)]
    return owners


@cache
def shard_owners(shard: Shard) -> tuple[int, ...]:
    """Every owner that is named in a shard, once, and nobody."""
    owners = {NOBODY: None}
    for request in shard.requests:
        if request:
            owners |= dict.fromkeys((request.owner, request.released))
            owners |= dict.fromkeys(token // STRIDE for token in request.tokens)
    return tuple(owners)
