"""OpenVINO GenAI's continuous batching as a child process, on an exported model."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.child import Generation, Request, drive, num_cores, serve

MAX_NUM_BATCHED_TOKENS = 256
CACHE_GIGABYTES = 2
#: Data type -> properties of the CPU plug-in.
PROPERTIES = {
    "bf16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "fp32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
}


class OpenVINOEngine:
    """A ContinuousBatchingPipeline. We call its steps, so that the time of each token is known."""

    def __init__(self, model: Path, dtype: str, _workspace: Path) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        scheduler.cache_size = CACHE_GIGABYTES
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        properties = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": num_cores(),
            **PROPERTIES[dtype if dtype == "fp32" or _has_bfloat16() else "fp32"],
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(model), scheduler, "CPU", properties
        )
        self._handles: dict[int, Any] = {}
        self.facts: dict[str, object] = {
            "version": openvino_genai.__version__,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            **properties,
        }

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        return drive(
            requests,
            add=self._add,
            has_work=self._pipeline.has_non_finished_requests,
            step=self._step,
        )

    def _add(self, index: int, request: Request) -> None:
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.num_output_tokens
        config.ignore_eos = True
        config.do_sample = False
        prompt = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        self._handles[index] = self._pipeline.add_request(index, prompt, config)

    def _step(self) -> Iterable[tuple[int, list[int]]]:
        from openvino_genai import GenerationStatus

        self._pipeline.step()
        for index, handle in list(self._handles.items()):
            if handle.can_read():
                (output,) = handle.read().values()
                yield index, list(output.generated_ids)
            elif handle.get_status() != GenerationStatus.RUNNING:
                del self._handles[index]


def _has_bfloat16() -> bool:
    """Whether the plug-in supports bfloat16. If not, it also refuses a cache in bfloat16."""
    import openvino

    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


if __name__ == "__main__":
    serve(OpenVINOEngine)
