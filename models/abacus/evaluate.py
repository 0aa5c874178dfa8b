"""Measure how often abacus answers held-out prompts exactly.

    python -m models.abacus.evaluate

Decoding is greedy, through `generate` of transformers and the stored tokenizer, in batches padded
on the left. The prompts depend on --seed alone and none of them was ever trained on.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TokenizersBackend

from models.abacus.tasks import MAX_ANSWER_CHARACTERS, TASKS, check, generate

FOLDER = Path(__file__).parent


def main() -> None:
    """Print a Markdown table: one row per task, one column per data type of the computation."""
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    print("| task | " + " | ".join(f"{dtype} exact" for dtype in options.dtypes) + " |")
    print("|---" * (len(options.dtypes) + 1) + "|")
    models = [
        AutoModelForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, dtype)).eval()
        for dtype in options.dtypes
    ]
    began = time.monotonic()
    for task in TASKS:
        prompts = held_out_prompts(task, options.prompts, options.seed)
        cells = []
        for model in models:
            texts = answer_greedily(model, tokenizer, prompts, batch_size=options.batch_size)
            wrong = [pair for pair in zip(prompts, texts, strict=True) if not check(*pair)]
            cells.append(f"{100 * (1 - len(wrong) / len(prompts)):.1f} %")
            if options.show_wrong:
                for prompt, text in wrong:
                    print(f"wrong: {prompt}{text}", file=sys.stderr)
        print(f"| {task} | " + " | ".join(cells) + " |", flush=True)
    seconds = time.monotonic() - began
    print(f"\n{options.prompts} held-out prompts of each task, {seconds:.0f} s")


def held_out_prompts(task: str, count: int, seed: int) -> list[str]:
    """Draw `count` distinct held-out prompts of `task`."""
    source = random.Random(f"abacus evaluate {seed} {task}")
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts[generate(task, source, held_out=True).prompt] = None
    return list(prompts)


@torch.inference_mode()
def answer_greedily(
    model: PreTrainedModel,
    tokenizer: TokenizersBackend,
    prompts: list[str],
    *,
    batch_size: int = 128,
) -> list[str]:
    """Return the model's answers in the order of `prompts`, special tokens left out."""
    # Rows that end at about the same time waste the least: a longer prompt has a longer answer.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    texts = [""] * len(prompts)
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        inputs = tokenizer(
            [prompts[index] for index in indices],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            return_token_type_ids=False,
        )
        # One token more than the longest answer: <eos>.
        output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_ANSWER_CHARACTERS + 1)
        written = output[:, inputs["input_ids"].shape[1] :]
        decoded = tokenizer.batch_decode(written, skip_special_tokens=True)
        for index, text in zip(indices, decoded, strict=True):
            texts[index] = text
    return texts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure exact answers on held-out prompts.")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--prompts", type=int, default=1000, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show-wrong", action="store_true", help="on standard error")
    return parser


if __name__ == "__main__":
    main()
