"""A rank of vLLM with Quire's sampler: masks go in before it, reports come out with its tokens.

It also computes the log-probabilities of prompts, between the forward pass and the sampler.

vLLM makes one for each part of the model, in processes of their own if there is more than one. The
ranks of a tensor-parallel group all sample, and choose the same tokens; vLLM returns the answer of
one of them. With pipeline parallelism, only the last stage samples.
"""

import os
from collections.abc import Mapping
from multiprocessing import parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any

from vllm.platforms import current_platform

from engine.vllm.config import PICTURES_KEY
from engine.vllm.pictures import use_prepared_pictures
from engine.vllm.row import Masks, Scores
from engine.vllm.sampling import RowSampler
from engine.vllm.scorer import PromptScorer, without_head_adapters

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class Rank(PlatformWorker):  # type: ignore[misc]
    """vLLM's worker of the platform."""

    def init_device(self) -> None:
        """See vLLM's worker. Here the rank first waits for those of other machines."""
        if self.parallel_config.world_size > 1 and (parent := parent_process()) is not None:
            Thread(target=_end_with, args=[parent.sentinel], daemon=True).start()
        if PICTURES_KEY in self.vllm_config.additional_config:
            use_prepared_pictures(self.model_config)
        super().init_device()

    def load_model(self, *args: Any, **options: Any) -> None:
        """See vLLM's worker."""
        super().load_model(*args, **options)
        model = self.model_runner.model
        without_head_adapters(model)
        most = self.vllm_config.scheduler_config.max_num_seqs
        self._scorer = PromptScorer(model, max_num_seqs=most)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """See vLLM's worker."""
        masks = Masks()
        if isinstance(grammar_output, Masks):
            masks, grammar_output = grammar_output, None
        sampler = self._sampler()
        if sampler is None:
            return super().sample_tokens(grammar_output)
        sampler.expect(masks)
        scores: Mapping[str, Scores] = {}
        if pieces := sampler.pieces(self.model_runner):
            scores = self._scorer.score(pieces, self.model_runner.execute_model_state.hidden_states)
        return sampler.tell(super().sample_tokens(grammar_output), scores)

    def _sampler(self) -> Any:
        """The sampler; None in a stage of a pipeline that does not sample."""
        runner = self.model_runner
        if hasattr(runner, "input_batch"):
            found = runner.input_batch.logitsprocs.non_argmax_invariant
        else:
            found = () if runner.sampler is None else runner.sampler.logits_processors
        return next((one for one in found if isinstance(one, RowSampler)), None)


def _end_with(parent: int) -> None:
    """End this process with its parent.

    vLLM would close its queues and go on waiting for a rank of another machine, which waits for it.
    """
    wait([parent])
    os._exit(1)
