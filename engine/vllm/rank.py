"""A rank of vLLM with Quire's sampler: masks go in with a step, reports come out with its tokens.

It also computes the log-probabilities of prompts, between the forward pass and the sampler.

vLLM makes one for each part of the model, in processes of their own if there is more than one. The
ranks of a tensor-parallel group all sample, and choose the same tokens; vLLM returns the answer of
one of them. With pipeline parallelism, only the last stage samples.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from engine.vllm.processor import QuireSampler
from engine.vllm.row import Report, Scores
from engine.vllm.scorer import PromptScorer, without_head_adapters

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

#: The attribute of vLLM's SchedulerOutput with the masks of constraints, by request id.
MASKS = "quire_masks"
#: The attribute of vLLM's ModelRunnerOutput with the Report of the sampler.
REPORT = "quire_report"


class Rank(PlatformWorker):  # type: ignore[misc]
    """vLLM's worker of the platform."""

    def load_model(self, *args: Any, **options: Any) -> None:
        """See vLLM's worker."""
        super().load_model(*args, **options)
        without_head_adapters(self.model_runner.model)
        most = self.vllm_config.scheduler_config.max_num_seqs
        self._scorer = PromptScorer(self.model_runner, max_num_seqs=most)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """See vLLM's worker."""
        for sampler in self._samplers():
            sampler.expect(getattr(scheduler_output, MASKS, {}))
        return self._reporting(super().execute_model(scheduler_output))

    def sample_tokens(self, grammar_output: Any) -> Any:
        """See vLLM's worker."""
        scores: Mapping[str, Scores] = {}
        for sampler in self._samplers():
            scores = self._scorer.score(sampler.scoring_rows())
        return self._reporting(super().sample_tokens(grammar_output), scores)

    def _samplers(self) -> list[QuireSampler]:
        processors = self.model_runner.input_batch.logitsprocs.non_argmax_invariant
        return [one for one in processors if isinstance(one, QuireSampler)]

    def _reporting(self, output: Any, scores: Mapping[str, Scores] | None = None) -> Any:
        if isinstance(output, ModelRunnerOutput):
            for sampler in self._samplers():
                report = sampler.take_report()
                if scores:
                    report = replace(report or Report(), scores=scores)
                if report is not None:
                    setattr(output, REPORT, report)
        return output
