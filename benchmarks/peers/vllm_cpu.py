"""vLLM's CPU engine as a child process, which calls the steps of its engine loop."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.peers.child import Generation, Request, drive, serve

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
#: The CPU backend needs a multiple of 32.
BLOCK_SIZE = 128
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 2048


class VllmEngine:
    """An LLMEngine without a tokenizer, compiled with vLLM's defaults."""

    def __init__(self, model: Path, dtype: str, _workspace: Path) -> None:
        import vllm
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                dtype=DTYPES[dtype],
                skip_tokenizer_init=True,
                block_size=BLOCK_SIZE,
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
                max_model_len=8192,
                seed=0,
            )
        )
        self.facts: dict[str, object] = {
            "version": vllm.__version__,
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "preloaded": [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":")],
        }

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        return drive(
            requests, add=self._add, has_work=self._engine.has_unfinished_requests, step=self._step
        )

    def _add(self, index: int, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine.add_request(
            str(index),
            {"prompt_token_ids": request.prompt},
            SamplingParams(
                temperature=0.0,
                max_tokens=request.num_output_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )

    def _step(self) -> Iterable[tuple[int, list[int]]]:
        for output in self._engine.step():
            yield int(output.request_id), list(output.outputs[0].token_ids)


if __name__ == "__main__":
    serve(VllmEngine)
