"""vLLM behind `engine.vllm.backend`: an LLMEngine in this process, ids in and ids out.

Its ranks, which compute and sample, may be in other processes. The scheduler is here. So it gives
the masks of constraints to the steps before they sample, and takes the sampler's reports from their
results.

With vLLM's asynchronous scheduling, a step is planned and launched while the one before is in
flight. Where a mask needs a token in flight, sampling waits for it, and the forward pass does not.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
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
from engine.vllm.pictures import input_with_pictures
from engine.vllm.row import EXTRA_ARG, GuardedConstraint, Masks, Report, Row
from engine.vllm.sampling import REPORT

NOTHING = StepTokens(0, 0, 0)


class _Linked:
    """What links a scheduler of vLLM's to the samplers; it also keeps what the last step computes.

    A class of vLLM's follows in the order of bases.
    """

    requests: dict[str, Any]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.last_step = NOTHING
        #: By vLLM's id.
        self.constrained: dict[str, ConstrainedRequest] = {}
        #: The most tokens of a prompt that may come from the cache, by vLLM's id, for those that
        #: are to be scored.
        self.max_cached: dict[str, int] = {}
        self.report = Report()

    def schedule(self, *args: Any, **options: Any) -> SchedulerOutput:
        """See vLLM's Scheduler."""
        planned = super().schedule(*args, **options)  # type: ignore[misc]
        counts = planned.num_scheduled_tokens.values()
        decodes = sum(number == 1 for number in counts)
        self.last_step = StepTokens(len(counts), sum(counts) - decodes, decodes)
        if any(
            self.requests[internal].num_output_placeholders > 1
            for internal in planned.num_scheduled_tokens.keys() & self.constrained.keys()
        ):
            planned.pending_structured_output_tokens = True
        return planned

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Masks | None:
        """The masks of the rows that get a token in this step; None if no row has one.

        vLLM calls it when all earlier tokens of these requests are known.
        """
        masks = Masks()
        for internal in scheduler_output.num_scheduled_tokens.keys() & self.constrained.keys():
            one = self.requests.get(internal)
            if one is not None and one.num_computed_tokens >= one.num_tokens:
                constrained = self.constrained[internal]
                masks[constrained.request_id] = constrained.mask(one.output_token_ids)
        return masks or None

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See vLLM's Scheduler."""
        self.report = getattr(model_runner_output, REPORT, None) or Report()
        found: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
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
        return super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]


class LinkedScheduler(_Linked, Scheduler):
    """Plans a step when the one before it has ended."""


class LinkedAsyncScheduler(_Linked, AsyncScheduler):
    """Plans a step while one is in flight."""


class ConstrainedRequest:
    """A request with a constraint; its tokens are those that vLLM knows."""

    def __init__(self, request: Request, constraint: GuardedConstraint) -> None:
        self.request_id, self.constraint = request.request_id, constraint
        self._output = list(request.output_token_ids)
        self._num_before = len(self._output)

    def mask(self, generated: Sequence[int]) -> TokenBitmask:
        """The tokens that may follow what vLLM has generated."""
        self._output += generated[len(self._output) - self._num_before :]
        return self.constraint.allowed(self._output)


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
        #: The requests that are in vLLM, and the ids of the misled ones; see `Report`.
        self._requests: dict[str, Request] = {}
        self._misled: list[str] = []
        self._scheduler: Any = llm.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        assert isinstance(self._scheduler, _Linked)

    def warm_up(self) -> None:
        """Compute two tokens. vLLM's first step takes seconds, in which no lease is renewed.

        What a prompt is scored with runs as well, so that an error in it is one of the start.
        """
        sampling = QuireParams(max_tokens=2, top_k=2, prompt_logprobs=0)
        self.add(Request("warm-up", [0, 0], sampling, arrival_time=0.0))
        num_tokens = 0
        while num_tokens < sampling.max_tokens:
            num_tokens += len(self.step())
        self.remove(["warm-up"])

    def add(self, request: Request) -> None:
        """See `Backend`. The parameters leave every choice to the sampler, and every end to us."""
        prompt = self._prompt_of(request)
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
            prompt,
            params,
            arrival_time=request.arrival_time,
            lora_request=self._adapters.get(request.adapter or NO_ADAPTER),
            priority=-request.priority,
        )
        self._ids[request.request_id] = internal
        self._requests[request.request_id] = request
        if guarded:
            self._scheduler.constrained[internal] = ConstrainedRequest(request, guarded)
        if row.wants_scores:
            self._scheduler.max_cached[internal] = request.max_cached_tokens

    def _prompt_of(self, request: Request) -> Any:
        """What vLLM takes for the prompt: the tokens that exist, and the pictures in them."""
        known = [*request.prompt_token_ids, *request.output_token_ids]
        if request.pictures:
            config = self._llm.model_config
            placeholder = int(config.hf_config.image_token_id)
            return input_with_pictures(request, known, placeholder=placeholder, dtype=config.dtype)
        prompt: dict[str, Any] = {"prompt_token_ids": known}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        return prompt

    def remove(self, request_ids: Sequence[str]) -> None:
        """See `Backend`."""
        request_ids = [id_ for id_ in request_ids if id_ in self._ids]
        internal = [self._ids.pop(id_) for id_ in request_ids]
        for id_ in request_ids:
            del self._requests[id_]
        for one in internal:
            self._scheduler.constrained.pop(one, None)
            self._scheduler.max_cached.pop(one, None)
        self._llm.abort_request(internal, internal=True)

    def step(self) -> Sequence[NewToken]:
        """See `Backend`. A misled request begins anew behind the token that it has got."""
        for request in [self._requests[id_] for id_ in self._misled if id_ in self._requests]:
            self.remove([request.request_id])
            self.add(request)
        self._scheduler.last_step, self._scheduler.report = NOTHING, Report()
        try:
            outputs = self._llm.step()
        except Exception as error:
            raise DeviceFailed(f"vLLM failed in a step: {error!r}") from error
        misled, told = self._scheduler.report.misled, self._scheduler.report.told
        self._misled = [id_ for id_, one in self._ids.items() if one in misled] if misled else []
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
        constrained = self._scheduler.constrained.get(self._ids[request_id])
        return why_no_token(constrained.constraint if constrained else None)

    @property
    def last_step(self) -> StepTokens:
        """See `Backend`."""
        last: StepTokens = self._scheduler.last_step
        return last

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
