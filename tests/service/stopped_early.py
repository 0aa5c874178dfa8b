"""A program that gets a signal at a chosen moment of its start: the first import of a module.

`python -m tests.service.stopped_early MODULE SIGNAL PROGRAM FLAGS...`; the flags are those of
`python -m PROGRAM`.
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable


def at_import_of(module: str, act: Callable[[], None]) -> None:
    """Call `act` once, when `module` is imported for the first time."""
    due = [act]

    def hear(event: str, arguments: tuple) -> None:
        if event == "import" and arguments[0] == module and due:
            due.pop()()

    sys.addaudithook(hear)


if __name__ == "__main__":
    moment, name, program = sys.argv[1:4]
    del sys.argv[1:4]
    at_import_of(moment, lambda: os.kill(os.getpid(), signal.Signals[name]))
    runpy.run_module(program, run_name="__main__", alter_sys=True)
