"""Our own engine as a child process: loaded and measured like the others.

Environment variables choose other forms: QUIRE_BENCH_DIGITS is the number of digits of inputs of
quantized weights, or 0 to dequantize the weights. QUIRE_BENCH_QUANTIZATION quantizes a float model
at load. QUIRE_BENCH_KV_CACHE_BYTES is the size of the cache, QUIRE_BENCH_KV_CACHE_DTYPE its type.
With QUIRE_BENCH_FIXED_THREADS, a step has as many threads as the process.
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.child import Generation, Request, drive, serve
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.checks.rehearsal import reference_rehearsal
from engine.model.load.load_runner import load_runner
from engine.model.load.quantize import load_quantized
from engine.model.wide import gguf_blocks
from engine.model.wide.loader import LoadedModel, load_model
from engine.model.wide.stored_layers import dequantize
from engine.request import Request as EngineRequest
from engine.sampling_params import SamplingParams

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 256
KV_CACHE_BYTES = 2 << 30


class QuireEngine:
    """The engine without Redis and text. Prefix caching is on, as in a worker.

    A prefix cache uses new memory until it is full, and a system may provide new memory slowly. So
    all memory is written before the first turn, as vLLM does at load. `cache_seconds` is the time.
    """

    def __init__(self, model: Path, dtype: str, _workspace: Path) -> None:
        started = time.perf_counter()
        digits = os.environ.get("QUIRE_BENCH_DIGITS")
        if digits and dtype == "bf16":
            gguf_blocks.StoredBlocks.bfloat16_digits = int(digits)
        quantization: Any = os.environ.get("QUIRE_BENCH_QUANTIZATION") or None
        load = partial(load_quantized, quantization=quantization)
        runner = load_runner(
            model,
            dtype=DTYPES[dtype],
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            kv_cache_memory_bytes=int(os.environ.get("QUIRE_BENCH_KV_CACHE_BYTES", KV_CACHE_BYTES)),
            kv_cache_dtype=os.environ.get("QUIRE_BENCH_KV_CACHE_DTYPE", "auto"),
            now=time.perf_counter,
            load=load_dequantized if digits == "0" else load,
        )
        if "QUIRE_BENCH_FIXED_THREADS" in os.environ:
            runner.threads = None
        loaded = time.perf_counter()
        runner.kv_pool.touch(range(runner.kv_pool.num_blocks))
        made = time.perf_counter()
        facts = runner.config_facts
        self._runner = runner
        self._engine = Engine(
            EngineConfig(
                num_blocks=facts.num_blocks,
                max_model_len=facts.max_model_len,
                vocab_size=facts.vocab_size,
                eos_token_ids=facts.eos_token_ids,
                block_size=facts.block_size,
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            ).with_states(facts.states),
            runner,
        )
        self.facts: dict[str, object] = {
            "version": "this commit",
            "load_seconds": round(loaded - started, 2),
            "cache_seconds": round(made - loaded, 2),
            "cache_mb": runner.kv_pool.num_blocks * runner.kv_pool.bytes_per_block // 1_000_000,
            "form": runner.model.name,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        }

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        return drive(requests, add=self._add, has_work=self._engine.has_work, step=self._step)

    def write_logits(self, tokens: Sequence[int], to: Path) -> None:
        pool = self._runner.kv_pool
        rehearsal = reference_rehearsal(
            dtype=pool.key_cache(0).dtype, device=torch.device("cpu"), block_size=pool.block_size
        )
        (logits,) = rehearsal.logits(self._runner.model, [tokens], [[len(tokens)]])
        logits.numpy().tofile(to)

    def _add(self, index: int, request: Request) -> None:
        self._engine.add_request(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=request.prompt,
                sampling=SamplingParams(
                    max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True
                ),
                arrival_time=request.arrival_seconds,
            )
        )

    def _step(self) -> Iterable[tuple[int, list[int]]]:
        for output in self._engine.step(time.perf_counter):
            yield int(output.request_id), list(output.token_ids)


def load_dequantized(path: str | Path, **options: Any) -> LoadedModel:
    """The model of a GGUF file without its quantized weights."""
    loaded = load_model(path, **options)
    dequantize(loaded.model)
    return replace(loaded, stored={})


if __name__ == "__main__":
    serve(QuireEngine)
