"""Train abacus on the CPU.

    python -m models.abacus.train --output FOLDER

The examples of step n are drawn from (seed, n) alone and the learning rate is a function of n, so
a run that was interrupted and resumed from its checkpoint ends with the weights of one that was
not. Only the tokens of answers, <eos> among them, are trained on.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from models.abacus.architecture import PAD_ID, configuration, encode_document, save_folder
from models.abacus.forward import hidden_states, logits
from models.abacus.tasks import TASKS, Example, generate

THREADS = 2
DOCUMENTS_PER_STEP = 256
#: Steps of warm-up, then the rate falls linearly to zero.
WARMUP_STEPS = 100
MATRIX_RATE = 4e-3
OTHER_RATE = 3e-3
MATRIX_WEIGHT_DECAY = 0.05
GRADIENT_NORM = 1.0
#: Every so many steps progress is measured, the shares are set anew and a checkpoint is written.
MEASURE_STEPS = 250
MEASURED_EXAMPLES = 256
#: How many documents of each task a step holds while all do equally badly. Long documents cost
#: more and teach more per document, so they get fewer.
BASE_SHARES = {"add": 1.0, "reverse": 1.0, "sort": 1.0, "count": 0.25, "json": 0.5}
#: What a faultless task keeps: shares grow with the root of this plus the error.
SHARE_FLOOR = 0.02
#: A micro-batch takes documents up to this much longer than its shortest, and lengths are rounded
#: up, so that little is padding and few shapes occur.
MICRO_BATCH_GROWTH = 1.5
LENGTH_MULTIPLE = 16
#: The label of tokens that are not trained on.
IGNORED = -100


@dataclass(slots=True)
class Run:
    """Everything a training run changes: the model, its optimizers, where it is, what lags."""

    model: LlamaForCausalLM
    matrix_optimizer: torch.optim.Muon
    other_optimizer: torch.optim.AdamW
    step: int = 0
    errors: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TASKS, 1.0))

    @classmethod
    def start(cls, seed: int) -> "Run":
        torch.manual_seed(seed)
        model = LlamaForCausalLM(configuration())
        matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
        held = {id(weight) for weight in matrices}
        others = [weight for weight in model.parameters() if id(weight) not in held]
        return cls(
            model,
            torch.optim.Muon(
                matrices,
                lr=MATRIX_RATE,
                weight_decay=MATRIX_WEIGHT_DECAY,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def save(self, path: Path) -> None:
        """Write a checkpoint; an interrupted save leaves the one before."""
        state = {
            "model": self.model.state_dict(),
            "matrix_optimizer": self.matrix_optimizer.state_dict(),
            "other_optimizer": self.other_optimizer.state_dict(),
            "step": self.step,
            "errors": self.errors,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.matrix_optimizer.load_state_dict(state["matrix_optimizer"])
        self.other_optimizer.load_state_dict(state["other_optimizer"])
        self.step = state["step"]
        self.errors = state["errors"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Documents of similar length: ids and labels, both [documents, length], padded right."""

    ids: Tensor
    labels: Tensor


def main() -> None:
    """Train up to --steps, print one JSON line per measurement, and write the model folder."""
    options = _parser().parse_args()
    torch.set_num_threads(THREADS)
    run = Run.start(options.seed)
    if options.checkpoint and options.checkpoint.exists():
        run.load(options.checkpoint)
        print(f"resumed at step {run.step}", flush=True)
    began = time.monotonic()
    while run.step < options.steps:
        train_step(run, options.seed, options.steps)
        if run.step % MEASURE_STEPS == 0 or run.step == options.steps:
            run.errors = measure_errors(run, options.seed)
            line = {"step": run.step, "seconds": round(time.monotonic() - began)}
            line |= {task: round(1 - error, 4) for task, error in run.errors.items()}
            print(json.dumps(line), flush=True)
            if options.checkpoint:
                run.save(options.checkpoint)
    save_folder(run.model, options.output)


def train_step(run: Run, seed: int, steps: int) -> None:
    """Take the next step of a run of `steps` steps."""
    scale = _rate_scale(run.step, steps)
    for optimizer, rate in (
        (run.matrix_optimizer, MATRIX_RATE),
        (run.other_optimizer, OTHER_RATE),
    ):
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        optimizer.zero_grad()
    batches = list(micro_batches(_step_examples(run, seed)))
    trained_tokens = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
    for batch in batches:
        wanted = batch.labels != IGNORED
        predicted = logits(run.model, hidden_states(run.model, batch.ids)[wanted])
        loss = functional.cross_entropy(predicted, batch.labels[wanted], reduction="sum")
        (loss / trained_tokens).backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), GRADIENT_NORM)
    run.matrix_optimizer.step()
    run.other_optimizer.step()
    run.step += 1


@torch.no_grad()
def measure_errors(run: Run, seed: int) -> dict[str, float]:
    """Return for each task the share of fresh training-side examples that are not answered right.

    Greedy decoding writes the answer exactly if and only if each of its tokens is the most likely
    one after the right tokens before it, so one forward pass over the answers decides.
    """
    source = random.Random(f"abacus measure {seed} {run.step}")
    errors = {}
    for task in TASKS:
        examples = [generate(task, source) for _ in range(MEASURED_EXAMPLES)]
        right = 0
        for batch in micro_batches(examples):
            best = logits(run.model, hidden_states(run.model, batch.ids)).argmax(-1)
            agrees = (best == batch.labels) | (batch.labels == IGNORED)
            right += int(agrees.all(dim=1).sum())
        errors[task] = 1 - right / MEASURED_EXAMPLES
    return errors


def micro_batches(examples: list[Example]) -> Iterator[MicroBatch]:
    """Cut examples into batches of similar length, the shortest first."""
    documents = sorted(map(encode_document, examples), key=lambda document: len(document[0]))
    while documents:
        longest = max(LENGTH_MULTIPLE, len(documents[0][0]) * MICRO_BATCH_GROWTH)
        taken = [document for document in documents if len(document[0]) <= longest]
        documents = documents[len(taken) :]
        yield _pad(taken)


def _pad(documents: list[tuple[list[int], int]]) -> MicroBatch:
    longest = max(len(ids) for ids, _ in documents)
    length = math.ceil(longest / LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    ids = torch.full((len(documents), length), PAD_ID)
    labels = torch.full((len(documents), length), IGNORED)
    for row, (document, answer_start) in enumerate(documents):
        ids[row, : len(document)] = torch.tensor(document)
        # The label of a position is the token after it.
        labels[row, answer_start - 1 : len(document) - 1] = torch.tensor(document[answer_start:])
    return MicroBatch(ids, labels)


def _step_examples(run: Run, seed: int) -> list[Example]:
    source = random.Random(f"abacus step {seed} {run.step}")
    shares = [BASE_SHARES[task] * math.sqrt(SHARE_FLOOR + run.errors[task]) for task in TASKS]
    tasks = source.choices(TASKS, weights=shares, k=DOCUMENTS_PER_STEP)
    return [generate(task, source) for task in tasks]


def _rate_scale(step: int, steps: int) -> float:
    return min((step + 1) / WARMUP_STEPS, (steps - step) / steps)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument(
        "--checkpoint", type=Path, help="resume from this file, and keep it current"
    )
    return parser


if __name__ == "__main__":
    main()
