"""Runs the exporter: `python -m service.exporter`."""

import signal
import sys

# Before the other imports, which take a second: a signal that comes meanwhile waits until `main`
# waits for it, and no thread is interrupted in the main thread's place.
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))

from service.exporter.queues import main  # noqa: E402 - see above.

sys.exit(main())
