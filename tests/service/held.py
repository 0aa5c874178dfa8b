"""Holds a worker of a test where the test wants to meet it, however late the test comes."""

import os
import sys
import time

#: The variable with the number of tokens after which a worker is held.
VARIABLE = "QUIRE_TEST_HELD_AT"
#: The time of a step then: a signal is still heard soon, and no output ends before a test acts.
STEP_SECONDS = 0.5
_HELD_AT = int(os.environ.get(VARIABLE, sys.maxsize))


def hold(num_tokens: int) -> None:
    """Called before a step, with the tokens made so far."""
    if num_tokens >= _HELD_AT:
        time.sleep(STEP_SECONDS)
