"""Cost and gain of guessed tokens, by the share of them that is right.

    python -m benchmarks.bench_speculation [--models TINY,SMALL] [--tokens 4] [--rounds 5]

Requests decode alternately without guesses, and with guesses of which a given share is right. The
guesses are taken from an earlier run. How often the real lookup is right depends on the prompts,
and is not measured here. The gate: the tokens are the same with and without guesses.
"""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from benchmarks.bench_engine import BenchedEngine
from benchmarks.common.arguments import names_of
from benchmarks.common.models import SHAPES
from engine.engine import Engine
from engine.prompt_lookup import PromptLookup
from engine.request import Request
from engine.sampling_params import SamplingParams
from quire.cli.usage import positive

NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 256, 96
NUM_REQUESTS = (1, 2, 4, 8, 16)
SHARES = (0.0, 0.5, 0.8, 1.0)
#: So large that every step gets guesses: the figures show up to which size they are useful.
EVERY_STEP = 1_000


class Oracle(PromptLookup):
    """Guesses the tokens of an earlier run; only the given share of the guesses is right."""

    def __init__(self, tokens: Sequence[int], *, share: float, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self._tokens = [
            token if draw.random() < share else (token + 1) % NUM_PROMPT_TOKENS for token in tokens
        ]

    def guess(self, *, most: int) -> list[int]:
        known = self.num_known - NUM_PROMPT_TOKENS
        return self._tokens[known : known + most]


def generate(
    engine: Engine, number: int, *, oracles: Sequence[Oracle] = ()
) -> tuple[float, list[list[int]]]:
    """Runs `number` requests; returns the seconds after all have a first token, and the tokens."""
    for index in range(number):
        draw = random.Random(index)
        request = Request(
            request_id=str(index),
            prompt_token_ids=[draw.randrange(3, 8_000) for _ in range(NUM_PROMPT_TOKENS)],
            sampling=SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True),
            arrival_time=0.0,
        )
        if oracles:
            request.lookup = oracles[index]
        engine.add_request(request)
    tokens: list[list[int]] = [[] for _ in range(number)]
    started = None
    while engine.has_work():
        for output in engine.step(time.perf_counter):
            tokens[int(output.request_id)] += output.token_ids
        if started is None and all(tokens):
            started = time.perf_counter()
    assert started is not None
    return time.perf_counter() - started, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names_of("model", SHAPES), default="TINY,SMALL")
    parser.add_argument("--tokens", type=positive, default=4, help="guessed at once")
    parser.add_argument("--rounds", type=positive, default=5)
    arguments = parser.parse_args()
    for model in arguments.models:
        benched = BenchedEngine(model, dtype="bfloat16")
        plain = Engine(benched.config, benched.runner)
        guessing = Engine(
            replace(
                benched.config,
                num_speculative_tokens=arguments.tokens,
                max_speculative_step_tokens=EVERY_STEP,
            ),
            benched.runner,
        )
        print(f"\n{model}, {arguments.tokens} tokens guessed: time with guesses / without")
        print("requests " + "".join(f"{share:>9.0%}" for share in SHARES) + "  right")
        for number in NUM_REQUESTS:
            _, expected = generate(plain, number)
            ratios: list[list[float]] = [[] for _ in SHARES]
            for _ in range(arguments.rounds):
                for place, share in enumerate(SHARES):
                    without, _ = generate(plain, number)
                    oracles = [
                        Oracle(tokens, share=share, seed=index)
                        for index, tokens in enumerate(expected)
                    ]
                    seconds, tokens = generate(guessing, number, oracles=oracles)
                    if tokens != expected:
                        raise SystemExit("other tokens with guesses than without")
                    ratios[place].append(seconds / without)
            print(f"{number:>8} " + "".join(f"{median(one):>9.2f}" for one in ratios), flush=True)


if __name__ == "__main__":
    main()
