"""Each role's class may call what its Redis user may: every public method is run as that user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import Fairness, QueueLimits
from quire.queue.broker import Broker
from quire.queue.claim.ingress import Candidate
from quire.queue.control.defaults import QueueDefaults
from quire.queue.rank.policy import QueuePolicy
from quire.queue.repair.dead_letters import DeadLetter
from quire.queue.request.claims import Claim
from quire.queue.roles import Observer, Operator, Producer, WorkerSide
from quire.queue.shard import Shard
from quire.wire.message import Message
from quire.wire.output import ErrorInfo
from quire.wire.protocol import Priority
from tests.quire.builders import claim_next, make_item, make_request
from tests.quire.queue.acl.roles import refused

#: What is forbidden is said in other words by other servers.
pytestmark = [pytest.mark.real_redis, pytest.mark.distribution]

#: Each role and its user of docs/reference/acl.md.
USERS = {Producer: "producer", WorkerSide: "worker", Operator: "operator", Observer: "observer"}

#: What a role has for users with one right more, and the user that runs it here.
OF_SINKS = ("begin", "deliver", "delivered", "take_over", "acknowledge")
OF_OTHER_USERS = dict.fromkeys(OF_SINKS, "sink")
OF_GATEWAYS = ("workers",)


class Scene:
    """What a method is called on: requests of its own, made by somebody who may do everything."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._number = 0

    def queued(self) -> str:
        """The id of a new request in the group `g`, the only one that waits."""
        waiting = self._broker.open_of("default")
        self._broker.cancel_many(waiting)
        self._number += 1
        request_id = f"g~{self._number}"
        self._broker.submit(make_request(id=request_id))
        return request_id

    def candidate(self) -> Candidate:
        return Candidate(self.queued(), Priority.NORMAL, 1)

    def claim(self) -> Claim:
        """The claim of a new request with one token."""
        self.queued()
        claim = claim_next(self._broker).claim
        self._broker.commit([make_item(claim, 0, 1)])
        return claim

    def picture(self) -> str:
        """The digest of a picture that expires in a minute."""
        self._broker.connection.set(self._broker.keys.picture("0" * 64), b"png", px=60_000)
        return "0" * 64

    def letter(self) -> DeadLetter:
        self._broker.dead_letter(self.claim(), "tired")
        return self._broker.dead_letters()[0]

    def group(self) -> str:
        return self.queued().partition("~")[0]

    def new(self) -> Any:
        self._number += 1
        return make_request(id=f"new-{self._number}")


Call = Callable[[Any, Scene], object]

