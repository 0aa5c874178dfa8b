"""A worker process without a model: `python -m tests.service.fake_worker`, flags as the real one.

Only tests reach it, and `held` may hold it. Each of its steps takes QUIRE_TEST_STEP_SECONDS of
device time; one with a prompt that begins with POISON is the last thing it does; one with a prompt
that begins with SLOW_POISON is, once it has made SLOW_POISON_TOKENS tokens of the output; and one
with a prompt that begins with TREACLE never ends, once the output has TREACLE_TOKENS tokens.
"""

import functools
import os
import signal
import threading
import time

import service.__main__
import service.worker.process.worker
from engine.batch import Batch
from service.worker.process.worker import Worker
from tests.service.builders import fake_model
from tests.service.held import hold

STEP_SECONDS = float(os.environ.get("QUIRE_TEST_STEP_SECONDS", "0.004"))
#: It takes the process down as the kernel or a fault in native code would: without a word.
POISON = (6, 6, 6)
#: It does so after some tokens, as by memory that grows with each.
SLOW_POISON = (8, 8, 8)
SLOW_POISON_TOKENS = 30
#: It hangs as a call of a device does that never returns: nothing in the process can end it.
TREACLE = (5, 5, 5)
TREACLE_TOKENS = 6

#: The length that the output of each claim of such a one had when it began here.
_begun_at: dict[str, int] = {}


def compute(batch: Batch) -> None:
    time.sleep(STEP_SECONDS)
    hold(max(row.output_index for row in batch.rows))
    for row in batch.rows:
        prompt = tuple(row.prompt_token_ids)
        if prompt[: len(POISON)] == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt[: len(SLOW_POISON)] == SLOW_POISON:
            begun_at = _begun_at.setdefault(row.request_id, row.output_index)
            if row.output_index >= begun_at + SLOW_POISON_TOKENS:
                os.kill(os.getpid(), signal.SIGKILL)
        if prompt[: len(TREACLE)] == TREACLE and row.output_index >= TREACLE_TOKENS:
            threading.Event().wait()


def main() -> int:
    """What `python -m service` does, with a model that needs no torch."""
    load = functools.partial(fake_model, before_run=compute)
    service.worker.process.worker.Worker = functools.partial(Worker, load=load)  # type: ignore[misc, assignment]
    return service.__main__.main()


if __name__ == "__main__":
    service.__main__.leave(main())
