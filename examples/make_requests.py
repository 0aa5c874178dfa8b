"""Writes examples/requests.jsonl: 200 held-out prompts of abacus, mixed in task, class and length.

The file is checked in, so that a reader can look at what the demo sends; this program is how it was
made, and a test compares the two.
"""

import json
import random
from pathlib import Path

from models.abacus.tasks import MAX_ANSWER_CHARACTERS, TASKS, generate

NUM_REQUESTS = 200
SEED = 20
REQUESTS_FILE = Path(__file__).with_name("requests.jsonl")
#: Classes in the proportion in which services use them.
PRIORITIES = ("low", "low", "normal", "normal", "normal", "normal", "high", "critical")
#: Drawn prompts that abacus answers wrong: it errs on a few of a thousand, and the demo is about
#: something else.
MISTAKEN = frozenset({"9982+9818="})
#: Counting and JSON have long answers, which a crash is likely to catch in the middle.
TASK_WEIGHTS = {"add": 2, "reverse": 2, "sort": 2, "count": 3, "json": 3}


def make_lines() -> list[str]:
    """The file's lines; always the same ones."""
    source = random.Random(SEED)
    tasks = source.choices(TASKS, weights=[TASK_WEIGHTS[task] for task in TASKS], k=NUM_REQUESTS)
    lines = []
    for index, task in enumerate(tasks):
        request = {
            "custom_id": f"{task}-{index:03}",
            "prompt": _prompt(task, source),
            "max_tokens": MAX_ANSWER_CHARACTERS + 1,
            "priority": source.choice(PRIORITIES),
        }
        lines.append(json.dumps(request))
    return lines


def _prompt(task: str, source: random.Random) -> str:
    drawn = iter(lambda: generate(task, source, held_out=True).prompt, None)
    return next(prompt for prompt in drawn if prompt not in MISTAKEN)


if __name__ == "__main__":
    REQUESTS_FILE.write_text("\n".join(make_lines()) + "\n")
