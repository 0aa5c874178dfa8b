"""Compares every causal architecture of transformers with our engine: `make golden-models`.

    python -m tests.golden_models                      all of them, with a summary
    python -m tests.golden_models llama gemma3_text    some of them
    python -m tests.golden_models --json FILE          and the results as JSON

Exits with 1 if one is wrong. `docs/reference/models.md` is made from the JSON by
`python -m tests.golden_models.page`.
"""

import argparse
import logging
import multiprocessing
import sys
from collections import Counter
from multiprocessing.pool import Pool
from pathlib import Path

import torch
import transformers

from tests.golden_models.compare import Found, compare
from tests.golden_models.configs import class_name, types
from tests.golden_models.page import write_json

#: A model that takes longer hangs.
TIMEOUT_SECONDS = 180.0
#: Before a process is replaced: some models keep memory.
MODELS_PER_PROCESS = 12


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("types", nargs="*", help="[all]", metavar="TYPE")
    parser.add_argument("--json", type=Path, help="where the results are written")
    parser.add_argument("--jobs", type=int, default=1, help="[1]")
    arguments = parser.parse_args()
    kinds = arguments.types or types()
    if unknown := set(kinds) - set(types()):
        parser.error(f"transformers has no causal model of type {', '.join(sorted(unknown))}")
    results = compare_all(kinds, jobs=arguments.jobs)
    for state, number in sorted(Counter(found.state for found in results).items()):
        print(f"{state:>9}  {number}")
    if arguments.json:
        write_json(results, arguments.json)
    return int(any(found.state == "wrong" for found in results))


def compare_all(kinds: list[str], *, jobs: int) -> list[Found]:
    """The result of every type, in their order. A process that hangs or dies is a wrong model."""
    torch.set_num_threads(1)
    results = []
    context = multiprocessing.get_context("fork")
    for first in range(0, len(kinds), jobs * MODELS_PER_PROCESS):
        some = kinds[first : first + jobs * MODELS_PER_PROCESS]
        with context.Pool(jobs, initializer=_be_quiet) as pool:
            results += _compared(pool, some)
    return results


def _be_quiet() -> None:
    """Silences the libraries, in a process that only compares."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)


def _compared(pool: Pool, kinds: list[str]) -> list[Found]:
    pending = [(kind, pool.apply_async(compare, (kind,))) for kind in kinds]
    results = []
    for kind, answer in pending:
        try:
            found = answer.get(TIMEOUT_SECONDS)
        except multiprocessing.TimeoutError:
            found = Found(kind, class_name(kind), "wrong", "it hangs, or its process died")
        except Exception as error:  # noqa: BLE001
            found = Found(kind, class_name(kind), "wrong", f"{type(error).__name__}: {error}")
        print(
            f"{found.kind:<26} {found.state:<8} {found.reason[:120]}", file=sys.stderr, flush=True
        )
        results.append(found)
    return results


if __name__ == "__main__":
    sys.exit(main())
