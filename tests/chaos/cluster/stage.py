"""Where a schedule on a cluster plays: three masters with a replica each, workers and readers.

The workers are processes, the readers threads of this one. What is not about a cluster is that of
`tests.chaos.stage` and its judge, which gets to see one shard after the other.
"""

import contextlib
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.exceptions import RedisError

from quire import Client
from quire.errors import BrokerUnavailable, UnknownRequest
from quire.keys import Keys
from quire.queue.broker import Broker
from quire.queue.submit.routing import shard_of
from quire.transport.connection import connect
from quire.transport.local_redis import INSTALL_HINT, server_program
from quire.transport.slots import for_key
from tests.chaos import adapters
from tests.chaos.callers import Caller, Wanted
from tests.chaos.clients import Confused, Event, _Follower
from tests.chaos.cluster.worker import ClusterWorker
from tests.chaos.judge import _ended_of, _judge, _told_of, left_over
from tests.chaos.orders import told_violations
from tests.chaos.stage import Cast, Outcome, Stuck
from tests.quire.clusters import Cluster, Node, another

PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.01
QUEUE = "chaos"
NUM_SHARDS = 6
#: A master that is silent for so long is replaced.
NODE_TIMEOUT_MS = 2500
OPTIONS = (
    *("--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--cluster-require-full-coverage", "no"),
    *("--maxmemory-policy", "noeviction"),
)
#: How many tokens are written behind the back of a replica before its master dies.
TAIL_TOKENS = 10


class _Reader(_Follower):
    """Submits one request and reads it to its end, on all shards."""

    def run(self) -> None:
        try:
            while not self._is_through:
                with Client(self._url, queue=self._queue, shards=NUM_SHARDS) as client:
                    self._live(client)
        except Exception:  # noqa: BLE001 - whatever a reader dies of belongs into the audit.
            self._tell(Confused(self._id, f"reader: {traceback.format_exc()}"))


@dataclass(frozen=True, slots=True)
class ShardStage:
    """What the judge sees of one shard."""

    cast: Cast
    outcome: Outcome
    broker: Broker
    connection: redis.Redis
    callers: Sequence[Caller]
    num_losses: int

    @property
    def keys(self) -> Keys:
        return self.broker.keys

    @property
    def has_lost_data(self) -> bool:
        return self.num_losses > 0

    @property
    def lowest_lease(self) -> float | None:
        rows = self.connection.zrange(self.keys.lease, 0, 0, withscores=True)
        return rows[0][1] if rows else None

    def claims_of(self, caller: Caller) -> tuple[bytes | None, ...]:
        record = self.keys.request(caller.request_id)
        return tuple(self.connection.hmget(record, "attempts", "resumes"))


