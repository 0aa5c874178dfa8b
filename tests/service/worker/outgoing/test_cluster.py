"""A worker whose shards are on the nodes of a cluster."""

import signal
from itertools import count

from quire.client.client import Client
from quire.keys import Keys
from quire.queue.submit.routing import shard_of
from tests.quire.clusters import Cluster, another, spread
from tests.service.builders import (
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
)

NUM_SHARDS = 6


def submit(client: Client, *, count: int, max_tokens: int, shards: int) -> dict[str, list[int]]:
    """Requests, as many in each shard as in any other: id -> prompt."""
    sampling = {"max_tokens": max_tokens, "seed": 0}
    prompts = {
        id_in(number % shards, shards, name=f"{max_tokens}-{number}"): [number, 7]
        for number in range(1, count + 1)
    }
    client.submit_many(
        [{"prompt": one, "sampling": sampling, "request_id": id_} for id_, one in prompts.items()]
    )
    return prompts


def id_in(shard: int, shards: int, *, name: str) -> str:
    """An id that begins with the name and leads to the shard."""
    ids = (f"{name}-{number}" for number in count(1))
    return next(one for one in ids if shard_of(one, shards) == shard)


def judge(client: Client, prompts: dict[str, list[int]], *, max_tokens: int) -> None:
    for request_id, prompt in prompts.items():
        result = client.result(request_id, timeout=60.0)
        assert result.token_ids == expected_tokens(prompt, max_tokens=max_tokens)


def test_slots_move_below_a_worker_and_no_token_is_lost_or_repeated(cluster: Cluster):
    queue = Queue.at(cluster.url)
    spread(cluster, queue.name, NUM_SHARDS)
    gate = StepGate(steps=3)
    with Client(cluster.url, queue=queue.name, shards=NUM_SHARDS) as client:
        prompts = submit(client, count=24, max_tokens=12, shards=NUM_SHARDS)
        settings = queue.settings(shards=NUM_SHARDS, lease_seconds=5.0, max_num_seqs=32)
        with WorkerThread(settings, before_run=gate):
            for shard in range(NUM_SHARDS):
                keys = Keys(queue.name, shard)
                cluster.move(keys, another(cluster, cluster.owner(keys)))
                gate.allow(1)
            gate.open()
            judge(client, prompts, max_tokens=12)


def test_a_node_that_hangs_stops_only_its_own_shards(cluster: Cluster):
    queue = Queue.at(cluster.url)
    placed = spread(cluster, queue.name, 3)
    gate = StepGate(steps=2)
    with Client(cluster.url, queue=queue.name, shards=3) as client:
        prompts = submit(client, count=12, max_tokens=64, shards=3)
        of_shard = {request_id: shard_of(request_id, 3) for request_id in prompts}
        assert set(of_shard.values()) == {0, 1, 2}
        settings = queue.settings(shards=3, lease_seconds=20.0, max_num_seqs=32)
        with WorkerThread(settings, before_run=gate) as worker:
            running = {"model": "fake", "state": "running"}
            number = len(prompts)
            # All are claimed before a step more: else the first end before the last are admitted.
            eventually(lambda: all(client.status(one).state == "running" for one in prompts))
            gate.step_until(lambda: worker.metric("quire_engine_requests", **running) == number)
            frozen = placed[0].process
            assert frozen is not None
            frozen.send_signal(signal.SIGSTOP)
            try:
                gate.open()
                others = {one: prompts[one] for one, shard in of_shard.items() if shard != 0}
                judge(client, others, max_tokens=64)
            finally:
                frozen.send_signal(signal.SIGCONT)
            judge(client, prompts, max_tokens=64)


def test_the_commands_of_a_node_are_those_of_its_shards(cluster: Cluster):
    """With the same work for each shard, a third node adds nothing to the work of the others."""

    def commands_per_node(shards: int) -> list[int]:
        queue = Queue.at(cluster.url)
        placed = spread(cluster, queue.name, shards)
        with Client(cluster.url, queue=queue.name, shards=shards) as client:
            with WorkerThread(queue.settings(shards=shards, max_num_seqs=64)):
                first = submit(client, count=shards, max_tokens=4, shards=shards)
                judge(client, first, max_tokens=4)
                before = {node: node.num_commands() for node in placed.values()}
                prompts = submit(client, count=20 * shards, max_tokens=16, shards=shards)
                judge(client, prompts, max_tokens=16)
            return [node.num_commands() - before[node] for node in placed.values()]

    two, three = commands_per_node(2), commands_per_node(3)
    print("commands of each node with 20 requests a shard:", two, three)
    assert max(three) < 1.5 * max(two)
