"""Runs the exporter: `python -m service.exporter`."""

import signal
import sys

# Before the other imports, which take a second: a signal that arrives meanwhile stays pending until
# `main` waits for it. Threads inherit the mask, so only the main thread receives the signal.
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))

from service.exporter.queues import main  # noqa: E402 - see above.

sys.exit(main())
