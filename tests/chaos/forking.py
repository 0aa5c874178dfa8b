"""Forks the processes of chaos from one server that has imported everything already.

Each of them is a process of its own, with its own threads, connections and memory of nothing, and
yet it is started in a moment: only the imports are shared.
"""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

#: Linux: the signal a process gets when its parent dies.
PR_SET_PDEATHSIG = 1
#: What every process of chaos needs, but the model.
IMPORTS = ("tests.chaos.clients", "tests.chaos.worker", "tokenizers", "pydantic")
#: What a worker with the real model needs besides; takes seconds, and only such plays need it.
MODEL_IMPORTS = ("engine.model.load.load_runner", "service.worker.model.text")
#: The wide path and the hybrid model.
HYBRID_IMPORTS = (
    "engine.model.wide.loader",
    "transformers.models.qwen3_5.modeling_qwen3_5",
)

#: What gateways, batchers and notifiers need, and only their plays.
SINK_IMPORTS = (
    *("tests.chaos.sinks.services", "service.gateway.server", "service.batcher.batcher"),
    "service.notifier.notifier",
)

#: What workers with vLLM need besides: importing it loads vLLM, which takes tens of seconds.
VLLM_IMPORT = "tests.chaos.loaded_vllm"

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(IMPORTS))


def prepare_for_the_model(*, is_hybrid: bool) -> None:
    """Lets the server import torch, too. Too late once it runs, so called first in a process."""
    hybrid = HYBRID_IMPORTS if is_hybrid else ()
    _context.set_forkserver_preload([*IMPORTS, *MODEL_IMPORTS, *hybrid])


def prepare_for_sinks() -> None:
    """Lets the server import gateways, batchers and notifiers, too. See above."""
    _context.set_forkserver_preload([*IMPORTS, *SINK_IMPORTS])


def prepare_for_vllm() -> None:
    """Lets the server load vLLM as well; the processes that it forks have one each. See above."""
    os.environ.update(loaded_vllm_environment())
    _context.set_forkserver_preload([*IMPORTS, *MODEL_IMPORTS, VLLM_IMPORT])


def loaded_vllm_environment() -> dict[str, str]:
    """One thread, since threads do not survive a fork, and no core of its own for all of them."""
    return {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def start(run: Callable[..., None], *args: Any, name: str, log: Path) -> BaseProcess:
    """Runs `run(*args)` in a process that says what it has to say into `log`.

    SIGTERM waits until `hear_sigterm` there. No process outlives the one that started it.
    """
    # The server starts this first if nobody has, and lets SIGTERM in again as soon as it has.
    resource_tracker.ensure_running()
    # What the server blocks, its children begin with. Before its first child nothing can go wrong.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    process = _context.Process(target=_begin, args=(run, args, log), name=name, daemon=True)
    process.start()
    return process


def end_with_parent(number: int) -> None:
    """Has this process get a signal when the one that started it dies, however it dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def hear_sigterm() -> None:
    """Lets a SIGTERM in that was kept waiting since the fork."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _begin(run: Callable[..., None], args: tuple[Any, ...], log: Path) -> None:
    # No process may outlive the schedule, least of all one that stands still.
    end_with_parent(signal.SIGKILL)
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        del os.environ[name]
    run(*args)
