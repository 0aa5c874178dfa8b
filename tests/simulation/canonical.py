"""One representative for all worlds that differ in nothing any later step or law depends on.

Each reduction is sound for a reason of its own: owners and entry ids are only compared for equality
(and ids for order), so they may be renumbered; the two workers are alike, so they may change
places; a log is read and extended as one sequence of tokens; a lease, a delay or a wait that is
live may be over at any moment, so both are one; a claim has moved its request or not, no matter how
far; a claim that no record will name again is nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

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
from tests.simulation.world import EXPLICIT_EVENTS, Reader, Worker, World


@dataclass(frozen=True, slots=True)
class Reductions:
    """Which of the reductions are sound that depend on what is on trial.

    `knows_owners`: claims that no record will ever name again are forgotten, as nothing they say
    has an effect, and epochs are, as each owner has one and is compared with it; true of the real
    fence alone. `ranks_entries`: ids of entries become ranks; true
    if an id is never given again.
    """

    knows_owners: bool = True
    ranks_entries: bool = True


def canonical(world: World, reductions: Reductions) -> World:
    """The representative of `world`."""
    shard = plain_shard(world.shard)
    disk = world.disk and plain_shard(world.disk)
    reader = world.reader
    if reader.told in EXPLICIT_EVENTS and reader.seen:
        reader = Reader((), reader.told)
    if shard is not world.shard or disk is not world.disk or reader is not world.reader:
        world = world._replace(shard=shard, disk=disk, reader=reader)
    if reductions.knows_owners:
        world = without_epochs(without_lost_claims(world))
    if reductions.ranks_entries:
        world = with_ranked_entries(world)
    first, second = world.workers
    keys = shape(first), shape(second)
    if keys[0] < keys[1] or first == second:
        return with_numbered_owners(world)
    swapped = with_numbered_owners(world._replace(workers=(second, first)))
    return swapped if keys[0] > keys[1] else min(with_numbered_owners(world), swapped)


@cache
def plain_shard(shard: Shard) -> Shard:
    """The shard with what no decision reads taken out."""
    letters = sorted((lt.request, lt.reason) for lt in shard.letters)
    plain = shard._replace(
        requests=tuple(request and plain_request(request) for request in shard.requests),
        leases=tuple(lease and "live" for lease in shard.leases),
        delays=tuple(delay and "live" for delay in shard.delays),
        waits=tuple(wait and "live" for wait in shard.waits),
        books=shard.books._replace(ended=()),
        letters=tuple(
            Letter(place, request, reason, 0)
            for place, (request, reason) in enumerate(letters, start=1)
        ),
        clock=shard.clock._replace(last_letter=len(letters)),
    )
    return shard if plain == shard else plain


def plain_request(request: Request) -> Request:
    tokens, end = request.tokens, request.end
    log: tuple[Chunk | End, ...] = (Chunk(0, tokens, 0),) if tokens else ()
    if end:
        log += (End(end.at, end.epoch, end.reason, 0, 0),)
    if request.state not in OPEN:
        # A request that has ended makes no more attempts.
        request = request._replace(attempts=0, cancel=False, released=NOBODY)
    has_moved = request.published > request.resumed_from
    resumed_from = request.published - has_moved if request.state == "running" else 0
    return request._replace(log=log, resumes=0, resumed_from=resumed_from)


def without_lost_claims(world: World) -> World:
    """Forgets the claims that will never be held again, and the calls on their way in their name.

    An owner comes into a record through a CLAIM alone. So one that is in no running record, neither
    now nor on disk, nor in a CLAIM still to come, is fenced for ever, whatever its epoch.
    """
    owners = set(running_owners(world.shard))
    if world.disk:
        owners.update(running_owners(world.disk))
    owners.update(call.owner for worker in world.workers for call in worker.asking)
    owners.update(call.owner for call in world.network if call.name == "claim")
    named = [s.owner for worker in world.workers for s in worker.sessions]
    named += [call.owner for call in world.network]
    if owners.issuperset(named):
        return world
    workers = tuple(
        worker._replace(sessions=tuple(s for s in worker.sessions if s.owner in owners))
        for worker in world.workers
    )
    network = tuple(call for call in world.network if call.owner in owners)
    return world._replace(workers=workers, network=network)


def without_epochs(world: World) -> World:
    """The fence compares epoch and owner; an owner is drawn once, and so has one epoch for ever."""
    workers = tuple(
        worker._replace(sessions=tuple(s._replace(epoch=0) for s in worker.sessions))
        for worker in world.workers
    )
    return world._replace(
        shard=shard_without_epochs(world.shard),
        disk=world.disk and shard_without_epochs(world.disk),
        workers=workers,
        network=tuple(call._replace(epoch=0) for call in world.network),
    )


@cache
def shard_without_epochs(shard: Shard) -> Shard:
    def plain(request: Request) -> Request:
        log = tuple(entry._replace(epoch=0) for entry in request.log)
        return request._replace(epoch=0, log=log)

    plain_requests = tuple(request and plain(request) for request in shard.requests)
    return shard._replace(requests=plain_requests)


@cache
def running_owners(shard: Shard) -> tuple[int, ...]:
    return tuple(r.owner for r in shard.requests if r and r.state == "running")


def with_ranked_entries(world: World) -> World:
    """Entry ids become ranks; ids that are in no stream any more, and never will be, become 0."""
    ids = entry_ids(world.shard)
    if world.disk:
        ids = tuple(sorted({*ids, *entry_ids(world.disk)}))
    rank = {entry_id: place for place, entry_id in enumerate(ids, start=1)}
    named = [worker.held[0] for worker in world.workers if worker.held]
    named += [call.entry for worker in world.workers for call in worker.asking]
    named += [call.entry for call in world.network]
    is_ranked = ids == tuple(range(1, len(ids) + 1)) and all(0 <= n <= len(ids) for n in named)
    clocks = [shard.clock for shard in (world.shard, world.disk) if shard]
    if is_ranked and all(clock.last_entry == len(ids) for clock in clocks):
        return world

    def ranked_worker(worker: Worker) -> Worker:
        return worker._replace(
            held=worker.held and (rank.get(worker.held[0], 0), worker.held[1]),
            asking=tuple(c._replace(entry=rank.get(c.entry, 0)) for c in worker.asking),
        )

    return world._replace(
        shard=ranked_shard(world.shard, ids),
        disk=world.disk and ranked_shard(world.disk, ids),
        workers=tuple(ranked_worker(worker) for worker in world.workers),
        network=tuple(c._replace(entry=rank.get(c.entry, 0)) for c in world.network),
    )


@cache
def entry_ids(shard: Shard) -> tuple[int, ...]:
    return tuple(sorted(entry.entry_id for entry in shard.ingress))


@cache
def ranked_shard(shard: Shard, ids: tuple[int, ...]) -> Shard:
    ingress = tuple(e._replace(entry_id=ids.index(e.entry_id) + 1) for e in shard.ingress)
    return shard._replace(ingress=ingress, clock=shard.clock._replace(last_entry=len(ids)))


def shape(worker: Worker) -> tuple[object, ...]:
    """What of a worker does not depend on the names of owners."""
    sessions = tuple((s.request, s.epoch, s.sent, s.cancel) for s in worker.sessions)
    return worker.held, tuple(call.entry for call in worker.asking), sessions


def with_numbered_owners(world: World) -> World:
    """Owners are numbered in the order in which one comes upon them."""
    numbers = {NOBODY: NOBODY}
    for owner in owners_in_order(world):
        numbers.setdefault(owner, len(numbers))
    last = len(numbers) - 1
    if all(owner == number for owner, number in numbers.items()):
        return world if world.last_owner == last else world._replace(last_owner=last)

    def numbered(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(t % STRIDE + STRIDE * numbers[t // STRIDE] for t in tokens)

    def numbered_request(request: Request) -> Request:
        log = tuple(
            entry._replace(tokens=numbered(entry.tokens)) if isinstance(entry, Chunk) else entry
            for entry in request.log
        )
        owner, released = numbers[request.owner], numbers[request.released]
        return request._replace(owner=owner, released=released, log=log)

    def numbered_shard(shard: Shard) -> Shard:
        requests = tuple(request and numbered_request(request) for request in shard.requests)
        return shard._replace(requests=requests)

    def numbered_calls(calls: tuple[Call, ...]) -> tuple[Call, ...]:
        return tuple(
            call._replace(owner=numbers[call.owner], tokens=numbered(call.tokens)) for call in calls
        )

    def numbered_worker(worker: Worker) -> Worker:
        sessions = tuple(
            s._replace(owner=numbers[s.owner], prefix=numbered(s.prefix)) for s in worker.sessions
        )
        return worker._replace(asking=numbered_calls(worker.asking), sessions=sessions)

    return world._replace(
        shard=numbered_shard(world.shard),
        disk=world.disk and numbered_shard(world.disk),
        workers=tuple(numbered_worker(worker) for worker in world.workers),
        reader=world.reader._replace(seen=numbered(world.reader.seen)),
        network=tuple(sorted(numbered_calls(world.network))),
        last_owner=last,
    )


def owners_in_order(world: World) -> Iterator[int]:
    yield from shard_owners(world.shard)
    if world.disk:
        yield from shard_owners(world.disk)
    for worker in world.workers:
        for call in worker.asking:
            yield call.owner
        for session in worker.sessions:
            yield session.owner
            yield from (token // STRIDE for token in session.prefix)
    for call in world.network:
        yield call.owner
        yield from (token // STRIDE for token in call.tokens)
    yield from (token // STRIDE for token in world.reader.seen)


@cache
def shard_owners(shard: Shard) -> tuple[int, ...]:
    owners: list[int] = []
    for request in shard.requests:
        if request:
            owners += (request.owner, request.released)
            owners += [token // STRIDE for token in request.tokens]
    return tuple(owners)
