"""One model over two machines, here two processes with a core each: a killed one ends the worker.

Needs vLLM, which has an environment of its own: `make test-vllm`.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.service.builders import Queue
from tests.service.processes import REAL_WORKER, WorkerProcess

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` has it")

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.processes,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two nodes need two cores"),
]

#: Longer than a busy worker may fail to renew its leases.
COMMON = ("--dtype", "float32", "--max-model-len", "512", "--lease-seconds", "6")
NATIVE = (*COMMON, "--model-path", "wide")
MAX_TOKENS = 450
#: For the start of vLLM on a busy machine, and for vLLM to say that a node is gone.
PATIENCE_SECONDS = 300.0
REQUEST = {"kind": "completions", "max_tokens": MAX_TOKENS, "temperature": 1.2, "seed": 5}


@contextmanager
def nodes(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """The worker of the first node, and the process of the second one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "nnodes": 2,
        "master_addr": "127.0.0.1",
        "master_port": port,
        "distributed_executor_backend": "mp",
        "tensor_parallel_size": 2,
        "enforce_eager": "true",
    }
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    cores = sorted(os.sched_getaffinity(0))

    def start(rank: int) -> WorkerProcess:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(cores[rank]))
        given = {**common, "node_rank": rank}
        flags = [word for name, value in given.items() for word in ("--vllm", f"{name}={value}")]
        return WorkerProcess(
            queue, *COMMON, "--engine", "vllm", *flags, module=REAL_WORKER, is_fresh=True
        )

    with start(1) as second, start(0) as first:
        yield first, second


@pytest.mark.parametrize("is_first", [False, True], ids=["second killed", "first killed"])
def test_a_killed_node_ends_the_others_and_another_worker_continues(queue, monkeypatch, is_first):
    def submit() -> str:
        return queue.submit("count: 100 to 400=", ignore_eos=True, **REQUEST)

    with WorkerProcess(queue, *NATIVE, module=REAL_WORKER, is_fresh=True):
        alone = queue.result(submit(), seconds=PATIENCE_SECONDS)
    disturbed = submit()
    with nodes(queue, monkeypatch) as (first, second):
        queue.wait_for_tokens(disturbed, 5, seconds=PATIENCE_SECONDS)
        killed, left = (first, second) if is_first else (second, first)
        killed.kill()
        assert left.process.wait(timeout=PATIENCE_SECONDS) == 1
    assert 5 <= queue.published(disturbed) < MAX_TOKENS
    with WorkerProcess(queue, *NATIVE, module=REAL_WORKER, is_fresh=True):
        output = queue.result(disturbed, seconds=PATIENCE_SECONDS)
    assert output.completion.resumes >= 1
    assert output.token_ids == alone.token_ids
    assert output.text == alone.text
