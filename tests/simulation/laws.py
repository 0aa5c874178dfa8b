"""The laws of the protocol, as checks of one step and of one state.

Each returns sentences, none when all holds. I11 (every key expires) is no matter of the order of
transitions and is tested elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.simulation.canonical import Reductions, canonical
from tests.simulation.model_state import (
    MISSING,
    NOBODY,
    OPEN,
    STRIDE,
    WAITING,
    Call,
    Chunk,
    End,
    Request,
    Shard,
    is_parked,
    num_ranked,
    told_of,
)
from tests.simulation.processes import Processes
from tests.simulation.shared_parts import SUSPICIOUS
from tests.simulation.world import EXPLICIT_EVENTS, Left, Scenario, Worker, World, read

#: Ends that leave a dead letter, until someone gives it another life.
LETTERED = ("attempts_spent", "undecodable")

#: What takes back what was true: done by an operator or by an accident, and told to readers.
TAKING_BACK = ("rollback", "tear", "requeue", "forget")


def broken_by_step(old_shard: Shard, calls: tuple[Call, ...], new_shard: Shard) -> Iterator[str]:
    """Laws about what operations that led from one shard to another may change."""
    yield from broken_by_waiting(new_shard, calls=calls)
    yield from broken_by_old_letter(old_shard, calls, new_shard)
    if old_shard is not new_shard and not any(call.name in TAKING_BACK for call in calls):
        yield from broken_by_change(old_shard, calls, new_shard)
    yield from broken_by_restoring(old_shard, calls, new_shard)


def broken_by_change(old_shard: Shard, calls: tuple[Call, ...], new_shard: Shard) -> Iterator[str]:
    """Laws about what may become of a request that was there."""
    for index, (old, new) in enumerate(zip(old_shard.requests, new_shard.requests, strict=True)):
        if old is new or old == MISSING:
            continue
        if old.state not in OPEN and new != old:
            law = "I9" if (old.state, old.owner) == ("cancelled", NOBODY) else "I3"
            yield f"{law}: a request that was {old.state} is {new.state} or was changed"
        if calls[0].name == "submit" and new != old:
            yield "I8: a submit has changed a request that was there"
        if new.tokens[: len(old.tokens)] != old.tokens:
            yield "I1: published tokens were changed"
        if new.epoch < old.epoch:
            yield "I4: an epoch went back"
        if new.owner != old.owner and new.epoch == old.epoch:
            yield "I4: another owner has the same epoch"
        yield from broken_by_giving_up(old, new)
        yield from broken_by_coming_back(old, new, last=old_shard.clock.last_arrival)
        if old_shard.is_paused and (old.state, new.state) == ("queued", "running"):
            yield "I9: a request was claimed from a paused queue"
        if (old.state, new.state) == ("queued", "running") and is_parked(old_shard, index):
            yield f"I15: turn {old.turn} was claimed, and {old_shard.turns} were open"


def broken_by_giving_up(old: Request, new: Request) -> Iterator[str]:
    """Who moves on is not given up."""
    has_moved = old.state == "running" and old.published > old.resumed_from
    if has_moved and new.end and new.end.reason == "attempts_spent":
        yield f"I7: a request was given up after a claim that moved it to {old.published}"


def broken_by_old_letter(
    old_shard: Shard, calls: tuple[Call, ...], new_shard: Shard
) -> Iterator[str]:
    """A letter whose request is gone gives nothing to a later one."""
    old_letters = {letter.letter_id for letter in old_shard.letters if letter.is_old}
    for call in calls:
        if call.name == "requeue" and call.entry in old_letters and old_shard != new_shard:
            yield f"I8: letter {call.entry} of an earlier request has changed a later one"


def broken_by_coming_back(old: Request, new: Request, *, last: int) -> Iterator[str]:
    """What has tokens and comes back keeps its arrival; any other request arrives after all."""
    is_back = old.state in ("running", "scheduled") and new.state == "queued"
    has_tokens = new.published > 0 and new.losses < SUSPICIOUS
    if is_back and has_tokens and new.arrival != old.arrival:
        yield f"I14: a request that came back with tokens arrived at {new.arrival} again"
    if new.arrival not in (old.arrival, last + 1):
        yield f"I14: a request arrived at {new.arrival}, the last one before at {last}"


def broken_by_restoring(
    old_shard: Shard, calls: tuple[Call, ...], new_shard: Shard
) -> Iterator[str]:
    """What is put back was lost, and is there afterwards."""
    for call in calls:
        old, new = old_shard.requests[call.request], new_shard.requests[call.request]
        if call.name not in ("restore", "submit") or not old:
            continue
        num_new = len(new_shard.tickets) - len(old_shard.tickets)
        if num_new > 0 and len(new_shard.tickets) > num_ranked(new_shard):
            yield "I13: a ticket was added that is one too many"
        if new and new.state == "queued":
            is_found = not is_parked(new_shard, call.request)
            if bool(new_shard.ranks[call.request]) != is_found:
                law = "I12" if is_found else "I15"
                yield f"{law}: what was restored has the rank {new_shard.ranks[call.request]}"
            if num_new <= 0 and len(new_shard.tickets) < num_ranked(new_shard):
                yield "I13: a ticket that is missing was not added"
            rank = new_shard.ranks[call.request]
            if call.name == "restore" and is_found and rank != new.arrival:
                yield "I14: a request that was restored is not ranked by its arrival"


def broken_by_waiting(shard: Shard, *, calls: tuple[Call, ...]) -> Iterator[str]:
    """Who is too late is told so."""
    for call in calls[-1:]:
        request = shard.requests[call.request]
        if call.name == "expire" and request and request.state in WAITING:
            yield f"I5: a {request.state} request waits though its time is over"


def broken_in_shard(shard: Shard, *, scenario: Scenario) -> Iterator[str]:
    """Laws about every state of the server."""
    yield from broken_in_session(shard, scenario=scenario)
    for index, request in enumerate(shard.requests):
        if request:
            yield from broken_in_log(request)
            if not scenario.may_be_torn:
                yield from broken_by_half(request)
            yield from broken_in_record(shard, index, request, scenario=scenario)
            yield from broken_in_ends(shard, index, request, is_at_rest=request.state not in OPEN)
    if scenario.shares_a_key and sum(request != MISSING for request in shard.requests) > 1:
        yield "I8: one idempotency key has two generations"
    if not scenario.num_expiries:
        yield from broken_in_books(shard)
    if not scenario.num_losses and len(shard.tickets) < num_ranked(shard):
        yield f"I13: the requests with ranks {shard.ranks} have the tickets {shard.tickets}"


def broken_in_session(shard: Shard, *, scenario: Scenario) -> Iterator[str]:
    """I15: a parked turn has an open predecessor, so that nothing is parked for ever."""
    for turn in shard.turns:
        if not shard.books.open[turn.request]:
            yield f"I15: turn {turn.number} has ended and holds back {shard.turns}"
    for turn in shard.turns[:1]:
        is_waiting = shard.books.open[turn.request] == "queued"
        if is_waiting and not shard.ranks[turn.request] and not scenario.num_losses:
            yield f"I15: turn {turn.number} has no open predecessor and is parked"
    if list(shard.turns) != sorted(shard.turns):
        yield f"I15: the turns {shard.turns} are not in order"


def broken_in_record(
    shard: Shard, index: int, request: Request, *, scenario: Scenario
) -> Iterator[str]:
    state, is_open = request.state, request.state in OPEN
    if is_open and (request.owner != NOBODY) != (state == "running"):
        yield f"I4: a {state} request has the owner {request.owner}"
    if not 0 <= request.attempts <= scenario.max_attempts:
        yield f"I7: {request.attempts} attempts"
    is_lettered = request.end and request.end.reason in LETTERED
    its_own = [lt for lt in shard.letters if lt.request == index and not lt.is_old]
    if is_lettered and not its_own:
        yield f"I7: a request ended with {request.end.reason} and left no dead letter"
    if not scenario.num_expiries and not scenario.num_losses:
        if bool(shard.leases[index]) != (state == "running"):
            yield f"I5: a {state} request has the lease {shard.leases[index]!r}"
        if bool(shard.delays[index]) != (state == "scheduled"):
            yield f"I5: a {state} request has the delay {shard.delays[index]!r}"
        if bool(shard.waits[index]) != (state in WAITING):
            yield f"I5: a {state} request has the wait {shard.waits[index]!r}"
        is_found = state == "queued" and not is_parked(shard, index)
        if bool(shard.ranks[index]) != is_found:
            law = "I15" if (state, is_found) == ("queued", False) else "I12"
            yield f"{law}: a {state} request has the rank {shard.ranks[index]}"
    if shard.ranks[index] not in (0, request.arrival):
        yield f"I14: a request that arrived at {request.arrival} has the rank {shard.ranks[index]}"


def broken_in_ends(
    shard: Shard, index: int, request: Request, *, is_at_rest: bool
) -> Iterator[str]:
    """I16: each end is told once. Between a torn file and its repair it may be untold."""
    told, end = told_of(shard, index), request.end
    if len(told) > 1:
        yield f"I16: an end was told {len(told)} times"
    if told and not (end and (told[0].at, told[0].reason) == (end.at, end.reason)):
        yield f"I16: the end {told[0]} was told, the log has {end}"
    if is_at_rest and end and not told:
        yield f"I16: the end {end} was never told"


def broken_by_half(request: Request) -> Iterator[str]:
    """A record says of its log what there is: always, or, where files are torn, at rest."""
    if request.published != len(request.tokens):
        yield f"I2: {request.tokens} in the log, {request.published} in the record"
    is_open = request.state in OPEN
    if bool(request.end) == is_open or request.has_body != is_open:
        yield f"I3: a {request.state} request, its body and its log do not agree"


def broken_in_log(request: Request) -> Iterator[str]:
    reached = 0
    for entry in request.log:
        if isinstance(entry, Chunk):
            if entry.start != reached or not entry.tokens:
                yield f"I2: a chunk from {entry.start} follows on token {reached}"
            if any(t % STRIDE != entry.start + n for n, t in enumerate(entry.tokens)):
                yield f"I2: {entry.tokens} are not the tokens of the places from {entry.start}"
            reached = entry.end
    ends = [entry for entry in request.log if isinstance(entry, End)]
    if len(ends) > 1 or (ends and request.log[-1] != ends[0]):
        yield f"I3: {len(ends)} terminal entries in a log of {len(request.log)}"
    if ends and ends[0].at != reached:
        yield "I3: the terminal entry is not at the number of tokens"


def broken_in_books(shard: Shard) -> Iterator[str]:
    """I10: every count equals what it counts."""
    books = shard.books
    states = [request.state if request else "" for request in shard.requests]
    if books.open != tuple(state if state in OPEN else "" for state in states):
        yield f"I10: the books say {books.open}, the records {states}"
    if books.waiting != sum(state in WAITING for state in states):
        yield f"I10: {books.waiting} are booked as waiting in {states}"
    if books.unfinished != sum(state in OPEN for state in states):
        yield f"I10: {books.unfinished} are booked as open in {states}"
    if dict(books.group) != Counter(state for state in states if state):
        yield f"I10: the group counts {books.group}, its states are {states}"
    if books.members != tuple(n for n, state in enumerate(states) if state in OPEN):
        yield f"I10: the group has {books.members} open, its states are {states}"


def broken_in_world(world: World, *, processes: Processes) -> Iterator[str]:
    """Laws about every state of the server and those who watch it."""
    for index, request in enumerate(world.shard.requests):
        if not request:
            continue
        holders = [
            (session.epoch, session.owner)
            for worker in world.workers
            for session in worker.sessions
            if session.request == index and processes.scripts.holds(request, session)
        ]
        if len(holders) > 1:
            yield f"I4: the claims {holders} all pass the fence"
    yield from broken_for_reader(world, scenario=processes.scenario)


def broken_for_reader(world: World, *, scenario: Scenario) -> Iterator[str]:
    """I1: a reader is contradicted only by what takes back, and is told so."""
    reader, request, full = world.reader, world.shard.requests[0], Left.of(scenario)
    nothing_was_taken_back = (
        world.left._replace(releases=full.releases, late_calls=full.late_calls, losses=full.losses)
        == full
    )
    if reader.told == "misled":
        yield f"I1: a reader of {reader.seen} took more of another log"
    if reader.told in EXPLICIT_EVENTS and nothing_was_taken_back:
        yield f"I1: a reader was told {reader.told!r} by a server that forgot nothing"
    if reader.told in EXPLICIT_EVENTS or not request:
        return
    log = request.tokens
    common = min(len(reader.seen), len(log))
    if reader.seen[:common] != log[:common] and not scenario.may_contradict:
        yield f"I1: a reader has {reader.seen}, the log has {log}"
    if len(reader.seen) > len(log) and nothing_was_taken_back:
        yield f"I1: a reader has seen more than {log} on a server that forgot nothing"
    if request.end and not reader.told:
        after = read(reader, request, has_hashes=scenario.has_hashes)
        if not after.told or (after.told == "ended" and after.seen != log):
            yield f"I1: a reader of {reader.seen} is misled about an ended log {log}"


class Closings:
    """I5 and I6: whatever happened, one worker that lives brings everything to its end and to rest.

    Asked of each state for each worker, with the other one silent for ever. Remembers the states it
    has followed to their end, of the server and the survivor alone: no one else acts any more.
    """

    def __init__(self, processes: Processes, reductions: Reductions) -> None:
        self._processes = processes
        self._reductions = reductions
        initial = World.initial(processes.scenario)
        self._initial = initial._replace(left=Left(*(0 for _ in Left._fields)))
        self._asked: set[tuple[Shard, Worker]] = set()
        self._followed: set[World] = set()

    @property
    def num_states(self) -> int:
        return len(self._followed)

    def broken(self, world: World) -> Iterator[str]:
        # A worker with an empty memory is one that crashed, so this covers a fresh one as well.
        for worker in {*world.workers, Worker()}:
            if (world.shard, worker) not in self._asked:
                self._asked.add((world.shard, worker))
                workers = (worker, Worker())
                yield from self._follow(self._initial._replace(shard=world.shard, workers=workers))

    def _follow(self, world: World) -> Iterator[str]:
        passed: set[World] = set()
        while (world := canonical(world, self._reductions)) not in self._followed:
            if world in passed:
                yield f"I6: a worker alone goes round in circles and leaves {world.shard.tickets}"
                break
            passed.add(world)
            number = next((n for n, w in enumerate(world.workers) if w != Worker()), 0)
            following = self._next(world, number)
            if following is None:
                yield from broken_at_rest(world)
                break
            world = following
        self._followed |= passed

    def _next(self, world: World, number: int) -> World | None:
        """What a worker left alone does next, or None when there is nothing more to do."""
        processes, worker = self._processes, world.workers[number]
        if world.shard.is_paused:
            return processes.run(world, Call("resume"))[0]
        if worker.asking:
            return processes.claim_heard(world, number, worker.asking[0]).world
        for session in worker.sessions:
            left = processes.scenario.num_tokens - session.sent
            done = "cancelled" if session.cancel else "completed"
            call = processes.commit_of(session, left, done=done)
            return processes.commit_heard(world, number, session, call=call).world
        if worker.held:
            asked, call = processes.asking(world, number)
            return processes.claim_heard(asked, number, call).world
        for step in (*processes.reading(world, number), *processes.balancing(world, number)):
            return step.world
        for index in range(processes.scenario.num_requests):
            if world.shard.leases[index]:
                return processes.run(world, Call("expire_lease", index), Call("reap", index))[0]
            if world.shard.delays[index]:
                return processes.run(world, Call("pass_delay", index), Call("promote", index))[0]
            if world.shard.waits[index] and not world.shard.requests[index]:
                # Not for one that is there: that it will be told it is too late is no consolation.
                calls = Call("pass_queue_time", index), Call("expire", index)
                return processes.run(world, *calls)[0]
        return self._restored(world)

    def _restored(self, world: World) -> World | None:
        for index in range(self._processes.scenario.num_requests):
            after, lost = self._processes.run(world, Call("restore", index))
            if lost:
                return after
        return None


def broken_at_rest(world: World) -> Iterator[str]:
    shard = world.shard
    for request in shard.requests:
        if request and request.state in OPEN:
            yield f"I5: a {request.state} request that nothing will bring to its end"
        elif request:
            yield from broken_by_half(request)
    if shard.tickets or any(shard.ranks):
        yield f"I13: at rest there are the tickets {shard.tickets} and the ranks {shard.ranks}"
    if shard.turns:
        yield f"I15: at rest there are the turns {shard.turns}"
    if any((*shard.leases, *shard.delays, *shard.waits)):
        times = shard.leases, shard.delays, shard.waits
        yield f"I6: at rest there are as leases, delays and waits {times}"
    if any(worker != Worker() for worker in world.workers):
        yield f"I6: at rest a worker has {world.workers} in its memory"
    if any(shard.books.open) or shard.books.waiting or shard.books.unfinished:
        yield f"I10: at rest the books are {shard.books}"
