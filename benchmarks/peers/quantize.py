"""Writes a GGUF file with quantized weights, by llama.cpp itself.

Run it with `python -m benchmarks.peers.quantize WORKSPACE SOURCE OUTPUT KIND`, where WORKSPACE has
the library of `llama_loop.cpp`.
"""

import ctypes
import sys
from pathlib import Path

from benchmarks.peers.child import num_cores

#: llama.cpp's numbers of the kinds (`llama_ftype` in its llama.h).
KINDS = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K_M": 15}


def main() -> None:
    workspace, source, output, kind = sys.argv[1:]
    library = ctypes.CDLL(str(Path(workspace) / "libllama_loop.so"))
    error = library.quire_llama_quantize(source.encode(), output.encode(), KINDS[kind], num_cores())
    if error:
        sys.exit(f"llama_model_quantize failed with {error}")


if __name__ == "__main__":
    main()
