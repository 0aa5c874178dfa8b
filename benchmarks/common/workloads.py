"""The workloads: prompts, arrival times, and the number of output tokens of each request.

W1  64 requests at once; prompts of 16 to 512 tokens, outputs of 16 to 256, log-uniform.
W2  one request with a prompt of 128 tokens and an output of 128.
W3  256 requests with random arrivals (Poisson); outputs of 16 to 64 tokens. Half of the prompts
    share their first 512 tokens and have 16 to 256 more, the others have 16 to 512.
W4  8 requests at once with prompts of 4,096 to 8,128 tokens, outputs of 64.
W5  one request with a prompt of 1,024 tokens and an output of 32: how fast a prompt is read.

Prompts are random token ids: with random weights only their lengths matter. Lengths and arrivals of
a workload never change. The ids change with the turn, so that no engine finds a prompt of an
earlier turn in its cache.
"""

import math
import random
from dataclasses import dataclass

SEED = 7
NAMES = ("W1", "W2", "W3", "W4", "W5")
#: Requests per second in W3: more than any measured engine can serve, so that requests wait.
ARRIVALS_PER_SECOND = 32.0
#: The same for models of other sizes.
ARRIVALS_PER_SECOND_OF = {"TINY": 320.0, "GEMMA": 16.0, "ONE-B": 4.0}
SHARED_PREFIX_TOKENS = 512
#: Smaller ids are special tokens.
FIRST_TOKEN_ID = 3


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: its prompt, the exact number of output tokens, and its time of arrival."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    arrival_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of requests in order of arrival."""

    name: str
    items: tuple[WorkItem, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(item.prompt_token_ids) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        return sum(item.num_output_tokens for item in self.items)

    def describe(self) -> str:
        return (
            f"{self.name}: {len(self.items)} requests, {self.num_prompt_tokens} prompt tokens, "
            f"{self.num_output_tokens} output tokens"
        )


def make_workload(
    name: str, *, vocab_size: int, turn: int = 0, arrivals_per_second: float = ARRIVALS_PER_SECOND
) -> Workload:
    """The workload `name` with the prompts of a turn. KeyError for an unknown name."""
    lengths = random.Random(SEED)
    ids = random.Random(SEED + 1 + turn)

    def draw(num_tokens: int) -> tuple[int, ...]:
        return tuple(ids.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(num_tokens))

    def simultaneous(pairs: list[tuple[int, int]]) -> list[WorkItem]:
        return [WorkItem(draw(num_prompt), num_output) for num_prompt, num_output in pairs]

    def arriving() -> list[WorkItem]:
        prefix = draw(SHARED_PREFIX_TOKENS)
        items, now = [], 0.0
        for index in range(256):
            now += lengths.expovariate(arrivals_per_second)
            shares = index % 2 == 0
            own = _log_uniform(lengths, 16, 256 if shares else 512)
            prompt = (prefix if shares else ()) + draw(own)
            items.append(WorkItem(prompt, _log_uniform(lengths, 16, 64), now))
        return items

    makers = {
        "W1": lambda: simultaneous(
            [(_log_uniform(lengths, 16, 512), _log_uniform(lengths, 16, 256)) for _ in range(64)]
        ),
        "W2": lambda: simultaneous([(128, 128)]),
        "W3": arriving,
        "W4": lambda: simultaneous([(lengths.randint(4096, 8128), 64) for _ in range(8)]),
        "W5": lambda: simultaneous([(1024, 32)]),
    }
    return Workload(name, tuple(makers[name]()))


def _log_uniform(source: random.Random, low: int, high: int) -> int:
    return round(math.exp(source.uniform(math.log(low), math.log(high))))
