"""Writes docs/reference/models.md from the stored results: `python -m tests.golden_models.page`."""

import json
import re
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import asdict
from pathlib import Path

import transformers

from tests.golden_models.compare import Found
from tests.golden_models.vllm_registry import hybrids, listed

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "golden-models.json"
#: The state of a type that is served by vLLM alone, if at all.
VLLM = "vllm"
#: What each state means to somebody who looks for a model.
MEANINGS = {
    "fast": "served by the fast path, the common decoder; the wide path was compared, too",
    "wide": "served by the wide path, the code of transformers with our attention",
    VLLM: "refused by the native engine, listed by vLLM (`--engine vllm`), not compared here",
    "refused": "a worker refuses to start with it, and says why; vLLM does not list it either",
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
prompts in chunks, preempted in both ways, resumed from published tokens, and behind a cached
prefix. A type counts as served only if all are equal.

A small model has the options that the configuration of its type has by default. A checkpoint with
other options may be refused: each one is [checked](checkpoints.md) when it is loaded. Types of
multimodal checkpoints that transformers does not count as causal models are on that page, too.

The column vLLM says what is known of [`--engine vllm`](engines.md#vllm-as-the-second-engine):

- `listed`: the registry of vLLM {vllm} lists the class. It was not compared.
- `compared`: a hybrid, a model with a recurrent state. On a CPU in float32, vLLM's greedy tokens
  are those of transformers: alone, in a batch that divides prompts, and resumed.
- `differs`: a hybrid with other tokens. On a CPU a worker refuses it by name.
- `fails`: a hybrid that vLLM lists and cannot compute in float32 on a CPU, so it was not compared.
  There a worker refuses it at its start.

Nothing was compared on a GPU. The [record](../../benchmarks/results/vllm-models.json) has the
reasons. `tests.golden_models.vllm_registry` and `tests.golden_models.vllm_hybrids` make it.

| state | meaning | types |
|---|---|---|
{counts}

## Served

| type | class | path | vLLM |
|---|---|---|---|
{served}

## Not served by the native engine

| type | class | state | reason |
|---|---|---|---|
{others}
"""


def shown_state(found: Found, in_vllm: Set[str]) -> str:
    """The state in the table: `vllm` for what is refused and is in vLLM's registry."""
    is_other = found.state == "refused" and found.model_class in in_vllm
    return VLLM if is_other else found.state


def render(
    version: str,
    results: Sequence[Found],
    in_vllm: tuple[str, Set[str]],
    compared: Sequence[Found] = (),
) -> str:
    """The page; `in_vllm` are a version of vLLM and the classes that it lists.

    `compared` are results of `vllm_hybrids`.
    """
    vllm, classes = in_vllm
    in_column = {found.kind: found.state for found in compared}
    states = [shown_state(found, classes) for found in results]
    number_of = Counter(states)
    served, others = [], []
    for found, state in zip(results, states, strict=True):
        row = f"| `{found.kind}` | `{found.model_class}` | {state} |"
        if found.state in ("fast", "wide"):
            other = "listed" if found.model_class in classes else "-"
            served.append(f"{row} {in_column.get(found.kind, other)} |")
        else:
            others.append(f"{row} {_cell(found.reason)} |")
    counts = [
        f"| {state} | {meaning} | {number_of[state]} |" for state, meaning in MEANINGS.items()
    ]
    return INTRODUCTION.format(
        version=version,
        vllm=vllm,
        counts="\n".join(counts),
        served="\n".join(served),
        others="\n".join(others),
    )


def _cell(text: str) -> str:
    """A text as a cell of a table, without what Markdown would read as markup."""
    return re.sub(r"([|<>_*`\[\]])", r"\\\1", text)


if __name__ == "__main__":
    PAGE.write_text(render(*read_json(), listed(), hybrids()))
