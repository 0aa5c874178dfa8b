"""What may happen next in a world: the steps of callers, operators, workers, network and server.

Knows the scripts only through `Scripts.run`. A worker may stand still for ever between any two of
its steps, so pauses, zombies and slow replies need no steps of their own: a reply that is heard
late is one that is heard at once by a worker that then stands still.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from tests.simulation.accidents import torn
from tests.simulation.model_state import STRIDE, Call, Shard, num_ranked, with_late_waits
from tests.simulation.protocol_model import Scripts
from tests.simulation.world import (
    NOTHING,
    NUM_WORKERS,
    Left,
    Scenario,
    Session,
    Step,
    Worker,
    World,
    described,
    read,
    with_session,
    with_worker,
)


class Processes:
    """Draws up what each process may do next in a world of a scenario."""

    def __init__(self, scenario: Scenario, scripts: Scripts) -> None:
        self.scenario = scenario
        self.scripts = scripts
        #: Each script with each kind of answer it has given so far.
        self.outcomes: set[tuple[str, str]] = set()
        self._requests = range(scenario.num_requests)
        #: What came of each operation on each shard: scripts know nothing else.
        self._ran: dict[tuple[Shard, Call], tuple[Shard, Any]] = {}

    def steps(self, world: World, *, workers: Iterable[int] = range(NUM_WORKERS)) -> Iterator[Step]:
        """All steps of a world, of these workers and of everybody else."""
        yield from self._callers(world)
        yield from self._operators(world)
        yield from self._time(world)
        yield from self._server(world)
        for number in workers:
            yield from self._worker(world, number)

    def run(self, world: World, *calls: Call) -> tuple[World, Any]:
        """The world after some operations, and the reply to the last."""
        shard, reply = world.shard, None
        for call in calls:
            ran = self._ran.get((shard, call))
            if ran is None:
                ran = self._ran[shard, call] = self.scripts.run(shard, call)
                self.outcomes.add((call.name, outcome_of(ran[1])))
            shard, reply = ran
        if shard is world.shard:
            return world, reply
        return World(shard, *world[1:]), reply

    def _plain(self, actor: str, world: World, *calls: Call) -> Step:
        return Step(actor, "", calls, self.run(world, *calls)[0])

    # Those around the workers.

    def _callers(self, world: World) -> Iterator[Step]:
        holders = (-1, *self._requests) if self.scenario.shares_a_key else (-1,)
        for index in self._requests:
            for holder in holders:
                yield self._plain("client", world, Call("submit", index, holder=holder))
            if self.scenario.may_schedule:
                yield self._plain("client", world, Call("submit", index, flag=True))
            if self.scenario.may_cancel:
                yield self._plain("client", world, Call("cancel", index))
        if not world.reader.told:
            request = world.shard.requests[0]
            reader = read(world.reader, request, has_hashes=self.scenario.has_hashes)
            yield Step("reader", "reads", (), world._replace(reader=reader))

    def _operators(self, world: World) -> Iterator[Step]:
        if self.scenario.may_pause:
            yield self._plain("operator", world, Call("pause"))
            yield self._plain("operator", world, Call("resume"))
        if world.left.requeues:
            before = spent(world, "requeues")
            for letter in world.shard.letters:
                for keeps_tokens in (False, True):
                    call = Call("requeue", letter.request, letter.letter_id, flag=keeps_tokens)
                    yield self._plain("operator", before, call)

    def _time(self, world: World) -> Iterator[Step]:
        """Time passes, and someone acts on it at once: no one could tell that from a later time."""
        for index in self._requests:
            if self.scenario.may_be_late and index not in world.shard.clock.late:
                yield self._plain("time", world, Call("pass_deadline", index))
            if world.shard.leases[index]:
                yield self._plain("reaper", world, Call("expire_lease", index), Call("reap", index))
                if has_ending_due(world.shard, index):
                    # With no worker left to reap, a reader does it.
                    calls = Call("expire_lease", index), Call("expire", index, flag=True)
                    yield self._plain("reader", world, *calls)
            if world.shard.delays[index]:
                calls = Call("pass_delay", index), Call("promote", index)
                yield self._plain("promoter", world, *calls)
            has_gone = not world.shard.requests[index]
            if world.shard.waits[index] and (self.scenario.may_be_late or has_gone):
                calls = Call("pass_queue_time", index), Call("expire", index)
                yield self._plain("sweeper", world, *calls)
            if world.shard.books.open[index]:
                yield self._plain("sweeper", world, Call("restore", index))
            if world.left.expiries and world.shard.requests[index]:
                yield self._plain("time", spent(world, "expiries"), Call("forget", index))

    def _server(self, world: World) -> Iterator[Step]:
        for place, call in enumerate(world.network):
            rest = world.network[:place] + world.network[place + 1 :]
            after, _ = self.run(world._replace(network=rest), call)
            yield Step("network", "delivers", (call,), after)
        yield from self._losses(world)
        if world.left.rollbacks and world.disk == NOTHING:
            yield Step("server", "", (Call("snapshot"),), world._replace(disk=world.shard))
        if world.disk != NOTHING:
            clock = world.shard.clock
            for call, memory in self._memories(world):
                shard = with_late_waits(memory._replace(clock=clock))
                after = spent(world, "rollbacks")._replace(shard=shard, disk=NOTHING)
                yield Step("server", "", (call,), after)

    def _losses(self, world: World) -> Iterator[Step]:
        """What somebody trims or deletes, or the server evicts."""
        shard = world.shard
        if world.left.losses:
            before = spent(world, "losses")
            for place, index in enumerate(shard.tickets):
                yield self._plain("server", before, Call("lose_ticket", index, entry=place))
            for index, rank in enumerate(shard.ranks):
                if rank:
                    yield self._plain("server", before, Call("lose_rank", index))
                elif shard.books.open[index] == "running" and shard.requests[index]:
                    yield self._plain("server", before, Call("stay_ranked", index))
            for turn, flag in product(shard.turns, (False, True)):
                yield self._plain("server", before, Call("lose_turn", turn.request, flag=flag))
            for what in ("lease", "delay", "wait"):
                for index in self._requests:
                    if getattr(shard, f"{what}s")[index]:
                        yield self._plain("server", before, Call(f"lose_{what}", index))

    def _memories(self, world: World) -> Iterator[tuple[Call, Shard]]:
        """What the server may come back with."""
        yield Call("rollback"), world.disk
        for index in self._requests if self.scenario.may_be_torn else ():
            for has_end, is_told in ((False, False), (True, False), (True, True)):
                shard = torn(world.disk, world.shard, index, has_end=has_end, is_told=is_told)
                if shard is not None:
                    yield Call("tear", index, entry=int(is_told), flag=has_end), shard

    # A worker.

    def _worker(self, world: World, number: int) -> Iterator[Step]:
        worker = world.workers[number]
        if worker != Worker():
            yield Step(f"worker {number}", "crashes", (), with_worker(world, number, Worker()))
        yield from self.reading(world, number)
        yield from self.balancing(world, number)
        yield from self._claiming(world, number)
        for session in worker.sessions:
            yield from self._publishing(world, number, session)
            yield from self._leaving(world, number, session)

    def reading(self, world: World, number: int) -> Iterator[Step]:
        """A worker may find any request that waits: others claim those that are due before it."""
        worker = world.workers[number]
        if worker.held or worker.asking:
            return
        after, found = self.run(world, Call("peek"))
        for index in found:
            held = with_worker(after, number, worker._replace(held=(index,)))
            yield Step(f"worker {number}", "finds", (Call("peek"),), held)

    def balancing(self, world: World, number: int) -> Iterator[Step]:
        """A worker that waits uses up tickets that are too many; any other leaves them."""
        if len(world.shard.tickets) > num_ranked(world.shard):
            yield self._plain(f"worker {number}", world, Call("balance"))

    def _claiming(self, world: World, number: int) -> Iterator[Step]:
        worker, name = world.workers[number], f"worker {number}"
        if worker.held and worker.held[0] not in {s.request for s in worker.sessions}:
            asked, call = self.asking(world, number)
            yield self.claim_heard(asked, number, call)
            request = world.shard.requests[call.request]
            if self.scenario.may_be_late and request and request.state == "queued":
                calls = Call("pass_queue_time", call.request), call
                late, reply = self.run(asked, *calls)
                yield Step(name, "hears", calls, self._hear_claim(late, number, call, reply=reply))
            yield from self._unheard(asked, number, call)
        for call in worker.asking:
            yield self.claim_heard(world, number, call)
            yield Step(name, "gives up", (), with_worker(world, number, worker._replace(asking=())))

    def asking(self, world: World, number: int) -> tuple[World, Call]:
        """The worker draws an owner and sends its claim."""
        worker, owner = world.workers[number], world.last_owner + 1
        call = Call("claim", worker.held[0], owner=owner)
        worker = worker._replace(held=(), asking=(call,))
        return with_worker(world._replace(last_owner=owner), number, worker), call

    def claim_heard(self, world: World, number: int, call: Call) -> Step:
        after, reply = self.run(world, call)
        after = self._hear_claim(after, number, call, reply=reply)
        return Step(f"worker {number}", "hears", (call,), after)

    def _hear_claim(self, world: World, number: int, call: Call, *, reply: Any) -> World:
        worker = world.workers[number]._replace(asking=())
        if reply[0] == "claimed":
            _, epoch, _, cancel, tokens, *_ = reply
            prefix = tokens if self.scenario.is_noise_stateful else ()
            session = Session(call.request, epoch, call.owner, len(tokens), prefix, cancel)
            worker = worker._replace(sessions=tuple(sorted((*worker.sessions, session))))
        return with_worker(world, number, worker)

    def _unheard(self, world: World, number: int, call: Call) -> Iterator[Step]:
        """The reply is lost; or the call itself is late, and may meanwhile be made again."""
        yield Step(f"worker {number}", "is deaf to", (call,), self.run(world, call)[0])
        if world.left.late_calls:
            network = tuple(sorted((*world.network, call)))
            late = spent(world, "late_calls")._replace(network=network)
            yield Step(f"worker {number}", f"sends late {described(call)}", (), late)

    def _publishing(self, world: World, number: int, session: Session) -> Iterator[Step]:
        for call in self._commits(world, session):
            yield self.commit_heard(world, number, session, call=call)
            yield from self._unheard(world, number, call)

    def _commits(self, world: World, session: Session) -> Iterator[Call]:
        """What a worker may say next: some more tokens, the end, or both.

        Generating is a step nobody sees, so it belongs to the commit that tells of it.
        """
        left = self.scenario.num_tokens - session.sent
        is_late = session.request in world.shard.clock.late
        for count in range(left + 1):
            endings = ["completed"] if count == left else []
            if session.cancel:
                endings = ["cancelled"]
            elif count:
                endings.append("")
            if is_late:
                endings.append("deadline_exceeded")
            for done in endings:
                yield self.commit_of(session, count, done=done)

    def commit_of(self, session: Session, count: int, *, done: str) -> Call:
        tokens = [self._token(session, session.sent + place) for place in range(count)]
        return Call(
            "commit",
            session.request,
            epoch=session.epoch,
            owner=session.owner,
            start=session.sent,
            tokens=tuple(tokens),
            done=done,
        )

    def _token(self, session: Session, index: int) -> int:
        if not self.scenario.is_noise_stateful:
            return index
        known = session.prefix
        return known[index] if index < len(known) else index + STRIDE * session.owner

    def commit_heard(self, world: World, number: int, session: Session, *, call: Call) -> Step:
        after, (status, published, cancel) = self.run(world, call)
        is_over = call.done and published == call.start + len(call.tokens) and status != "rewind"
        kept: tuple[Session, ...] = ()
        if status != "fenced" and not is_over:
            kept = (session._replace(sent=published, cancel=cancel or session.cancel),)
        after = with_session(after, number, session, kept=kept)
        return Step(f"worker {number}", "hears", (call,), after)

    def _leaving(self, world: World, number: int, session: Session) -> Iterator[Step]:
        """A heartbeat, and every way to give a claim up."""
        fence = {"epoch": session.epoch, "owner": session.owner}
        name, call = f"worker {number}", Call("heartbeat", session.request, **fence)
        after, (held, cancel) = self.run(world, call)
        kept = (session._replace(cancel=cancel or session.cancel),) if held else ()
        yield Step(name, "hears", (call,), with_session(after, number, session, kept=kept))
        for parting in self._partings(world):
            call = parting._replace(request=session.request, **fence)
            before = spent(world, "releases") if call.name == "release" else world
            after, _ = self.run(before, call)
            yield Step(name, "hears", (call,), with_session(after, number, session, kept=()))
            yield from self._unheard(before, number, call)

    def _partings(self, world: World) -> Iterator[Call]:
        if world.left.releases:
            yield Call("release")
        if self.scenario.may_be_poison:
            yield Call("dead_letter")
        if self.scenario.may_fail:
            yield Call("fail", flag=True)
            yield Call("fail", flag=False)


def outcome_of(reply: Any) -> str:
    """The kind of an answer."""
    first = reply[0] if isinstance(reply, tuple) and reply else reply
    return first or "none" if isinstance(first, str) else str(bool(first))


def has_ending_due(shard: Shard, index: int) -> bool:
    """Whether a request that runs has to end as soon as its worker does not hold it any more."""
    request = shard.requests[index]
    return bool(request) and (request.cancel or index in shard.clock.late)


def spent(world: World, what: str) -> World:
    """The world with one less left of something."""
    left: Left = world.left
    return world._replace(left=left._replace(**{what: getattr(left, what) - 1}))
