"""Compares our engine with `generate` of transformers on one small model.

It is compared alone, batched, chunked, preempted, resumed and behind a cached prefix.

The model has random weights in every parameter, also in those that start as ones or zeros, so that
a part that is dropped changes its tokens.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine.errors import ModelRefused
from engine.model.run.model_runner import ModelRunner
from engine.model.wide.loader import _check_architecture
from engine.model.wide.transformers_model import TransformersModel
from tests.engine.model.builders import (
    SCARCE,
    Oracle,
    generate,
    make_prompt,
    make_request,
    make_runner,
)
from tests.engine.model.prefixes import ENOUGH_SNAPSHOTS, generate_behind_prefixes
from tests.golden_models.configs import class_name, small_config

#: Shorter than, as long as and longer than blocks and windows.
LENGTHS = (3, 17, 40, 29)
NUM_TOKENS = 12
#: Published tokens of a request that is resumed.
PUBLISHED = 5
#: Seeds of weights that are tried until no two tokens are nearly as likely.
SEEDS = range(8)
#: The spread of random matrices, and of what is added to norms and biases.
MATRIX_SPREAD, VECTOR_SPREAD = 0.3, 0.1

#: What can become of a type. `fast` and `wide` name the path whose tokens are exact. `not made`: no
#: small model of the type could be made to compare with.
STATES = ("fast", "wide", "refused", "not made", "wrong")


@dataclass(frozen=True, slots=True)
class Found:
    """What became of one type.

    Args:
        state: one of STATES.
        reason: why it is refused, wrong or not made; empty for exact ones.
    """

    kind: str
    model_class: str
    state: str
    reason: str = ""


def compare(kind: str, *, change: Callable[[ModelRunner], None] = lambda _: None) -> Found:
    """Compare one type. `change` may damage a loaded model, to show that this is noticed."""
    name = class_name(kind)
    with tempfile.TemporaryDirectory(prefix="quire-golden-") as parent:
        folder = Path(parent) / "model"
        try:
            return Found(kind, name, *_compared(kind, folder, change))
        except ModelRefused as refused:
            return Found(kind, name, "refused", str(refused).replace(str(folder), "the folder"))


def _compared(kind: str, folder: Path, change: Callable[[ModelRunner], None]) -> tuple[str, str]:
    for seed in SEEDS:
        try:
            config = small_config(kind)
            # What is refused by its type need not be made.
            _check_architecture(config)
            save(config, folder, seed=seed)
        except ModelRefused:
            raise
        except Exception as error:  # noqa: BLE001
            return "not made", _first_line(error)
        runner = make_runner(folder, num_state_snapshots=ENOUGH_SNAPSHOTS)
        try:
            expected = expected_tokens(folder, runner.config_facts.vocab_size)
        except NearTie:
            continue
        except Exception as error:  # noqa: BLE001
            return "not made", f"generate of transformers fails: {_first_line(error)}"
        return _judged(folder, runner, expected, change)
    return "not made", "the outputs of all seeds have near-ties or do not differ"


def _judged(
    folder: Path,
    runner: ModelRunner,
    expected: dict[str, tuple[list[int], list[int]]],
    change: Callable[[ModelRunner], None],
) -> tuple[str, str]:
    is_wide = isinstance(runner.model, TransformersModel)
    runners = {"wide" if is_wide else "fast": runner}
    if not is_wide:
        runners["wide"] = make_runner(
            folder, model_path="wide", num_state_snapshots=ENOUGH_SNAPSHOTS
        )
    for path, one in runners.items():
        change(one)
        if difference := difference_of(one, expected):
            return "wrong", f"the {path} path {difference}"
    return next(iter(runners)), ""


def difference_of(runner: ModelRunner, expected: dict[str, tuple[list[int], list[int]]]) -> str:
    """How the engine's tokens differ from the expected ones; empty if they are equal."""

    def request(name: str, published: int = 0):
        prompt, tokens = expected[name]
        return make_request(name, prompt, output=tokens[:published], max_tokens=NUM_TOKENS)

    whole = {name: tokens for name, (_, tokens) in expected.items()}
    rest = {name: tokens[PUBLISHED:] for name, tokens in whole.items()}
    alone: dict[str, list[int]] = {}
    for name in expected:
        alone |= generate(runner, [request(name)]).tokens
    ways = {
        "alone": (alone, whole),
        "in a batch": (generate(runner, [request(name) for name in expected]).tokens, whole),
        "chunked": (
            generate(runner, [request(name) for name in expected], max_num_batched_tokens=7).tokens,
            whole,
        ),
        **{
            f"preempted by {mode}": (
                generate(
                    runner,
                    [request(name) for name in expected],
                    preemption_mode=mode,
                    **SCARCE,
                ).tokens,
                whole,
            )
            for mode in ("recompute", "swap")
        },
        "resumed": (
            generate(runner, [request(name, PUBLISHED) for name in expected]).tokens,
            rest,
        ),
        "behind a cached prefix": (
            generate_behind_prefixes(runner, expected, num_known=PUBLISHED).tokens,
            rest,
        ),
    }
    return ", ".join(f"differs {way}" for way, (found, wanted) in ways.items() if found != wanted)


class NearTie(Exception):
    """Two tokens are nearly as likely, so that rounding decides; or the outputs do not differ."""


def expected_tokens(folder: Path, vocab_size: int) -> dict[str, tuple[list[int], list[int]]]:
    """A few prompts, each with its greedy continuation."""
    oracle = Oracle(folder)
    found = {}
    for salt, length in enumerate(LENGTHS):
        prompt = [3 + token % (vocab_size - 3) for token in make_prompt(length, salt=salt)]
        try:
            found[str(salt)] = (prompt, oracle.greedy(tuple(prompt), NUM_TOKENS))
        except AssertionError as error:
            raise NearTie from error
    if len({tuple(tokens) for _, tokens in found.values()}) < len(found):
        # Equality of such outputs would say little.
        raise NearTie
    return found


def save(config: PreTrainedConfig, folder: Path, *, seed: int) -> None:
    """A model with random weights in every parameter, in a folder as a user would have it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, MATRIX_SPREAD)
            elif parameter.is_floating_point():
                parameter.add_(VECTOR_SPREAD * torch.randn_like(parameter))
    model.save_pretrained(folder)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"
