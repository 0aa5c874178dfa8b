"""A node of a model that vLLM divides among machines, other than the first: it serves no requests.

The worker of the first node plans all steps. This process keeps the ranks of its machine, until one
of them ends or the first node is gone.
"""

import socket
from collections.abc import Mapping
from multiprocessing.connection import wait
from typing import Any, NoReturn

from engine.errors import DeviceFailed
from engine.vllm.config import VllmLimits, configure, refusing

#: How often it is checked whether the first node is there, and how long its answer may take.
_CHECK_SECONDS, _ANSWER_SECONDS = 1.0, 10.0


def follow(path: str, limits: VllmLimits, *, given: Mapping[str, Any]) -> NoReturn:
    """Load this machine's part of a model as soon as the first node loads its own, and keep it.

    Raises:
        ModelRefused: vLLM cannot serve the model.
        DeviceFailed: a rank of this machine has ended, or the first node has.
    """
    config = configure(path, limits, given=given, adapters={}).vllm_config
    with refusing(path):
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        executor = MultiprocExecutor(config, monitor_workers=False)
    first = config.parallel_config.master_addr, config.parallel_config.master_port
    sentinels = [worker.proc.sentinel for worker in executor.workers]
    try:
        while not wait(sentinels, timeout=_CHECK_SECONDS):
            if not _answers(first):
                raise DeviceFailed(f"node 0 does not answer at {first[0]}:{first[1]}")
        raise DeviceFailed("a rank of this node has ended")
    finally:
        executor.shutdown()


def _answers(address: tuple[str, int]) -> bool:
    """Whether vLLM's first rank still listens where all ranks have met."""
    try:
        socket.create_connection(address, timeout=_ANSWER_SECONDS).close()
    except OSError:
        return False
    return True
