"""The real worker with a pause before each step, a program of its own.

A small model makes hundreds of tokens in a second. With the pauses, whoever wants to meet the
worker in the middle of an output has seconds for it.
"""

import time

import service.__main__
from engine.engine import Engine
from engine.port import Clock, RequestOutput

PAUSE_SECONDS = 0.005


def main() -> int:
    """What `python -m service` does, more slowly."""
    step = Engine.step

    def slow_step(engine: Engine, clock: Clock) -> list[RequestOutput]:
        time.sleep(PAUSE_SECONDS)
        return step(engine, clock)

    Engine.step = slow_step  # type: ignore[method-assign]
    return service.__main__.main()


if __name__ == "__main__":
    service.__main__.leave(main())
