"""`generate` of transformers as a child process, with static batches, as most programs use it."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.child import Generation, Request, serve

BATCH_SIZE = 16
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class GenerateEngine:
    """Left-padded batches in the order of arrival; each runs until its longest output ends."""

    def __init__(self, model: Path, dtype: str, _workspace: Path) -> None:
        import torch
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, DTYPES[dtype]), attn_implementation="sdpa"
        ).eval()
        self.facts: dict[str, object] = {
            "version": transformers.__version__,
            "batch_size": BATCH_SIZE,
        }

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        assert all(request.arrival_seconds == 0.0 for request in requests)
        generations: list[Generation] = []
        started = time.perf_counter()
        for begin in range(0, len(requests), BATCH_SIZE):
            generations += self._run_batch(requests[begin : begin + BATCH_SIZE], started)
        return generations

    def _run_batch(self, requests: Sequence[Request], started: float) -> list[Generation]:
        import torch

        width = max(len(request.prompt) for request in requests)
        padding = [width - len(request.prompt) for request in requests]
        ids = [[0] * left + r.prompt for left, r in zip(padding, requests, strict=True)]
        mask = [[0] * left + [1] * (width - left) for left in padding]
        seconds: list[float] = []

        def note_the_time(input_ids: Any, *_: Any, **__: Any) -> Any:
            seconds.append(time.perf_counter() - started)
            return torch.zeros(len(input_ids), dtype=torch.bool)

        with torch.inference_mode():
            output = self._model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max(request.num_output_tokens for request in requests),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[note_the_time],
            )
        new = output[:, width:].tolist()
        return [
            Generation(row[: r.num_output_tokens], seconds[: r.num_output_tokens])
            for row, r in zip(new, requests, strict=True)
        ]


if __name__ == "__main__":
    serve(GenerateEngine)
