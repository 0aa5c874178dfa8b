"""A copy of Redis' files, taken in the middle of generations, goes on elsewhere."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.queue.broker import Broker
from quire.transport.local_redis import LocalRedis
from tests.service.builders import (
    LEASE_SECONDS,
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
    private_redis,
)

NUM_TOKENS = 120


def save(server: LocalRedis, queue: Queue, to: Path) -> dict[str, object]:
    """What docs/how-to/capacity.md says: BGSAVE, then copy the file."""
    file = Path(server._directory) / "dump.rdb"
    queue.connection.bgsave()
    # Redis writes another file, and renames it when it is complete.
    eventually(file.exists, "the save has ended")
    shutil.copy(file, to)
    return {"append_only": False}


def copy_log(server: LocalRedis, queue: Queue, to: Path) -> dict[str, object]:
    """The same for the append-only file: no rewrite, then copy the folder."""
    redis = queue.connection
    redis.config_set("auto-aof-rewrite-percentage", 0)
    eventually(lambda: not redis.info("persistence")["aof_rewrite_in_progress"])
    shutil.copytree(Path(server._directory) / "appendonlydir", to / "appendonlydir")
    return {"append_only": True}


@pytest.mark.parametrize("back_up", [save, copy_log], ids=["rdb", "aof"])
def test_a_restored_copy_continues_every_generation(
    tmp_path: Path, back_up: Callable[..., dict[str, object]]
):
    prompts = [(5, number) for number in range(6)]
    gate = StepGate(steps=0)
    with private_redis() as server:
        queue = Queue.at(server.url)
        ids = [queue.submit(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
        late = queue.submit((9,), max_tokens=4)
        with WorkerThread(queue.settings(max_num_seqs=6, claim_batch=6), before_run=gate) as worker:
            gate.step_until(lambda: all(queue.published(one) >= 10 for one in ids))
            read = {one: queue.broker.read_output({one: 0})[one].chunks for one in ids}
            seen = {
                one: [id_ for chunk in chunks for id_ in chunk.token_ids]
                for one, chunks in read.items()
            }
            # The worker goes on during the copy.
            gate.allow(20)
            kind = back_up(server, queue, tmp_path)
            gate.step_until(lambda: all(queue.published(one) >= 60 for one in ids))
            server.kill()
            worker.worker.stop()
            worker.worker.stop()
            gate.open()
            worker.wait()
    with LocalRedis.start(options=("--dir", str(tmp_path)), **kind) as restored:
        copy = Queue.at(restored.url)
        # The same queue, on the other server.
        copy.name, copy.keys = queue.name, queue.keys
        copy.broker = Broker(copy.connection, queue=queue.name, lease_seconds=LEASE_SECONDS)
        known = {one: copy.published(one) for one in ids}
        copy.take_all_away()
        with WorkerThread(copy.settings(max_num_seqs=6)):
            for one, prompt in zip(ids, prompts, strict=True):
                output = copy.result(one)
                assert list(output.token_ids[: len(seen[one])]) == seen[one]
                assert output.token_ids == expected_tokens(list(prompt), max_tokens=NUM_TOKENS)
            assert copy.result(late).token_ids == expected_tokens([9], max_tokens=4)
        for one in ids:
            assert known[one] >= len(seen[one]), "what was published before the copy is in it"
            assert known[one] < NUM_TOKENS, "the control: it was in the middle"
            entries = copy.connection.xrange(copy.keys.output(one))
            kinds = [b"done" in fields for _, fields in entries]
            assert kinds.count(True) == 1 and kinds[-1], "one terminal record, and it comes last"
