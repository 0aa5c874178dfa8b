"""The world around a shard: what workers, reader, network and a forgetful server remember."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tests.simulation.model_state import Call, End, Request, Shard
from tests.simulation.protocol_model import Scripts

NUM_WORKERS = 2

#: What a world without a copy on disk has in its place.
NOTHING: tuple[()] = ()

#: The explicit events by which a reader learns that its past is gone; it reads no more then.
EXPLICIT_EVENTS = ("rewound", "gone")

#: Operations that concern no request in particular.
WITHOUT_REQUEST = ("peek", "balance", "snapshot", "rollback", "pause", "resume")


@dataclass(frozen=True, slots=True)
class Scenario:
    """What may happen, and how often where it must be bounded.

    `num_late_calls`: calls that reach the server late, once more, or only late. `num_rollbacks`:
    times the server forgets its recent past. `num_requeues`: dead letters given another life.
    `num_expiries`: requests whose keys expire. `num_losses`: ranks, tickets, turns, or times in a
    set, that the server loses. `shares_a_session`: all requests are turns of one session.
    `is_noise_stateful`: a token depends on who drew it;
    `may_contradict`: a reader may then be contradicted, if it is told. `has_hashes`: readers
    compare the hash of their past with that of the log. `may_be_torn`: a
    server that forgets may keep the entries of commits it has otherwise forgotten.
    """

    name: str
    num_requests: int = 1
    num_tokens: int = 2
    max_attempts: int = 2
    num_releases: int = 0
    num_late_calls: int = 0
    num_rollbacks: int = 0
    num_requeues: int = 0
    num_expiries: int = 0
    num_losses: int = 0
    may_cancel: bool = False
    may_be_late: bool = False
    may_be_poison: bool = False
    may_fail: bool = False
    may_schedule: bool = False
    may_pause: bool = False
    shares_a_key: bool = False
    shares_a_session: bool = False
    is_noise_stateful: bool = False
    may_contradict: bool = False
    has_hashes: bool = True
    may_be_torn: bool = False


def scripts_of(scenario: Scenario, kind: type[Scripts] = Scripts) -> Scripts:
    """The scripts with the settings of a scenario."""
    everyone = frozenset(range(scenario.num_requests))
    return kind(
        max_attempts=scenario.max_attempts,
        keyed=everyone if scenario.shares_a_key else frozenset(),
        in_session=everyone if scenario.shares_a_session else frozenset(),
    )


class Session(NamedTuple):
    """A claim in a worker's memory: the fence, and how many tokens it knows to be in the log.

    `prefix` is what the log held at the claim, kept only where tokens depend on who drew them.
    """

    request: int
    epoch: int
    owner: int
    sent: int
    prefix: tuple[int, ...]
    cancel: bool


class Worker(NamedTuple):
    """A worker's memory: a request that it has found, a claim without reply, its sessions."""

    held: tuple[int, ...] = ()
    asking: tuple[Call, ...] = ()
    sessions: tuple[Session, ...] = ()


class Reader(NamedTuple):
    """A reader of request 0. `told`: "", "ended", "misled", or one of EXPLICIT_EVENTS."""

    seen: tuple[int, ...] = ()
    told: str = ""


class Left(NamedTuple):
    """How often what must be bounded may still happen."""

    releases: int
    late_calls: int
    rollbacks: int
    requeues: int
    expiries: int
    losses: int

    @classmethod
    def of(cls, scenario: Scenario) -> Left:
        return cls(*(getattr(scenario, f"num_{name}") for name in cls._fields))


class World(NamedTuple):
    """Everything. `disk`: what the server may fall back to. `network`: calls still on their way."""

    shard: Shard
    disk: Shard | tuple[()]
    workers: tuple[Worker, ...]
    reader: Reader
    network: tuple[Call, ...]
    left: Left
    last_owner: int = 0

    @classmethod
    def initial(cls, scenario: Scenario) -> World:
        return cls(
            shard=Shard.empty(scenario.num_requests),
            disk=NOTHING,
            workers=(Worker(),) * NUM_WORKERS,
            reader=Reader(),
            network=(),
            left=Left.of(scenario),
        )


class Step(NamedTuple):
    """One thing that happens: who does what, the operations on the server, the world after it."""

    actor: str
    what: str
    calls: tuple[Call, ...]
    world: World

    def __str__(self) -> str:
        calls = "; ".join(described(call) for call in self.calls)
        return f"{self.actor:9} {self.what} {calls}".rstrip()


def described(call: Call) -> str:
    unset = Call("")
    fields = [
        f"{name}={value}"
        for name, value in call._asdict().items()
        if name not in ("name", "request") and value != getattr(unset, name)
    ]
    of_request = [] if call.name in WITHOUT_REQUEST else [f"request={call.request}"]
    return f"{call.name}({', '.join(of_request + fields)})"


def read(reader: Reader, request: Request | tuple[()], *, has_hashes: bool) -> Reader:
    """The reader asks for what lies beyond its tokens; without news it looks at the record.

    As in `quire.client.following`. A hash of tokens is as good as the tokens here. A reader that
    takes what does not follow from its past without noticing is misled.
    """
    if not request:
        return reader._replace(told="gone") if reader.seen else reader
    num_seen, log = len(reader.seen), request.tokens
    last = request.log[-1] if request.log else None
    is_over = isinstance(last, End) and last.at >= num_seen
    if not log[num_seen:] and not is_over and request.published < num_seen:
        return reader._replace(told="rewound")
    if log[:num_seen] != reader.seen:
        return reader._replace(told="rewound" if has_hashes else "misled")
    return Reader(log, "ended" if is_over else "")


def with_worker(world: World, number: int, worker: Worker) -> World:
    shard, disk, before, *others = world
    return World(shard, disk, (*before[:number], worker, *before[number + 1 :]), *others)


def with_session(
    world: World, number: int, session: Session, *, kept: tuple[Session, ...]
) -> World:
    worker = world.workers[number]
    sessions = tuple(sorted((*(s for s in worker.sessions if s is not session), *kept)))
    return with_worker(world, number, worker._replace(sessions=sessions))
