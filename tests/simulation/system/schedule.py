"""Plays one schedule: the whole system, what befalls it, then calm, and the laws at rest."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.fake_runner import FakeRunner
from quire.errors import BrokerUnavailable, UnknownRequest
from quire.queue.broker import Broker
from quire.queue.rank.fairness import Fairness
from quire.wire.output import State
from tests.simulation.system import threads
from tests.simulation.system.audit import (
    Witness,
    audit_after_retention,
    audit_at_rest,
    audit_books,
    not_at_rest,
)
from tests.simulation.system.callers import Caller, broker_of
from tests.simulation.system.fleet import QUEUE, Fleet, Slot
from tests.simulation.system.network import (
    CALM,
    LATEST_ARRIVAL_SECONDS,
    DirectLine,
    Network,
    SimulatedConnection,
    Weather,
)
from tests.simulation.system.plan import LEASE_SECONDS, Fault, Plan, draw_plan
from tests.simulation.system.redis_server import RedisServer
from tests.simulation.system.timeline import Process, Stuck, Timeline

#: How long an undisturbed world may take to bring everything to its end. A spent back-off, a lease
#: and a drain fit into it several times: of 600 schedules the slowest took 40 seconds.
PATIENCE_SECONDS = 200.0

#: How often the director looks whether everything is over.
LOOK_SECONDS = 0.25

#: The longest time between two writes of Redis to its disk, and so the most a crash can cost.
DISK_SECONDS = 0.5

#: Longer than an idle worker may take to drain.
DRAIN_SECONDS = 30.0

#: Longer than anything in Redis may live.
FOREVER_SECONDS = 30 * 86_400.0

#: How often the books are counted again while everything is going on: after so many of the faults.
BOOKS_SHARE = 0.25


@dataclass(slots=True)
class Outcome:
    """What one schedule came to. `violations` are the laws that were broken, as sentences."""

    seed: int
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)


def play(
    seed: int,
    *,
    sabotage: Mapping[str, str] | None = None,
    runner: type[FakeRunner] = FakeRunner,
    plague: str = "",
    keeps_trace: bool = False,
) -> Outcome:
    """Plays the schedule of a seed. The seams must be installed (seams.py).

    `sabotage` replaces texts in the Lua scripts, `runner` the device, and a `plague` is a fault
    that comes often: for the controls.
    """
    timeline = Timeline(seed, keeps_trace=keeps_trace)
    threads.activate(timeline)
    schedule = _Schedule(
        timeline, draw_plan(seed, plague=plague), runner=runner, sabotage=sabotage or {}
    )
    try:
        schedule.play()
    finally:
        timeline.close()
        threads.activate(None)
    counts = timeline.counts + schedule.witness.counts
    return Outcome(seed, schedule.violations, counts, timeline.trace)


class _Schedule:
    def __init__(
        self,
        timeline: Timeline,
        plan: Plan,
        *,
        runner: type[FakeRunner],
        sabotage: Mapping[str, str],
    ) -> None:
        self._timeline, self._plan = timeline, plan
        self._random = random.Random(f"faults {plan.seed}")
        self._server = RedisServer(
            lambda: int(timeline.unix_seconds() * 1_000_000),
            on_growth=self._wake_readers,
        )
        self._server.sabotage = sabotage
        self._network = Network(timeline, self._server)
        if plan.weather:
            self._network.weather = Weather(**plan.weather)
        self._fleet = Fleet(timeline, self._network, plan, runner=runner)
        self._callers = [Caller(timeline, self._network, plan, w) for w in plan.wanted]
        self._director, self._disk = Process("director"), Process("disk")
        self._onlooker = Broker(
            SimulatedConnection.to(DirectLine(timeline, self._server)), queue=QUEUE
        )
        self.witness = Witness(self._server)
        self._network.watch = self.witness.watch
        self.violations: list[str] = []
        self._is_played = False

    def play(self) -> None:
        self._timeline.spawn(self._director, "main", self._direct)
        try:
            self._timeline.run(lambda: self._is_played or bool(self._timeline.failures))
        except Stuck as stuck:
            self.violations.append(f"I5: {stuck}")
        self.violations += self._timeline.failures + self.witness.violations
        for caller in self._callers:
            self.violations += caller.notes.violations

    # The story.

    def _direct(self) -> None:
        if self._plan.is_shared:
            fairness = Fairness(by_tokens=True, weights={"other": 2})
            broker_of(self._network, self._plan).set_fairness(fairness)
        for slot in self._fleet.slots:
            self._fleet.start(slot)
        for caller in self._callers:
            caller.start()
        self._timeline.spawn(self._disk, "writer", self._write_to_disk)
        for fault in self._plan.faults:
            self._timeline.sleep(fault.moment - self._timeline.now)
            self._timeline.note(fault.kind)
            self._befall(fault)
            if fault.amount < BOOKS_SHARE:
                self.violations += audit_books(self._onlooker)
        self._calm_down()
        self._wait_for_the_end()
        self._settle()
        self._is_played = True

    def _calm_down(self) -> None:
        """Nothing goes wrong any more, and what is shut is opened."""
        self._timeline.kill(self._disk)
        self._network.weather = CALM
        if not self._server.is_up:
            self._come_back(loses_tail=False)
        for slot in self._fleet.slots:
            if slot.process is not None:
                slot.process.frozen_until = slot.process.cut_off_until = 0.0
                slot.device_fails = False
        # Requests that were given up may still arrive, a pause of the queue among them.
        self._timeline.sleep(LATEST_ARRIVAL_SECONDS)
        broker_of(self._network, self._plan).resume()

    def _wait_for_the_end(self) -> None:
        give_up = self._timeline.now + PATIENCE_SECONDS
        while not all(caller.notes.is_over for caller in self._callers) or self.witness.has_open():
            if self._timeline.now > give_up:
                waiting = [c.request_id for c in self._callers if not c.notes.is_over]
                self.violations.append(f"I5: not everything ended; callers wait for {waiting}")
                return
            self._timeline.sleep(LOOK_SECONDS)
        # Entries and leases without a request are found by the workers, in their own time.
        while not_at_rest(self._server) and self._timeline.now < give_up:
            self._timeline.sleep(LOOK_SECONDS)
        while not all(slot.is_ready for slot in self._fleet.slots):
            if self._timeline.now > give_up:
                self.violations.append("I5: not every worker came back")
                return
            self._timeline.sleep(LOOK_SECONDS)

    def _settle(self) -> None:
        """Drains the fleet, and looks at what is left, at once and after everything has expired."""
        self._fleet.close()
        served = {s.name: s.served.engine for s in self._fleet.slots if s.is_running and s.served}
        before = {slot.name: len(slot.exit_codes) for slot in self._fleet.slots if slot.is_running}
        for slot in self._fleet.slots:
            self._fleet.drain(slot)
        self._timeline.sleep(DRAIN_SECONDS)
        for slot in self._fleet.slots:
            if slot.name in before and slot.exit_codes[before[slot.name] :] != [0]:
                codes = slot.exit_codes[before[slot.name] :]
                self.violations.append(f"the idle {slot.name} drained with exit codes {codes}")
        for name, engine in served.items():
            owned = engine.snapshot().num_owned_blocks
            if owned or engine.violations():
                self.violations.append(f"I6: {name} owns {owned} blocks: {engine.violations()}")
        notes = {caller.request_id: caller.notes for caller in self._callers}
        self.violations += audit_at_rest(
            self._onlooker, self._server, plan=self._plan, witness=self.witness, notes=notes
        )
        self._timeline.sleep(FOREVER_SECONDS)
        self.violations += audit_after_retention(self._server, self._onlooker)

    # What befalls it.

    def _befall(self, fault: Fault) -> None:
        # What has something to lose comes first: the idle are hit when nobody else is there.
        busy = [slot for slot in self._fleet.slots if slot.has_claims]
        waiting = [caller for caller in self._callers if not caller.notes.is_over]
        slot = self._random.choice(busy or self._fleet.slots)
        caller = self._random.choice(waiting or self._callers)
        size = fault.amount
        befall: dict[str, Callable[[], object]] = {
            "kill a worker": lambda: self._fleet.kill(slot),
            "freeze a worker": lambda: self._freeze(slot, seconds=4 * size * LEASE_SECONDS),
            "cut a worker off": lambda: self._cut_off(slot, seconds=3 * size * LEASE_SECONDS),
            "drain a worker": lambda: self._fleet.drain(slot),
            "fail a device": lambda: self._break_device(slot),
            "crash Redis": lambda: self._crash(seconds=2 * size, loses_tail=False),
            "lose the tail": lambda: self._crash(seconds=size / 2, loses_tail=True),
            "kill a caller": caller.die,
            "cancel": lambda: self._soon(lambda: self._cancel(caller)),
            "submit again": lambda: self._soon(lambda: caller.submit(caller.client())),
            "pause the queue": lambda: self._soon(lambda: self._pause_queue(seconds=size)),
            "requeue the dead": lambda: self._soon(self._requeue),
            "trim the streams": self._trim,
            "lose the ranks": self._lose_ranks,
            "lose the queue": self._lose_queue,
        }
        befall[fault.kind]()

    def _trim(self) -> None:
        for stream in self._onlooker.keys.all_ingress:
            self._server.execute([b"XTRIM", stream.encode(), b"MAXLEN", b"0"])

    def _lose_ranks(self) -> None:
        """The tickets still tell which requests waited."""
        for key in self._onlooker.keys.all_ranks:
            self._server.execute([b"DEL", key.encode()])

    def _lose_queue(self) -> None:
        """As where somebody deletes keys, or the server evicts them; requests keep theirs."""
        keys = self._onlooker.keys
        for key in (*keys.all_ranks, *keys.all_ingress, keys.lease, keys.delay):
            self._server.execute([b"DEL", key.encode()])

    def _write_to_disk(self) -> None:
        while True:
            self._timeline.sleep(self._random.uniform(0, DISK_SECONDS))
            if self._server.is_up:
                self._server.write_to_disk()

    def _freeze(self, slot: Slot, *, seconds: float) -> None:
        if slot.process is not None:
            slot.process.frozen_until = self._timeline.now + seconds

    def _cut_off(self, slot: Slot, *, seconds: float) -> None:
        if slot.process is not None:
            slot.process.cut_off_until = self._timeline.now + seconds

    def _break_device(self, slot: Slot) -> None:
        slot.device_fails = True

    def _wake_readers(self) -> None:
        self._network.wake_readers()

    def _crash(self, *, seconds: float, loses_tail: bool) -> None:
        if not self._server.is_up:
            return
        self._server.stop()
        self._network.wake_readers()

        def come_back() -> None:
            self._timeline.sleep(seconds)
            if not self._server.is_up:
                self._come_back(loses_tail=loses_tail)

        self._timeline.spawn(Process("service manager"), "redis", come_back)

    def _come_back(self, *, loses_tail: bool) -> None:
        self._server.start(loses_tail=loses_tail)
        if loses_tail:
            self.witness.forget()

    def _soon(self, act: Callable[[], object]) -> None:
        """Somebody comes and does it, unless Redis does not answer."""

        def perform() -> None:
            try:
                act()
            except (BrokerUnavailable, UnknownRequest):
                self._timeline.note("in vain")

        self._timeline.spawn(Process("passer-by"), "main", perform)

    def _cancel(self, caller: Caller) -> None:
        self.witness.cancelled.add(caller.request_id)
        state = caller.client().cancel(caller.request_id)
        if state is State.CANCELLED:
            self.witness.may_not_run(caller.request_id)

    def _pause_queue(self, *, seconds: float) -> None:
        broker = broker_of(self._network, self._plan)
        broker.pause("a schedule")
        self._timeline.sleep(seconds)
        broker.resume()

    def _requeue(self) -> None:
        broker = broker_of(self._network, self._plan)
        for letter in broker.dead_letters():
            self.witness.requeued.add(letter.request_id)
            broker.requeue(letter, keep_tokens=self._random.random() < 0.5)
