"""vLLM behind `engine.vllm.backend`: an LLMEngine in this process, ids in and ids out.

Its ranks, which compute and sample, may be in other processes. The scheduler is here. So it adds
the masks of constraints to the steps that it plans, and takes the sampler's reports from their
results.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import ModelRunnerOutput

from engine.constraint import TokenBitmask, why_no_token
from engine.errors import DeviceFailed
from engine.request import Request
from engine.sampling_params import SamplingParams as QuireParams
from engine.vllm.adapters import NO_ADAPTER
from engine.vllm.backend import NewToken, ScoredPrompt, StepTokens
from engine.vllm.rank import MASKS, REPORT
from engine.vllm.row import EXTRA_ARG, GuardedConstraint, Report, Row

NOTHING = StepTokens(0, 0, 0)


class LinkedScheduler(Scheduler):
    """vLLM's scheduler, linked to the samplers; it also keeps what the last step computes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.last_step = NOTHING
        #: By vLLM's id.
        self.constrained: dict[str, tuple[Request, GuardedConstraint]] = {}
        #: The most tokens of a prompt that may come from the cache, by vLLM's id, for those that
        #: are to be scored.
        self.max_cached: dict[str, int] = {}
        self.report = Report()

    def schedule(self, *args: Any, **options: Any) -> SchedulerOutput:
        """See vLLM's Scheduler."""
        planned = super().schedule(*args, **options)
        counts = planned.num_scheduled_tokens.values()
        decodes = sum(number == 1 for number in counts)
        self.last_step = StepTokens(len(counts), sum(counts) - decodes, decodes)
        if self.constrained:
            setattr(planned, MASKS, self._masks_of(planned))
        return planned

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See vLLM's Scheduler."""
        self.report = getattr(model_runner_output, REPORT, None) or Report()
        found: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        return found

    def _get_local_prefix_cache_hit(self, request: Any) -> Any:
        """See vLLM's Scheduler: the cached tokens of a request that begins, or begins again.

        A cached token has keys and values, but no logits.
        """
        most = self.max_cached.get(request.request_id)
        if most is not None and not request.num_output_tokens:
            request = _Beginning(request, most)
        return super()._get_local_prefix_cache_hit(request)

    def _masks_of(self, planned: SchedulerOutput) -> dict[str, TokenBitmask]:
        """The masks of the rows that get a token in this step, by Quire's id."""
        masks = {}
        for internal in planned.num_scheduled_tokens.keys() & self.constrained.keys():
            one, (request, constraint) = self.requests[internal], self.constrained[internal]
            if one.num_computed_tokens >= one.num_tokens:
                masks[request.request_id] = constraint.allowed(request.output_token_ids)
        return masks


class _Beginning:
    """A request of vLLM's, to the prefix cache, which leaves at least the last token to compute."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self._request = request
        self.num_tokens = num_tokens + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class VllmBackend:
    """A Backend over one LLMEngine.

    Args:
        adapters: the folders of LoRA adapters, by their names in requests. vLLM reads them now, and
            raises an error for one that it cannot serve. Under NO_ADAPTER the one for requests
            that name none, if they need one.
    """

    def __init__(self, llm: LLMEngine, *, vocab_size: int, adapters: Mapping[str, Path]) -> None:
        self._llm, self._vocab_size = llm, vocab_size
        self._adapters = {
            name: LoRARequest(name or "no adapter", number, str(folder))
            for number, (name, folder) in enumerate(sorted(adapters.items()), start=1)
        }
        for adapter in self._adapters.values():
            llm.add_lora(adapter)
        #: vLLM adds a suffix to each id.
        self._ids: dict[str, str] = {}
        scheduler = llm.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        assert isinstance(scheduler, LinkedScheduler)
        self._scheduler = scheduler

    def warm_up(self) -> None:
        """Compute two tokens. vLLM's first step takes seconds, in which no lease is renewed.

        What a prompt is scored with runs as well, so that an error in it is one of the start.
        """
        sampling = QuireParams(max_tokens=2, top_k=2, prompt_logprobs=0)
        self.add(Request("warm-up", [0, 0], sampling, arrival_time=0.0))
        self.step()
        self.step()
        self.remove(["warm-up"])

    def add(self, request: Request) -> None:
        """See `Backend`. The parameters leave every choice to the sampler, and every end to us."""
        known = [*request.prompt_token_ids, *request.output_token_ids]
        prompt: dict[str, Any] = {"prompt_token_ids": known}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        guarded = request.constraint and GuardedConstraint(
            request.constraint, vocab_size=self._vocab_size
        )
        row = Row(request, mask_bytes=guarded.mask_bytes if guarded else None)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.sampling.max_tokens - request.num_output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={EXTRA_ARG: row},
            skip_clone=True,
        )
        internal = self._llm.add_request(
            request.request_id,
            prompt,  # type: ignore[arg-type]
            params,
            arrival_time=request.arrival_time,
            lora_request=self._adapters.get(request.adapter or NO_ADAPTER),
            priority=-request.priority,
        )
        self._ids[request.request_id] = internal
        if guarded:
            self._scheduler.constrained[internal] = (request, guarded)
        if row.wants_scores:
            self._scheduler.max_cached[internal] = request.max_cached_tokens

    def remove(self, request_ids: Sequence[str]) -> None:
        """See `Backend`."""
        internal = [self._ids.pop(id_) for id_ in request_ids if id_ in self._ids]
        for one in internal:
            self._scheduler.constrained.pop(one, None)
            self._scheduler.max_cached.pop(one, None)
        self._llm.abort_request(internal, internal=True)

    def step(self) -> Sequence[NewToken]:
        """See `Backend`."""
        self._scheduler.last_step, self._scheduler.report = NOTHING, Report()
        try:
            outputs = self._llm.step()
        except Exception as error:
            raise DeviceFailed(f"vLLM failed in a step: {error!r}") from error
        told = self._scheduler.report.told
        return [
            NewToken(
                output.request_id,
                token_id,
                output.num_cached_tokens or 0,
                logprobs=told.get(output.request_id),
                failure=self._failure_of(output.request_id),
            )
            for output in outputs
            for completion in output.outputs
            for token_id in completion.token_ids
        ]

    def _failure_of(self, request_id: str) -> str | None:
        if request_id not in self._scheduler.report.broken:
            return None
        _, constraint = self._scheduler.constrained.get(self._ids[request_id], (None, None))
        return why_no_token(constraint)

    @property
    def last_step(self) -> StepTokens:
        """See `Backend`."""
        return self._scheduler.last_step

    @property
    def last_scored(self) -> Sequence[ScoredPrompt]:
        """See `Backend`."""
        if not (scores := self._scheduler.report.scores):
            return ()
        ours = {internal: request_id for request_id, internal in self._ids.items()}
        return [ScoredPrompt(ours[id_], *each) for id_, each in scores.items() if id_ in ours]

    def waiting_ids(self) -> Sequence[str]:
        """See `Backend`."""
        if not len(self._scheduler.waiting):
            return ()
        ours = {internal: request_id for request_id, internal in self._ids.items()}
        return [ours[one.request_id] for one in self._scheduler.waiting if one.request_id in ours]

    @property
    def num_free_blocks(self) -> int:
        """See `Backend`."""
        free: int = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free