#: How each method is called.
CALLS: dict[str, Call] = {
    "kept": lambda side, scene: side.kept(scene.queued()),
    "status": lambda side, scene: side.status(scene.claim().request_id),
    "read_output": lambda side, scene: side.read_output(
        {scene.claim().request_id: 0}, block_seconds=0.01
    ),
    "workers": lambda side, scene: side.workers(),
    "absence": lambda side, scene: side.absence(),
    "close": lambda side, scene: side.close(),
    # Of producers.
    "submit": lambda side, scene: side.submit(scene.new()),
    "submit_many": lambda side, scene: side.submit_many([scene.new()]),
    "submit_messages": lambda side, scene: side.submit_messages([Message.of(scene.new())]),
    "pictures": lambda side, scene: side.pictures(["0" * 64]),
    "cancel": lambda side, scene: side.cancel(scene.queued()),
    "cancel_many": lambda side, scene: side.cancel_many([scene.queued()]),
    "discard": lambda side, scene: side.discard(side.submit(scene.new()).request_id),
    "end_overdue": lambda side, scene: side.end_overdue([scene.queued()]),
    "overdue": lambda side, scene: side.overdue(scene.group()),
    "group_counts": lambda side, scene: side.group_counts(scene.group()),
    "group_progress": lambda side, scene: side.group_progress(scene.group()),
    "open_members": lambda side, scene: side.open_members(scene.group()),
    "num_open_members": lambda side, scene: side.num_open_members(scene.group()),
    "read_ends": lambda side, scene: side.read_ends(scene.group(), block_seconds=0.01),
    "told": lambda side, scene: side.told(after="0-0", block_seconds=0.01),
    "begin": lambda side, scene: side.begin("new"),
    "deliver": lambda side, scene: side.deliver("sinks", "one", block_seconds=0.01),
    "delivered": lambda side, scene: side.delivered("sinks", "one"),
    "take_over": lambda side, scene: side.take_over("sinks", "one", idle_seconds=0),
    "acknowledge": lambda side, scene: side.acknowledge("sinks", ["1-1"]),
    # Of workers.
    "ensure_groups": lambda side, scene: side.ensure_groups(),
    "peek": lambda side, scene: side.peek(count=1, block_seconds=0.01),
    "balance": lambda side, scene: side.balance(),
    "claim": lambda side, scene: side.claim([scene.candidate()]),
    "hold_pictures": lambda side, scene: side.hold_pictures([scene.picture()]),
    "keep_pictures": lambda side, scene: side.keep_pictures([scene.picture()]),
    "dead_letter": lambda side, scene: side.dead_letter(scene.claim(), "tired"),
    "commit": lambda side, scene: side.commit([make_item(scene.claim(), 1, 2, final=True)]),
    "commit_with": lambda side, scene: side.commit_with([make_item(scene.claim(), 1, 2)], []),
    "heartbeat": lambda side, scene: side.heartbeat([scene.claim()]),
    "release": lambda side, scene: side.release([scene.claim()]),
    "fail": lambda side, scene: side.fail(scene.claim(), ErrorInfo("x", "y")),
    "reap": lambda side, scene: side.reap(),
    "promote": lambda side, scene: side.promote(),
    "expire": lambda side, scene: side.expire(),
    "restore": lambda side, scene: side.restore(is_at_once=True),
    "rank_anew": lambda side, scene: side.rank_anew(),
    "announce": lambda side, scene: side.announce(QueuePolicy("fcfs", 1, 1)),
    "beat_worker": lambda side, scene: side.beat_worker("w", "ready", {"claims": 1}),
    "seen_ms": lambda side, scene: side.seen_ms("w"),
    # Of those who watch.
    "pause_reason": lambda side, scene: side.pause_reason(),
    "queue_depth": lambda side, scene: side.queue_depth(),
    "num_scheduled": lambda side, scene: side.num_scheduled(),
    "num_expired_leases": lambda side, scene: side.num_expired_leases(),
    "num_unheard": lambda side, scene: side.num_unheard(1),
    "control": lambda side, scene: side.control(),
    "backlog": lambda side, scene: side.backlog(),
    "open_of": lambda side, scene: side.open_of("default"),
    "dead_letters": lambda side, scene: side.dead_letters(),
    # Of operators.
    "purge": lambda side, scene: side.purge([scene.letter().entry_id]),
    "requeue": lambda side, scene: side.requeue(scene.letter(), keep_tokens=True),
    "pause": lambda side, scene: side.pause("repairs"),
    "resume": lambda side, scene: side.resume(),
    "drain": lambda side, scene: side.drain("w"),
    "set_limits": lambda side, scene: side.set_limits(QueueLimits(requests=9)),
    "set_defaults": lambda side, scene: side.set_defaults(QueueDefaults(max_tokens=9)),
    "set_fairness": lambda side, scene: side.set_fairness(Fairness(by_tokens=True)),
    "keep_ends": lambda side, scene: side.keep_ends(10),
    "keep_prompts": lambda side, scene: side.keep_prompts(1000),
}


def methods_of(role: type[Shard]) -> list[str]:
    return sorted(name for name in {*dir(role)} - {*dir(Shard)} if not name.startswith("_"))


@pytest.fixture
def side_as(as_role, real_broker):
    """Makes the side of a role that connects as a user."""

    def side(role: type[Any], user: str) -> Any:
        return role(as_role(user).connection, queue=real_broker.keys.queue, retry_seconds=0.1)

    return side


@pytest.mark.parametrize("role", USERS, ids=lambda role: role.__name__)
def test_the_user_of_a_role_may_call_all_that_the_role_has(role, side_as, real_broker):
    scene, sides = Scene(real_broker), {}
    for name in methods_of(role):
        user = OF_OTHER_USERS.get(name, USERS[role])
        if role is Producer and name in OF_GATEWAYS:
            user = "gateway"
        if user not in sides:
            sides[user] = side_as(role, user)
        # Each raises if Redis refuses a part of it.
        CALLS[name](sides[user], scene)
        real_broker.resume()


def test_a_broker_has_what_all_roles_have_and_no_more():
    everything = {name for role in USERS for name in methods_of(role)}
    assert set(methods_of(Broker)) == everything == set(CALLS)


@pytest.mark.parametrize(
    ("user", "method"),
    [
        ("producer", "claim"),
        ("producer", "pause"),
        ("producer", "workers"),
        ("producer", "deliver"),
        ("worker", "submit"),
        ("worker", "requeue"),
        ("worker", "set_limits"),
        ("operator", "claim"),
        ("operator", "deliver"),
        ("observer", "submit"),
        ("observer", "purge"),
        ("observer", "heartbeat"),
    ],
)
def test_a_method_of_another_role_is_refused(user, method, side_as, real_broker):
    scene = Scene(real_broker)
    scene.queued()
    real_broker.connection.delete(real_broker.keys.ends)
    refused(lambda: CALLS[method](side_as(Broker, user), scene))
