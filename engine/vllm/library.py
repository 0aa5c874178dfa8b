"""vLLM behind `engine.vllm.backend`: an LLMEngine in this process, ids in and ids out.

With one process, the Row of a request is the same object here and in the sampler. So a failure of
a row is seen here, and a compiled constraint can be used there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine

from engine.errors import DeviceFailed
from engine.request import Request
from engine.sampling_params import SamplingParams as QuireParams
from engine.vllm.adapters import NO_ADAPTER
from engine.vllm.backend import NewToken, StepTokens
from engine.vllm.row import EXTRA_ARG, Row

NOTHING = StepTokens(0, 0, 0)


class CountingScheduler(Scheduler):
    """vLLM's scheduler, which also keeps what the last step computes."""

    last_step = NOTHING

    def schedule(self, *args: Any, **options: Any) -> SchedulerOutput:
        """See vLLM's Scheduler."""
        planned = super().schedule(*args, **options)
        counts = planned.num_scheduled_tokens.values()
        decodes = sum(number == 1 for number in counts)
        self.last_step = StepTokens(len(counts), sum(counts) - decodes, decodes)
        return planned


class VllmBackend:
    """A Backend over one LLMEngine.

    Args:
        adapters: the folders of LoRA adapters, by their names in requests. vLLM reads them now, and
            raises an error for one that it cannot serve. Under NO_ADAPTER the one for requests
            that name none, if they need one.
    """

    def __init__(self, llm: LLMEngine, *, adapters: Mapping[str, Path]) -> None:
        self._llm = llm
        self._adapters = {
            name: LoRARequest(name or "no adapter", number, str(folder))
            for number, (name, folder) in enumerate(sorted(adapters.items()), start=1)
        }
        for adapter in self._adapters.values():
            llm.add_lora(adapter)
        #: vLLM adds a suffix to each id.
        self._ids: dict[str, str] = {}
        #: Of the requests that want log-probabilities: the sampler leaves them there.
        self._telling: dict[str, Row] = {}
        scheduler = llm.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        assert isinstance(scheduler, CountingScheduler)
        self._scheduler = scheduler

    def warm_up(self) -> None:
        """Compute two tokens. vLLM's first step takes seconds, in which no lease is renewed."""
        sampling = QuireParams(max_tokens=2, top_k=2)
        request = Request("warm-up", [0], sampling, arrival_time=0.0)
        self.add(request, Row(request, None))
        self.step()
        self.step()
        self.remove(["warm-up"])

    def add(self, request: Request, row: Row) -> None:
        """See `Backend`. The parameters leave every choice to the sampler, and every end to us."""
        known = [*request.prompt_token_ids, *request.output_token_ids]
        prompt: dict[str, Any] = {"prompt_token_ids": known}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.sampling.max_tokens - request.num_output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={EXTRA_ARG: row},
            # A copy of the Row would have a constraint and a failure of its own.
            skip_clone=True,
        )
        if request.sampling.logprobs is not None:
            self._telling[request.request_id] = row
        self._ids[request.request_id] = self._llm.add_request(
            request.request_id,
            prompt,  # type: ignore[arg-type]
            params,
            arrival_time=request.arrival_time,
            lora_request=self._adapters.get(request.adapter or NO_ADAPTER),
            priority=-request.priority,
        )

    def remove(self, request_ids: Sequence[str]) -> None:
        """See `Backend`."""
        for request_id in request_ids:
            self._telling.pop(request_id, None)
        internal = [self._ids.pop(id_) for id_ in request_ids if id_ in self._ids]
        self._llm.abort_request(internal, internal=True)

    def step(self) -> Sequence[NewToken]:
        """See `Backend`."""
        self._scheduler.last_step = NOTHING
        try:
            outputs = self._llm.step()
        except Exception as error:
            raise DeviceFailed(f"vLLM failed in a step: {error!r}") from error
        telling = self._telling
        return [
            NewToken(
                output.request_id,
                token_id,
                output.num_cached_tokens or 0,
                telling[output.request_id].told if output.request_id in telling else None,
            )
            for output in outputs
            for completion in output.outputs
            for token_id in completion.token_ids
        ]

    @property
    def last_step(self) -> StepTokens:
        """See `Backend`."""
        return self._scheduler.last_step

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
