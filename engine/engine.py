"""The engine on one page: token ids in, token ids out, one `step()` at a time.

Knows no Redis, no thread but its caller's, no clock (it is an argument) and no device (the
ModelRunner is passed in). Everything but `abort` belongs to a single thread.

    add_request ──▶ [ waiting ] ──schedule──▶ Batch ──launch──▶ tokens ──apply──▶ RequestOutputs

On a device that runs asynchronously, a GPU, the next step is planned and launched while one is in
flight, so that the device never waits for this thread.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from engine.batch import (
    UNKNOWN_TOKEN,
    Batch,
    ComputedStep,
    LaunchedStep,
    Runner,
    StepResult,
    Vector,
)
from engine.config import EngineConfig
from engine.ending import Endings, last_output, replay
from engine.errors import DeviceFailed, DuplicateRequest
from engine.invariants import violations
from engine.logprobs import Logprobs
from engine.port import Clock, RequestOutput
from engine.refusals import fault_of, refuse_if_never_servable
from engine.request import Activity, FinishReason, Progress, Request, Run, take_text
from engine.scheduling.scheduler import Scheduler
from engine.stats import EngineSnapshot, StepKind, StepStats

logger = logging.getLogger(__name__)


class Launched(NamedTuple):
    """A step that was handed to the device: its plan, its handle, and the time of the launch."""

    batch: Batch
    step: LaunchedStep
    time: float


class Engine:
    """Continuous batching over a paged KV cache: add requests, step, collect outputs."""

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self.config = config
        self._runner = runner
        self._scheduler = Scheduler(config)
        self._endings = Endings()
        self._outputs: list[RequestOutput] = []
        #: Requests whose `prompt_logprobs` are still to be reported.
        self._unreported: set[str] = set()
        self._next: Launched | None = None
        self._last_result_time = 0.0
        self._generated_tokens = 0
        self._steps = 0
        self._failed_steps = 0
        self._last_failure = ""
        self._last_step: StepStats | None = None

    def step(self, clock: Clock) -> list[RequestOutput]:
        """Compute one batch and return what it added, finished requests included.

        Aborts take effect before a step is planned, and again between the forward pass and its
        results, so that nothing is reported for a request after it was aborted.

        Raises:
            DeviceFailed: the process must end; nothing of the failed step was reported.
        """
        self._apply_aborts(clock())
        launched = self._next or self._launch(clock)
        self._next = self._launch_ahead(launched, clock)
        result = self._wait_for(launched, clock)
        self._apply_aborts(clock())
        progress = self._scheduler.apply(launched.batch, result, now=clock())
        self._emit(progress, result.logprobs)
        if not self._scheduler.requests:
            # The step in flight has no request left. Kept until the next one arrives, it would be
            # measured as having run that long, and would keep its finished requests in memory.
            self._next = None
        if self.config.check_invariants:
            assert not (broken := self.violations()), broken
        outputs, self._outputs = self._outputs, []
        return outputs if not self._unreported else self._with_prompt_logprobs(outputs)

    def add_request(self, request: Request) -> None:
        """Queue a request, or reject it.

        One that arrives with published tokens may be complete already: its worker may have died
        between the last token and the terminal record. So may one whose constraint allows only an
        empty output. Then the next `step()` reports its end, without a token.

        Raises:
            RequestRejected: it can never be served; the field and the reason are named.
            DuplicateRequest: a request with this id is alive in this engine.
        """
        if request.request_id in self._scheduler.requests:
            raise DuplicateRequest(request.request_id)
        refuse_if_never_servable(request, self.config)
        reason = None if request.pooling is not None else replay(request, self.config)
        self._scheduler.add(request)
        self._endings.watch(request, alive=self._scheduler.requests)
        if request.sampling.prompt_logprobs is not None and not request.output_token_ids:
            self._unreported.add(request.request_id)
        if reason is not None:
            self._finish(request, reason, now=request.arrival_time)

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        *,
        error: str | None = None,
    ) -> None:
        """End a request early, whatever its state; callable from any thread, at any time.

        The next `step()` returns its last output. Unknown and finished ids are ignored: the abort
        may have crossed the end of the generation.
        """
        self._endings.abort(request_id, reason, error)

    def has_work(self) -> bool:
        """Whether a `step()` now would do anything."""
        return bool(self._scheduler.requests or self._endings.has_aborts or self._outputs)

    def alive_request_ids(self) -> list[str]:
        """Ids of all requests that are not finished."""
        return list(self._scheduler.requests)

    def take_activities(self) -> dict[str, Activity]:
        """See `engine.port`; empty in most steps."""
        moved = self._scheduler.running.take_moved()
        return {request_id: request.activity for request_id, request in moved.items()}

    def violations(self) -> list[str]:
        """The invariants of `engine.invariants` that do not hold now."""
        return violations(self._scheduler)

    def snapshot(self) -> EngineSnapshot:
        """One consistent reading of queues, block pools and counters."""
        scheduler, cache, stats = self._scheduler, self._scheduler.kv_cache, self._scheduler.stats
        return EngineSnapshot(
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            num_waiting=scheduler.num_waiting,
            num_running=len(scheduler.running),
            num_preempted=scheduler.num_preempted,
            num_blocks=cache.pool.num_blocks,
            num_blank_blocks=cache.pool.num_blank,
            num_cached_blocks=cache.pool.num_cached,
            num_owned_blocks=cache.pool.num_owned,
            num_promised_blocks=cache.num_promised,
            num_host_blocks=cache.host_pool.num_blocks,
            num_owned_host_blocks=cache.host_pool.num_owned,
            num_swapped=cache.num_swapped,
            preemptions_recompute=stats.preemptions_recompute,
            preemptions_swap=stats.preemptions_swap,
            preempted_tokens=stats.preempted_tokens,
            prompt_tokens=stats.prompt_tokens,
            cached_prompt_tokens=stats.cached_prompt_tokens,
            accepted_draft_tokens=stats.accepted_draft_tokens,
            rejected_draft_tokens=stats.rejected_draft_tokens,
            generated_tokens=self._generated_tokens,
            prefill_tokens=stats.prefill_tokens,
            decode_tokens=stats.decode_tokens,
            drafted_tokens=stats.drafted_tokens,
            steps=self._steps,
            failed_steps=self._failed_steps,
            last_step=self._last_step,
        )

    # -- running a batch --------------------------------------------------------------------------

    def _launch(self, clock: Clock) -> Launched:
        """Plan and launch a step with all tokens known; if it raises, find out which row does."""
        batch = self._scheduler.schedule(now=clock())
        time = clock()
        if batch.is_empty:
            return Launched(batch, ComputedStep(StepResult()), time)
        try:
            step = self._runner.launch(batch)
        except DeviceFailed:
            raise
        except Exception as error:  # noqa: BLE001 - it must cost one request, and not all.
            self._note_failure(error)
            step = ComputedStep(self._run_one_by_one(batch))
        return Launched(batch, step, time)

    def _launch_ahead(self, current: Launched, clock: Clock) -> Launched | None:
        """Plan and launch the step after the current one, whose tokens it takes on the device.

        None where that is not possible: the step is then planned once all tokens are known.
        """
        if not current.step.is_in_flight or self._scheduler.needs_tokens_of(current.batch):
            return None
        batch = self._scheduler.schedule(now=clock(), after=current.batch)
        if batch.is_empty:
            return None
        time = clock()
        try:
            return Launched(batch, self._runner.launch(batch, after=current.step), time)
        except DeviceFailed:
            raise
        except Exception as error:  # noqa: BLE001 - planned again, it goes through `_launch`.
            self._note_failure(error)
            return None

    def _note_failure(self, error: Exception) -> None:
        """Count a step that raised, and log why: its rows may not raise again one by one."""
        self._failed_steps += 1
        if repr(error) != self._last_failure:
            self._last_failure = repr(error)
            logger.warning("a step failed, and is computed in another way: %r", error)

    def _wait_for(self, launched: Launched, clock: Clock) -> StepResult:
        """The result of a step; ends the requests whose rows have failed in it."""
        batch, result = launched.batch, launched.step.result()
        if not batch.is_empty:
            # A step that was launched ahead began when the one before it ended.
            now, began = clock(), max(launched.time, self._last_result_time)
            self._last_result_time = now
            self._steps += 1
            self._last_step = stats_of_step(batch, now - began)
            self._scheduler.note_step(self._last_step)
        for request in batch.requests if result.failures else ():
            error = result.failures.get(request.request_id)
            if error is not None and not request.is_finished:
                self._fail(request, error, now=clock())
        return result

    def _fail(self, request: Request, error: str, *, now: float) -> None:
        """End a request whose row has failed: refused where its own fields left no token."""
        fault = fault_of(request, self.config)
        if fault is None:
            self._finish(request, FinishReason.ERROR, now=now, error=error)
        else:
            reason = FinishReason.REFUSED
            self._finish(request, reason, now=now, error=fault.message, faulty_field=fault.field)

    def _run_one_by_one(self, batch: Batch) -> StepResult:
        """Run each row alone, to tell those that fail; the runner has already done the swaps."""
        token_ids: dict[str, int] = {}
        failures: dict[str, str] = {}
        logprobs: dict[str, Sequence[Logprobs]] = {}
        runs: dict[str, Sequence[int]] = {}
        vectors: dict[str, Vector] = {}
        prompt_logprobs: dict[str, Sequence[Logprobs]] = {}
        raised: dict[str, Exception] = {}
        for row in batch.rows:
            try:
                result = self._runner.launch(Batch(batch.step, catch_up_rows=(row,))).result()
            except DeviceFailed:
                raise
            except Exception as error:  # noqa: BLE001 - as in `_launch`.
                raised[row.request_id] = error
            else:
                token_ids |= result.token_ids
                failures |= result.failures
                logprobs |= result.logprobs
                runs |= result.runs
                vectors |= result.vectors
                prompt_logprobs |= result.prompt_logprobs
        if raised and len(raised) + len(failures) == batch.num_rows > 1:
            raise DeviceFailed("every row of a step failed alone") from next(iter(raised.values()))
        failures |= {request_id: repr(error) for request_id, error in raised.items()}
        decodes = [request.request_id for request in batch.decodes.requests]
        decoded = [token_ids.pop(request_id, UNKNOWN_TOKEN) for request_id in decodes]
        return StepResult(decoded, token_ids, failures, logprobs, runs, vectors, prompt_logprobs)

    # -- reporting --------------------------------------------------------------------------------

    def _emit(self, progress: Progress, logprobs: Mapping[str, Sequence[Logprobs]]) -> None:
        """Report the tokens that `apply` has just appended, with the text that became final."""
        self._generated_tokens += len(progress.requests)
        new = tuple.__new__  # The constructor of a NamedTuple takes twice as long.
        outputs = [
            new(
                RequestOutput,
                (
                    request,
                    start,
                    (token_id,),
                    "" if request.text is None else take_text(request, final=request.is_finished),
                    request.finish_reason,
                    None,
                    (),
                    (),
                ),
            )
            for request, start, token_id in zip(
                progress.requests, progress.starts, progress.token_ids, strict=True
            )
        ]
        if logprobs:
            outputs = [_with_logprobs(output, logprobs) for output in outputs]
        self._outputs += outputs
        self._outputs += [last_output(one, FinishReason.POOLED) for one in progress.pooled]
        for run in progress.runs:
            self._generated_tokens += len(run.token_ids)
            self._outputs += outputs_of(run, logprobs.get(run.request.request_id, ()))

    def _with_prompt_logprobs(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs; that with a request's first token has what was asked of its prompt."""
        for index, output in enumerate(outputs):
            if output.request_id in self._unreported:
                self._unreported.discard(output.request_id)
                if output.token_ids:
                    told = tuple(output.request.prompt_logprobs)
                    outputs[index] = output._replace(prompt_logprobs=told)
        return outputs

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        now: float,
        error: str | None = None,
        faulty_field: str | None = None,
    ) -> None:
        """End a request outside of `apply` and report it, without a token."""
        self._scheduler.finish(request, reason, now=now, error=error, faulty_field=faulty_field)
        self._outputs.append(last_output(request, reason, error=error))

    def _apply_aborts(self, now: float) -> None:
        for request, reason, error in self._endings.due(now, alive=self._scheduler.requests):
            self._finish(request, reason, now=now, error=error)


