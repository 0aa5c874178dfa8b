"""llama.cpp as a child: one call into `llama_loop.cpp` runs a workload."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.child import Generation, Request, num_cores, serve

MAX_REQUESTS = 64
#: Tokens submitted at once, and computed at once.
BATCH_TOKENS = 2048
STEP_TOKENS = 512
CONTEXT_TOKENS = 65536
#: One cache for all sequences lets each attend to the cells of all others, masked. Apart, they are
#: faster: see docs/performance.md. The variable tries the other.
UNIFIED = os.environ.get("QUIRE_BENCH_LLAMA_UNIFIED", "0") == "1"


class LlamaEngine:
    """A model and a context of libllama, flash attention on."""

    def __init__(self, model: Path, dtype: str, workspace: Path) -> None:
        self._library = ctypes.CDLL(str(workspace / "libllama_loop.so"))
        self._library.quire_llama_load.restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(
            self._library.quire_llama_load(
                str(workspace / f"{model.name}-{dtype}.gguf").encode(),
                CONTEXT_TOKENS,
                BATCH_TOKENS,
                STEP_TOKENS,
                MAX_REQUESTS,
                num_cores(),
                ctypes.c_bool(dtype == "bf16"),
                ctypes.c_bool(UNIFIED),
            )
        )
        if not self._handle:
            raise RuntimeError("libllama did not load the model")
        self.facts: dict[str, object] = {
            "version": (workspace / "version.txt").read_text().strip(),
            "cache": "f16" if dtype == "bf16" else "f32",
            "flash_attention": True,
            "batch_tokens": BATCH_TOKENS,
            "step_tokens": STEP_TOKENS,
            "unified_cache": UNIFIED,
        }

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        prompts = [token for request in requests for token in request.prompt]
        lengths = [request.num_output_tokens for request in requests]
        tokens = (ctypes.c_int32 * sum(lengths))()
        seconds = (ctypes.c_double * sum(lengths))()
        error = self._library.quire_llama_run(
            self._handle,
            len(requests),
            (ctypes.c_int32 * len(prompts))(*prompts),
            (ctypes.c_int32 * len(requests))(*(len(request.prompt) for request in requests)),
            (ctypes.c_int32 * len(requests))(*lengths),
            (ctypes.c_double * len(requests))(*(request.arrival_seconds for request in requests)),
            tokens,
            seconds,
        )
        if error:
            raise RuntimeError(f"llama_decode failed with {error}")
        generations, begin = [], 0
        for length in lengths:
            end = begin + length
            generations.append(Generation(tokens[begin:end], seconds[begin:end]))
            begin = end
        return generations


if __name__ == "__main__":
    serve(LlamaEngine)
