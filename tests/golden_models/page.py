"""Writes docs/reference/models.md from the stored results: `python -m tests.golden_models.page`."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import transformers

from tests.golden_models.compare import STATES, Found

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "golden-models.json"
#: What each state means to somebody who looks for a model.
MEANINGS = {
    "fast": "served by the fast path, the common decoder; the wide path was compared, too",
    "wide": "served by the wide path, the code of transformers with our attention",
    "refused": "a worker refuses to start with it, and says why",
    "not made": "no small model could be made to compare with, so nothing is known",
    "wrong": "the tokens differ, and no worker may serve it",
}
PAGE = ROOT / "docs" / "reference" / "models.md"


def write_json(results: Sequence[Found], path: Path) -> None:
    """The results, for the page and for programs."""
    content = {
        "transformers": transformers.__version__,
        "models": [asdict(found) for found in results],
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path = RESULTS) -> tuple[str, list[Found]]:
    """The version of transformers, and the results."""
    content = json.loads(path.read_text())
    return content["transformers"], [Found(**one) for one in content["models"]]


INTRODUCTION = """\
# Models

Generated from [golden-models.json](../../benchmarks/results/golden-models.json) by
`python -m tests.golden_models.page`; do not edit.

This lists every type of causal language model of transformers {version}. For each,
`make golden-models` makes a small model with random weights in every parameter. It compares the
greedy tokens of our engine in float32 with `generate` of transformers: alone, in a batch, with
prompts in chunks, and resumed from published tokens. A type counts as served only if all are equal.

A small model has the options that the configuration of its type has by default. A checkpoint with
other options may be refused: each one is [checked](checkpoints.md) when it is loaded. Types of
multimodal checkpoints that transformers does not count as causal models are on that page, too.

| state | meaning | types |
|---|---|---|
{counts}

## Served

| type | class | path |
|---|---|---|
{served}

## Not served

| type | class | state | reason |
|---|---|---|---|
{others}
"""


def render(version: str, results: Sequence[Found]) -> str:
    """The page."""
    number_of = Counter(found.state for found in results)
    served, others = [], []
    for found in results:
        row = f"| `{found.kind}` | `{found.model_class}` | {found.state} |"
        if found.state in ("fast", "wide"):
            served.append(row)
        else:
            others.append(f"{row} {_cell(found.reason)} |")
    counts = [f"| {state} | {MEANINGS[state]} | {number_of[state]} |" for state in STATES]
    return INTRODUCTION.format(
        version=version,
        counts="\n".join(counts),
        served="\n".join(served),
        others="\n".join(others),
    )


def _cell(text: str) -> str:
    """A text as a cell of a table, without what Markdown would read as markup."""
    return re.sub(r"([|<>_*`\[\]])", r"\\\1", text)


if __name__ == "__main__":
    PAGE.write_text(render(*read_json()))
