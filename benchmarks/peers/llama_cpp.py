"""llama.cpp as a child process: one call of `llama_loop.cpp` runs a workload."""

import ctypes
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.peers.child import Generation, Request, num_cores, serve

MAX_REQUESTS = 64
#: The most tokens of one `llama_decode`, and of one computation inside it.
BATCH_TOKENS = 2048
STEP_TOKENS = 512
#: The size of the cache in tokens: for many requests, for a few long ones, and for one.
CONTEXT_TOKENS = 65536
MAX_LONG_REQUESTS, LONG_CONTEXT_TOKENS = 8, 66560
SINGLE_CONTEXT_TOKENS = 8192


class LlamaEngine:
    """Three contexts of libllama with flash attention: for many requests, a few long ones, and one.

    A unified cache is the fastest for one request. With many requests, each would also read the
    cells of all others and mask them. So there each request has its own part of the cache.
    """

    def __init__(self, model: Path, dtype: str, workspace: Path) -> None:
        self._library = ctypes.CDLL(str(workspace / "libllama_loop.so"))
        self._library.quire_llama_load.restype = ctypes.c_void_p
        load = partial(self._load, model, half_cache=dtype == "bf16")
        self._many = load(CONTEXT_TOKENS, MAX_REQUESTS)
        self._long = load(LONG_CONTEXT_TOKENS, MAX_LONG_REQUESTS)
        self._single = load(SINGLE_CONTEXT_TOKENS, 1)
        self.facts: dict[str, object] = {
            "version": (workspace / "version.txt").read_text().strip(),
            "cache": "f16" if dtype == "bf16" else "f32",
            "flash_attention": True,
            "batch_tokens": BATCH_TOKENS,
            "step_tokens": STEP_TOKENS,
        }

    def _load(
        self, path: Path, context_tokens: int, max_requests: int, *, half_cache: bool
    ) -> ctypes.c_void_p:
        handle = self._library.quire_llama_load(
            str(path).encode(),
            context_tokens,
            BATCH_TOKENS,
            STEP_TOKENS,
            max_requests,
            num_cores(),
            ctypes.c_bool(half_cache),
            ctypes.c_bool(max_requests == 1),
        )
        if not handle:
            raise RuntimeError("libllama did not load the model")
        return ctypes.c_void_p(handle)

    def _context_for(self, requests: Sequence[Request]) -> ctypes.c_void_p:
        if len(requests) == 1:
            return self._single
        longest = max(len(request.prompt) + request.num_output_tokens for request in requests)
        return self._many if longest <= CONTEXT_TOKENS // MAX_REQUESTS else self._long

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        prompts = [token for request in requests for token in request.prompt]
        lengths = [request.num_output_tokens for request in requests]
        tokens = (ctypes.c_int32 * sum(lengths))()
        seconds = (ctypes.c_double * sum(lengths))()
        error = self._library.quire_llama_run(
            self._context_for(requests),
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

    def write_logits(self, tokens: Sequence[int], to: Path) -> None:
        size = self._library.quire_llama_vocab_size(self._single)
        logits = (ctypes.c_float * (len(tokens) * size))()
        error = self._library.quire_llama_logits(
            self._single, len(tokens), (ctypes.c_int32 * len(tokens))(*tokens), logits
        )
        if error:
            raise RuntimeError(f"llama_decode failed with {error}")
        to.write_bytes(logits)


if __name__ == "__main__":
    serve(LlamaEngine)
