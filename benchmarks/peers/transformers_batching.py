"""Continuous batching of transformers as a child process: its manager streams the tokens."""

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.child import Generation, Request, serve

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
MAX_BATCH_TOKENS = 256
PAGE_SIZE = 32
NUM_BLOCKS = 2048
#: A run fails after this time without a token.
PATIENCE_SECONDS = 120.0
#: No token has this id, so no request ends before its length.
NEVER = -1


class BatchingEngine:
    """One manager for all runs, with SDPA attention, the fastest that it has without CUDA."""

    def __init__(self, model: Path, dtype: str, _workspace: Path) -> None:
        import torch
        import transformers
        from transformers import ContinuousBatchingConfig, GenerationConfig

        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, DTYPES[dtype]), attn_implementation="sdpa"
        ).eval()
        self._manager = loaded.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=NEVER),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE,
                num_blocks=NUM_BLOCKS,
                max_batch_tokens=MAX_BATCH_TOKENS,
                auto_switch_to_flash=False,
            ),
        )
        self._manager.start()
        self._num_runs = 0
        self.facts: dict[str, object] = {
            "version": transformers.__version__,
            "max_batch_tokens": MAX_BATCH_TOKENS,
            "page_size": PAGE_SIZE,
        }

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        assert all(request.arrival_seconds == 0.0 for request in requests)
        self._num_runs += 1
        generations = [Generation() for _ in requests]
        started = time.perf_counter()
        for index, request in enumerate(requests):
            self._manager.add_request(
                request.prompt,
                request_id=f"{self._num_runs}-{index}",
                max_new_tokens=request.num_output_tokens,
                streaming=True,
                eos_token_id=NEVER,
            )
        unfinished = len(requests)
        while unfinished:
            result = self._manager.get_result(timeout=PATIENCE_SECONDS)
            if result is None or result.error:
                raise RuntimeError(f"continuous batching stopped: {result and result.error}")
            generation = generations[int(result.request_id.partition("-")[2])]
            new = result.generated_tokens[len(generation.tokens) :]
            generation.tokens += new
            generation.seconds += [time.perf_counter() - started] * len(new)
            unfinished -= result.is_finished()
        return generations


if __name__ == "__main__":
    serve(BatchingEngine)