class ClusterStage:
    """A context manager that leaves nothing behind."""

    def __init__(self, cast: Cast, wanted: Sequence[Wanted], *, patience: float) -> None:
        found = server_program()
        if found is None:
            raise Stuck(f"there is no real Redis: {INSTALL_HINT}")
        _, program = found
        self.cast = cast
        self.outcome = Outcome()
        self._patience = patience
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-cluster-")
        self._adapters = Path(self._folder.name) / "adapters"
        adapters.lay_out(self._adapters, model=None)
        self.cluster = Cluster(program, masters=3, replicas=1, options=OPTIONS)
        self.callers = [Caller(item) for item in wanted]
        self._caller_of = {caller.request_id: caller for caller in self.callers}
        self._hearing = threading.Lock()
        self.workers: list[ClusterWorker] = []
        #: How often a master has died; each time it may have taken a tail with it.
        self.num_losses = 0

    def __enter__(self) -> "ClusterStage":
        self.cluster.__enter__()
        self.connection = connect(self.cluster.url, block_seconds=0.0)
        self.brokers = [self._broker(shard) for shard in range(NUM_SHARDS)]
        for broker in self.brokers:
            broker.ensure_groups()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            if worker.is_alive:
                worker.kill()
        self.connection.close()
        self.cluster.stop()
        self._folder.cleanup()

    def _broker(self, shard: int) -> Broker:
        return Broker(
            self.connection,
            queue=QUEUE,
            shard=shard,
            lease_seconds=self.cast.lease_seconds,
            max_attempts=self.cast.max_attempts,
            retry_seconds=PATIENCE_SECONDS / 4,
        )

    # -- workers and readers ------------------------------------------------------------------

    def start_worker(self, *broken: str) -> ClusterWorker:
        name = f"worker-{len(self.workers)}"
        lease = ("--lease-seconds", str(self.cast.lease_seconds))
        attempts = ("--max-attempts", str(self.cast.max_attempts))
        where = ("--redis-url", self.cluster.url, "--queue", QUEUE, "--shards", str(NUM_SHARDS))
        worker = ClusterWorker(
            (*where, *lease, *attempts, "--adapters", str(self._adapters), *self.cast.flags),
            name=name,
            log=Path(self._folder.name) / f"{name}.log",
            step_seconds=self.cast.step_seconds,
            doctored=broken,
        )
        self.workers.append(worker)
        return worker

    @property
    def active(self) -> list[ClusterWorker]:
        return [worker for worker in self.workers if worker.is_alive and not worker.is_paused]

    def wait_for_workers(self) -> None:
        def all_ready() -> bool:
            names = {worker.name for worker in self.active}
            return all(
                names <= {info.name for info in broker.workers() if info.state == "ready"}
                for broker in self.brokers
            )

        self.until(all_ready, "workers ready")

    def start_readers(self) -> None:
        for caller in self.callers:
            reader = _Reader(self.cluster.url, QUEUE, task=caller.task, tell=self._hear)
            threading.Thread(target=reader.run, daemon=True).start()

    def _hear(self, event: Event) -> None:
        with self._hearing:
            self._caller_of[event.request_id].hear(event)

    # -- faults -------------------------------------------------------------------------------

    def replica_of(self, node: Node) -> Node:
        for one in self.cluster.nodes:
            with contextlib.suppress(RedisError):
                found = one.client.info("replication")
                if found["role"] == "slave" and found["master_port"] == node.port:
                    return one
        raise Stuck(f"{node} has no replica")

    def kill_master(self, node: Node, *, loses_tail: bool, comes_back: bool = True) -> None:
        """Kills a master; its replica takes over, and it comes back as a replica of that one.

        With `loses_tail` its last writes have not reached the replica.
        """
        replica = self.replica_of(node)
        if loses_tail:
            self._cut_off(node, replica)
        node.kill()
        self.num_losses += 1
        if loses_tail:
            replica.signal(signal.SIGCONT)
        self.until(lambda: replica.is_master, f"{replica} takes over")
        if comes_back:
            node.start()
            self.until(self.cluster.is_whole, "the cluster is whole")

    def _cut_off(self, node: Node, replica: Node) -> None:
        # Stopped, it cannot connect again; and what is written from now on is not sent to it.
        replica.signal(signal.SIGSTOP)
        node.client.client_kill_filter(_type="replica")
        before, give_up = self.num_tokens, time.monotonic() + NODE_TIMEOUT_MS / 2000

        def has_tail() -> bool:
            is_enough = self.num_tokens >= before + TAIL_TOKENS
            return is_enough or self.has_ended or time.monotonic() > give_up

        self.until(has_tail, "a tail")
        self.outcome.figures["tail_tokens"] += self.num_tokens - before

    def switch(self, node: Node) -> None:
        """An operator makes the replica of a master the master, without a loss."""
        replica = self.replica_of(node)
        replica.call("CLUSTER", "FAILOVER")
        self.until(lambda: replica.is_master and not node.is_master, "the switch")
        self.until(self.cluster.is_whole, "the cluster is whole")

    def move(self, shard: int) -> None:
        """Moves the slot of a shard, with its keys, while it is used."""
        keys = self.brokers[shard].keys
        self.cluster.move(keys, another(self.cluster, self.cluster.owner(keys)))

    # -- watching -----------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        return sum(len(caller.notes.token_ids) for caller in self.callers)

    @property
    def has_ended(self) -> bool:
        return all(caller.is_through for caller in self.callers)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Returns when the condition is true. Stuck when it never is, with everybody's words."""
        pause, give_up = threading.Event(), time.monotonic() + self._patience
        while time.monotonic() < give_up:
            with contextlib.suppress(BrokerUnavailable, RedisError):
                if condition():
                    return
            pause.wait(POLL_SECONDS)
        words = "\n".join(f"-- {one.name} --\n{one.log_tail()}" for one in self.workers)
        raise Stuck(f"never came: {what}\n{words}")

    # -- the end ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Waits for every end and for rest, drains the workers, and judges what is left."""
        for worker in self.workers:
            if worker.is_paused and worker.is_alive:
                worker.resume()
        self.until(lambda: self.has_ended, "the end of every reader")
        self.until(self._all_have_ended, "a terminal state of every request")
        with contextlib.suppress(Stuck):
            self.until(lambda: not self._left_over(), "rest")
        for worker in self.active:
            worker.terminate()
        for worker in self.workers:
            code = worker.wait(PATIENCE_SECONDS)
            if code not in (0, -9):
                self.outcome.violations.append(f"{worker.name} ended with {code}")
            self.outcome.violations += worker.contradictions()
            self.outcome.figures.update(worker.counts)
        self.outcome.violations += self._left_over()
        for shard in self.shards():
            for caller in shard.callers:
                self.outcome.violations += _judge(shard, caller)  # type: ignore[arg-type]
            told, ended = _told_of(shard), _ended_of(shard)  # type: ignore[arg-type]
            self.outcome.violations += told_violations(told, ended)

    def shards(self) -> Iterator[ShardStage]:
        for broker in self.brokers:
            yield ShardStage(
                cast=self.cast,
                outcome=self.outcome,
                broker=broker,
                connection=for_key(self.connection, broker.keys.prefix),
                callers=[one for one in self.callers if self._broker_of(one) is broker],
                num_losses=self.num_losses,
            )

    def _broker_of(self, caller: Caller) -> Broker:
        return self.brokers[shard_of(caller.request_id, NUM_SHARDS)]

    def _left_over(self) -> list[str]:
        return [line for shard in self.shards() for line in left_over(shard)]  # type: ignore[arg-type]

    def _all_have_ended(self) -> bool:
        for caller in self.callers:
            broker = self._broker_of(caller)
            try:
                if not broker.status(caller.request_id).state.is_terminal:
                    return False
            except UnknownRequest:
                # A dead master took the submit with it after the reader had seen the end.
                broker.submit(caller.wanted.request)
                return False
        return True
