"""The real worker, held after so many tokens of all its requests: a program of its own."""

import service.__main__
from engine.engine import Engine
from engine.port import Clock, RequestOutput
from tests.service.held import hold


def main() -> int:
    """What `python -m service` does, until it has made so many tokens."""
    step = Engine.step
    num_tokens = 0

    def held_step(engine: Engine, clock: Clock) -> list[RequestOutput]:
        nonlocal num_tokens
        hold(num_tokens)
        outputs = step(engine, clock)
        num_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    Engine.step = held_step  # type: ignore[method-assign]
    return service.__main__.main()


if __name__ == "__main__":
    service.__main__.leave(main())
