"""Ctrl-C for tests that were started in the background."""

import signal


def restore_interrupts() -> None:
    """SIGINT interrupts again, here and in the processes that the tests start.

    A shell without job control starts `make test &` with SIGINT ignored, every process inherits
    that, and a test that interrupts a program would wait for it until its timeout.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
