"""Runners of models that make vectors: a decoder over its paged cache, and an encoder without one.

Know only rows, no requests. Both wait for the device in `launch`.
"""

from collections.abc import Callable

import torch

from engine.batch import Batch, ComputedStep, LaunchedStep, StepResult
from engine.errors import DeviceFailed
from engine.model.device.device_errors import is_device_failure
from engine.model.device.step_threads import StepThreads
from engine.model.pooling.encoder import Prompts
from engine.model.pooling.finishing import Finish
from engine.model.run.model_runner import ModelRunner


class DecoderPooler:
    """A decoder whose head makes the numbers of a vector from the state of the last token.

    Prompts are computed in chunks, and share their beginnings in the prefix cache.
    """

    def __init__(self, runner: ModelRunner, finish: Finish) -> None:
        self._runner = runner
        self._finish = finish

    def launch(self, batch: Batch, *, after: LaunchedStep | None = None) -> LaunchedStep:
        """See `engine.batch.ModelRunner`."""
        assert after is None and not len(batch.decodes)
        if not batch.num_rows:
            return self._runner.launch(batch)
        numbers = self._runner.hidden(batch)
        rows = [row for row in batch.catch_up_rows if row.samples]
        return ComputedStep(self._finish.result(rows, numbers))


class EncoderPooler:
    """An encoder: every row is a whole prompt, and nothing is kept after the step.

    Args:
        read: the numbers [prompts, width] of the prompts, in the order in which they were given.
    """

    def __init__(
        self,
        read: Callable[[Prompts], torch.Tensor],
        finish: Finish,
        *,
        device: torch.device,
        threads: StepThreads | None,
    ) -> None:
        self._read = read
        self._finish = finish
        self._device = device
        self._threads = threads

    @torch.inference_mode()
    def launch(self, batch: Batch, *, after: LaunchedStep | None = None) -> LaunchedStep:
        """See `engine.batch.ModelRunner`."""
        assert after is None and not len(batch.decodes)
        rows = batch.catch_up_rows
        if not rows:
            return ComputedStep(StepResult())
        assert all(row.samples and row.start == 0 for row in rows), "a prompt is computed whole"
        seconds = [row.pooling.second_from if row.pooling else None for row in rows]
        try:
            numbers = self._read(Prompts([row.token_ids for row in rows], seconds))
            result = self._finish.result(rows, numbers)
        except Exception as error:
            if is_device_failure(error):
                raise DeviceFailed(f"the device failed in step {batch.step}: {error}") from error
            raise
        if self._threads is not None:
            self._threads.adjust()
        return ComputedStep(result)

    def device_memory(self) -> dict[str, int]:
        """Bytes of device memory by kind; empty on a CPU."""
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        return {"allocated": allocated, "reserved": total - free, "total": total}

    def num_threads(self) -> int:
        """Number of threads for the next step on a CPU; 0 if the number is not adjusted."""
        return 0 if self._threads is None else self._threads.count
