"""What the program of each process does alike: its exit codes, its signals, how it begins.

Imports nothing slow. Before a process handles signals, one ends it at once; that is acceptable
only as long as it has no work.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from quire.version import install_hint

if TYPE_CHECKING:
    from service.shared.settings.reading import ProcessSettings

#: The exit code of a process that a signal has ended, and that has nothing left to do.
EXIT_OK = 0
#: The exit code for an invalid command line, environment or file, and for a missing module.
EXIT_USAGE = 2
#: The signals that end a process.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(
    kind: str, body: Callable[[], int], *, extra: str, held: Iterable[signal.Signals] = ()
) -> int:
    """The exit code of `body`, or EXIT_USAGE with one line on stderr if the process cannot begin.

    `kind` is the kind of this process, and `extra` installs every package that it imports. The
    signals `held` stay pending, in all threads, until the process waits for them or handles them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        from service.shared.settings.sources import ConfigurationError

        try:
            return body()
        except ConfigurationError as error:
            reason = f"configuration: {error}"
    except ModuleNotFoundError as error:
        # Only the client is installed, for instance by `pip install .`.
        hint = install_hint(extra)
        reason = f"installation: the module {error.name} is missing; the {kind} needs {hint}"
    sys.stderr.write(f"{reason}\n")
    return EXIT_USAGE


def begin_log(settings: "ProcessSettings", *, worker: str | None = None) -> None:
    """Log as the settings say, first of all the variables that are probably misspelt."""
    # Imported only here, so that `--help` and wrong settings are answered quickly.
    from service.shared.logs import configure_logs, warn_of_settings

    configure_logs(level=settings.log_level, style=settings.log_format, worker=worker)
    warn_of_settings(settings.unknown_variables(os.environ))


def on_signals(stop: Callable[[], None], *, reload: Callable[[], None] | None = None) -> None:
    """Call `stop` in this event loop for each of STOP_SIGNALS, and `reload` for each SIGHUP."""
    import asyncio

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    if reload is not None:
        loop.add_signal_handler(signal.SIGHUP, reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
