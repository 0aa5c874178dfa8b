"""Loads a checkpoint in a child process with little memory and CPU time."""

import multiprocessing
import resource
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from engine.errors import ModelRefused
from engine.model.wide.loader import load_model

#: What a refusal of a tiny checkpoint may take, beside what the process has already.
MEMORY_BYTES, CPU_SECONDS = 1 << 30, 20
#: Of the wall clock, for a machine that is busy with other work.
TIMEOUT_SECONDS = 100


def refusal_of(path: Path) -> str:
    """The sentence with which a checkpoint is refused, within the limits.

    AssertionError: it is loaded, takes more, or ends in another way.
    """
    return within_limits(lambda: load_model(path))


def within_limits(call: Callable[[], object]) -> str:
    """The sentence of the ModelRefused that `call` raises in a child with limits.

    The child is forked, since to import all that a load needs takes longer than the load.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(call, writer), daemon=True)
    child.start()
    writer.close()
    child.join(TIMEOUT_SECONDS)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise AssertionError("it hangs")
    if child.exitcode < 0:
        raise AssertionError(f"it was ended by {signal.Signals(-child.exitcode).name}")
    kind, text = reader.recv()
    assert kind == "refused", text
    return text


def _run(call: Callable[[], object], writer: Connection) -> None:
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        call()
        writer.send(("loaded", "it was loaded"))
    except ModelRefused as refused:
        writer.send(("refused", str(refused)))
    except BaseException:  # noqa: BLE001
        writer.send(("raised", traceback.format_exc()[-4000:]))
