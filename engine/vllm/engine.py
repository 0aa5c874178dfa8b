"""The engine of a worker over vLLM: add requests, step, collect outputs, as `engine.port` says.

Knows vLLM only by `engine.vllm.backend`. vLLM batches, caches and computes; the queue, the classes,
every end and the text are here, with the code that the native engine uses.

A request that is more urgent than a running one may need its slot or its blocks. Then the running
one is taken out of vLLM and waits again. Later it is passed to vLLM as a resumed request, whose
prompt is its prompt and its output so far, most of it still in the prefix cache.
"""

import math
from itertools import count

from engine.config import EngineConfig
from engine.ending import Endings, last_output, replay
from engine.errors import DuplicateRequest, RequestRejected
from engine.logprobs import Logprobs
from engine.output.stopping import finish_reason_of
from engine.port import Clock, RequestOutput
from engine.refusals import fault_of, refuse_if_never_servable
from engine.request import Activity, FinishReason, Request, RequestState, take_text
from engine.scheduling.policy import POLICIES
from engine.scheduling.preemption import may_give_way
from engine.scheduling.waiting_queue import WaitingQueue
from engine.stats import EngineSnapshot, SchedulerStats, StepKind, StepStats
from engine.vllm.backend import Backend, NewToken, ScoredPrompt


