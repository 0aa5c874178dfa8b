"""A worker process without a model: `python -m tests.service.fake_worker`, flags as the real one.

Only tests reach it. Each of its steps takes QUIRE_TEST_STEP_SECONDS of device time.
"""

import os
import sys
import time

from engine.batch import Batch
from service.config import load_settings
from service.logs import configure_logs
from service.signals import StopSignals
from service.worker import Worker
from tests.service.builders import fake_model

STEP_SECONDS = float(os.environ.get("QUIRE_TEST_STEP_SECONDS", "0.004"))


def compute(_: Batch) -> None:
    time.sleep(STEP_SECONDS)


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
