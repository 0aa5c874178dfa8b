"""The workloads by name: which prompts arrive, and how many tokens each request generates.

W1  64 requests at once; prompts of 16 to 512 tokens, outputs of 16 to 256, log-uniform.
W2  one request, 128 tokens in and 128 out.

Prompts are random token ids: with random weights the content does not matter, the lengths do.
"""

import math
import random
from dataclasses import dataclass

SEED = 7


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: its prompt, and the exact number of tokens it must generate."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that all arrive at time zero."""

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


def make_workload(name: str, *, vocab_size: int) -> Workload:
    """The workload called `name`, always the same; KeyError for an unknown name."""
    source = random.Random(SEED)
    lengths = {
        "W1": [(_between(source, 16, 512), _between(source, 16, 256)) for _ in range(64)],
        "W2": [(128, 128)],
    }[name]
    items = [
        WorkItem(tuple(source.randrange(3, vocab_size) for _ in range(num_prompt)), num_output)
        for num_prompt, num_output in lengths
    ]
    return Workload(name, tuple(items))


def _between(source: random.Random, low: int, high: int) -> int:
    return round(math.exp(source.uniform(math.log(low), math.log(high))))