class VllmEngine:
    """A TokenEngine whose tokens are computed by a Backend."""

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        self.config = config
        self._backend = backend
        self._endings = Endings()
        self._policy = POLICIES[config.policy]
        self._sequence = count()
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        #: The requests that are in vLLM, by id.
        self._running: dict[str, Request] = {}
        #: Requests that do something else than at the last `take_activities`.
        self._moved: dict[str, Request] = {}
        self._outputs: list[RequestOutput] = []
        self._stats = SchedulerStats()
        self._steps = self._generated_tokens = 0
        self._last_step: StepStats | None = None

    def step(self, clock: Clock) -> list[RequestOutput]:
        """Compute one batch and return what it added, finished requests included.

        Aborts take effect before the batch is computed, and again before its tokens are reported.

        Raises:
            DeviceFailed: vLLM failed; the process must end; nothing of the step was reported.
        """
        self._end_due(clock())
        self._admit(clock())
        if self._running:
            began = clock()
            tokens = self._backend.step()
            now = clock()
            self._note_step(now - began)
            self._end_due(now)
            for scored in self._backend.last_scored:
                self._take_scores(scored, now)
            for token in tokens:
                self._take(token, now)
        outputs, self._outputs = self._outputs, []
        if self.config.check_invariants:
            assert not (broken := self.violations()), broken
        return outputs

    def add_request(self, request: Request) -> None:
        """Queue a request, or reject it; see `engine.engine.Engine.add_request`.

        Raises:
            RequestRejected: it can never be served; the field and the reason are named.
            DuplicateRequest: a request with this id is alive in this engine.
        """
        if request.request_id in self._requests:
            raise DuplicateRequest(request.request_id)
        refuse_if_never_servable(request, self.config)
        num_tokens, model_len = request.num_prompt_tokens, self.config.max_model_len
        if num_tokens >= model_len:
            # vLLM samples a token behind every prompt, also where nobody wants it.
            message = f"{num_tokens} tokens leave no room in a model length of {model_len}"
            raise RequestRejected("prompt", message)
        reason = None if request.pooling is not None else replay(request, self.config)
        request.standing = self._policy(request, self.config)
        request.rank = (request.arrival_time + request.standing, next(self._sequence))
        self._requests[request.request_id] = request
        self._waiting.push(request)
        self._endings.watch(request, alive=self._requests)
        if reason is not None:
            self._finish(request, reason, now=request.arrival_time)

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        *,
        error: str | None = None,
    ) -> None:
        """End a request early, whatever its state; callable from any thread, at any time."""
        self._endings.abort(request_id, reason, error)

    def has_work(self) -> bool:
        """Whether a `step()` now would do anything."""
        return bool(self._requests or self._endings.has_aborts or self._outputs)

    def alive_request_ids(self) -> list[str]:
        """Ids of all requests that are not finished."""
        return list(self._requests)

    def take_activities(self) -> dict[str, Activity]:
        """See `engine.port`; empty in most steps."""
        moved, self._moved = self._moved, {}
        return {
            request_id: request.activity
            for request_id, request in moved.items()
            if not request.is_finished
        }

    def violations(self) -> list[str]:
        """What does not hold now of the requests and of vLLM's blocks."""
        running = {id_ for id_, one in self._requests.items() if one.state is RequestState.RUNNING}
        broken = []
        if running != self._running.keys():
            broken.append(f"running are {sorted(running)}, in vLLM are {sorted(self._running)}")
        if len(self._waiting) + len(running) != len(self._requests):
            broken.append(f"{len(self._requests)} requests, {len(self._waiting)} of them wait")
        free, total = self._backend.num_free_blocks, self.config.num_blocks
        if not self._requests and free != total:
            broken.append(f"no request is left, and {total - free} blocks are owned")
        return broken

    def snapshot(self) -> EngineSnapshot:
        """One consistent reading. What vLLM does not say is 0: blocks with cached tokens only."""
        free, stats = self._backend.num_free_blocks, self._stats
        return EngineSnapshot(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            num_waiting=len(self._waiting) - self._waiting.num_preempted,
            num_running=len(self._running),
            num_preempted=self._waiting.num_preempted,
            num_blocks=self.config.num_blocks,
            num_blank_blocks=free,
            num_cached_blocks=0,
            num_owned_blocks=self.config.num_blocks - free,
            num_promised_blocks=0,
            num_host_blocks=0,
            num_owned_host_blocks=0,
            num_swapped=0,
            preemptions_recompute=stats.preemptions_recompute,
            preemptions_swap=0,
            preempted_tokens=stats.preempted_tokens,
            prompt_tokens=stats.prompt_tokens,
            cached_prompt_tokens=stats.cached_prompt_tokens,
            accepted_draft_tokens=0,
            rejected_draft_tokens=0,
            generated_tokens=self._generated_tokens,
            prefill_tokens=stats.prefill_tokens,
            decode_tokens=stats.decode_tokens,
            drafted_tokens=0,
            steps=self._steps,
            failed_steps=0,
            last_step=self._last_step,
        )

    # -- admission --------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """Pass waiting requests to vLLM, the best first, while it has slots and blocks for them."""
        lacking = self._lacking_blocks()
        if lacking is not None:
            # One victim per step: its blocks may be enough.
            self._give_way_to(lacking, now)
        while (waiting := self._waiting.peek()) is not None:
            if len(self._running) >= self.config.max_num_seqs or lacking is not None:
                if lacking is not None and lacking.priority >= waiting.priority:
                    return
                if not self._give_way_to(waiting, now):
                    return
            self._waiting.pop()
            self._start(waiting, now)

    def _lacking_blocks(self) -> Request | None:
        """The request that comes next in vLLM, if it waits there because blocks are short."""
        free = self._backend.num_free_blocks
        for request_id in self._backend.waiting_ids():
            request = self._requests.get(request_id)
            if request is not None:
                needed = math.ceil(request.num_tokens / self.config.block_size)
                return request if needed > free else None
        return None

    def _give_way_to(self, urgent: Request, now: float) -> bool:
        """Preempt the running request that stands worst, if its class is lower than `urgent`'s."""
        worse = [
            one
            for one in self._running.values()
            if one.priority < urgent.priority
            and one.standing > urgent.standing
            and may_give_way(one)
        ]
        if not worse:
            return False
        victim = max(worse, key=lambda request: request.order)
        self._backend.remove([victim.request_id])
        del self._running[victim.request_id]
        self._stats.preemptions_recompute += 1
        self._stats.preempted_tokens += max(0, victim.num_tokens - 1)
        victim.num_preemptions += 1
        victim.times.preempted_at = now
        victim.num_pending_tokens = victim.num_tokens
        victim.transition(RequestState.PREEMPTED)
        self._moved[victim.request_id] = victim
        self._waiting.push(victim)
        return True

    def _start(self, request: Request, now: float) -> None:
        self._backend.add(request)
        self._running[request.request_id] = request
        request.times.end_preemption(now)
        request.transition(RequestState.RUNNING)
        self._moved[request.request_id] = request
        request.num_tokens_at_admission = request.num_tokens
        if request.times.first_scheduled is None:
            request.times.first_scheduled = now
            self._stats.prompt_tokens += request.num_prompt_tokens

    # -- progress ---------------------------------------------------------------------------------

    def _take_scores(self, new: ScoredPrompt, now: float) -> None:
        """Keep log-probabilities of a prompt, until its first token is reported."""
        request = self._running.get(new.request_id)
        if request is None:
            return
        if new.failure is not None:
            self._finish(request, FinishReason.ERROR, now=now, error=new.failure)
            return
        scored = range(new.first, new.first + len(new.logprobs))
        request.take_prompt_logprobs(scored, new.logprobs)

    def _take(self, new: NewToken, now: float) -> None:
        """Append the new token of a request, unless the request has just ended."""
        request = self._running.get(new.request_id)
        if request is None:
            return
        if request.times.first_token is None:
            request.num_cached_tokens = min(new.num_cached_tokens, request.num_prompt_tokens)
            self._stats.cached_prompt_tokens += request.num_cached_tokens
        if new.failure is not None:
            self._fail(request, new.failure, now=now)
            return
        if request.pooling is not None:
            self._pool(request, now)
            return
        start = request.num_output_tokens
        said = () if start else self._told_of_prompt(request)
        if request.num_pending_tokens > 1:
            self._moved[request.request_id] = request
        request.expect_token()
        request.append_token(new.token_id)
        request.num_computed_tokens = request.num_tokens - 1
        if request.times.first_token is None:
            request.times.first_token = now
        self._generated_tokens += 1
        stops = request.text is not None and request.text.append(new.token_id)
        reason = finish_reason_of(request, self.config, stop_string_found=stops)
        if reason is not None:
            self._leave(request, reason, now=now)
        text = take_text(request, final=reason is not None)
        told: tuple[Logprobs, ...] = () if new.logprobs is None else (new.logprobs,)
        self._outputs.append(
            RequestOutput(request, start, (new.token_id,), text, reason, None, told, said)
        )

    def _pool(self, request: Request, now: float) -> None:
        """End a request that wants the log-probabilities of its prompt, and no token."""
        self._told_of_prompt(request)
        request.vector, request.times.first_token = request.likelihoods(), now
        self._finish(request, FinishReason.POOLED, now=now)

    def _told_of_prompt(self, request: Request) -> tuple[Logprobs, ...]:
        """What the first token brings of the prompt, if the request asks; else nothing."""
        wanted = request.num_scored(0, request.num_prompt_tokens)
        assert len(request.prompt_logprobs) == wanted, "the prompt was computed in part"
        return tuple(request.prompt_logprobs)

    def _fail(self, request: Request, error: str, *, now: float) -> None:
        """End a request whose row has failed: refused where its own fields left no token."""
        fault = fault_of(request, self.config)
        if fault is None:
            self._finish(request, FinishReason.ERROR, now=now, error=error)
        else:
            request.faulty_field = fault.field
            self._finish(request, FinishReason.REFUSED, now=now, error=fault.message)

    def _end_due(self, now: float) -> None:
        for request, reason, error in self._endings.due(now, alive=self._requests):
            self._finish(request, reason, now=now, error=error)

    def _finish(
        self, request: Request, reason: FinishReason, *, now: float, error: str | None = None
    ) -> None:
        """End a request without a token, and report it."""
        self._leave(request, reason, now=now, error=error)
        self._outputs.append(last_output(request, reason, error=error))

    def _leave(
        self, request: Request, reason: FinishReason, *, now: float, error: str | None = None
    ) -> None:
        """End a request, whatever its state, and free its blocks."""
        if self._running.pop(request.request_id, None) is not None:
            self._backend.remove([request.request_id])
            request.transition(RequestState.FINISHED)
        else:
            request.times.end_preemption(now)
            request.transition(RequestState.FINISHED)
            self._waiting.mark_dead(request)
        request.finish_reason, request.error = reason, error
        request.times.finished = now
        del self._requests[request.request_id]

    def _note_step(self, seconds: float) -> None:
        done = self._backend.last_step
        if not done.num_rows:
            return
        kind: StepKind = "decode" if not done.num_prefill_tokens else "mixed"
        if not done.num_decode_tokens:
            kind = "prefill"
        self._steps += 1
        self._last_step = StepStats(
            kind=kind,
            num_rows=done.num_rows,
            num_tokens=done.num_prefill_tokens + done.num_decode_tokens,
            num_prefill_tokens=done.num_prefill_tokens,
            num_decode_tokens=done.num_decode_tokens,
            seconds=seconds,
        )
        self._stats.note_step(self._last_step)
