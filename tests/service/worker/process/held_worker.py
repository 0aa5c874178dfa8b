"""The real worker, held after so many tokens of all its requests: a program of its own."""

from typing import Any

import service.__main__
from engine.engine import Engine
from engine.port import Clock, RequestOutput
from engine.vllm.engine import VllmEngine
from tests.service.held import hold


def main() -> int:
    """What `python -m service` does, until it has made so many tokens with either engine."""
    _hold(Engine)
    _hold(VllmEngine)
    return service.__main__.main()


def _hold(kind: type[Engine] | type[VllmEngine]) -> None:
    step = kind.step
    num_tokens = 0

    def held_step(engine: Any, clock: Clock) -> list[RequestOutput]:
        nonlocal num_tokens
        hold(num_tokens)
        outputs: list[RequestOutput] = step(engine, clock)
        num_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    kind.step = held_step  # type: ignore[method-assign]


if __name__ == "__main__":
    service.__main__.leave(main())