def outputs_of(run: Run, logprobs: Sequence[Logprobs]) -> Iterator[RequestOutput]:
    """One output per token of a run, as if each had come from a step of its own."""
    last = len(run.token_ids) - 1
    for number, (token_id, text) in enumerate(zip(run.token_ids, run.texts, strict=True)):
        reason = run.request.finish_reason if number == last else None
        said = tuple(logprobs[number : number + 1])
        yield RequestOutput(run.request, run.start + number, (token_id,), text, reason, None, said)


def _with_logprobs(
    output: RequestOutput, logprobs: Mapping[str, Sequence[Logprobs]]
) -> RequestOutput:
    """The output with the log-probabilities of its token, if the request asks for them."""
    found = logprobs.get(output.request_id)
    return output if found is None else output._replace(logprobs=tuple(found))


def stats_of_step(batch: Batch, seconds: float) -> StepStats:
    """What a step computed: prefill, decodes, or both; derived, never stored."""
    known = [len(row.token_ids) - row.num_drafted for row in batch.catch_up_rows]
    num_prefill_tokens = sum(number for number in known if number > 1)
    num_decodes = len(batch.decodes) + sum(number == 1 for number in known)
    kind: StepKind = "mixed" if num_decodes and num_prefill_tokens else "decode"
    return StepStats(
        kind=kind if num_decodes else "prefill",
        num_rows=batch.num_rows,
        num_tokens=batch.num_tokens,
        num_prefill_tokens=num_prefill_tokens,
        num_decode_tokens=num_decodes,
        seconds=seconds,
    )
