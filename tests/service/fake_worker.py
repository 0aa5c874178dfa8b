"""A worker process without a model: `python -m tests.service.fake_worker`, flags as the real one.

Only tests reach it. Each of its steps takes QUIRE_TEST_STEP_SECONDS of device time, and one with a
prompt that begins with POISON is the last thing it does.
"""

import os
import signal
import sys
import time

from engine.batch import Batch
from service.config import load_settings
from service.logs import configure_logs
from service.signals import StopSignals
from service.worker import Worker
from tests.service.builders import fake_model

STEP_SECONDS = float(os.environ.get("QUIRE_TEST_STEP_SECONDS", "0.004"))
#: It takes the process down as the kernel or a fault in native code would: without a word.
POISON = (6, 6, 6)


def compute(batch: Batch) -> None:
    time.sleep(STEP_SECONDS)
    if any(tuple(row.prompt_token_ids)[: len(POISON)] == POISON for row in batch.rows):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    signals = StopSignals()
    signals.listen()
    settings = load_settings()
    configure_logs(level=settings.log_level, style=settings.log_format, worker=settings.worker)
    worker = Worker(settings, load=lambda known: fake_model(known, before_run=compute))
    signals.pass_to(worker.stop)
    return worker.run()


if __name__ == "__main__":
    sys.exit(main())
