"""Decides, step by step, how many tokens of which requests are computed, and who is preempted.

Knows no device, no text and no clock; the same calls with the same arguments give the same plans.

There are no phases. A new prompt, a chunk of a long one, a preempted request, one with a cached
prefix and one taken over from a dead worker are the same thing: known tokens whose KV is not
computed yet. `schedule()` plans and allocates, `apply()` commits what the device really did;
nothing about a request's progress changes in between, so a step that failed can simply be planned
again. Once a step is launched, the next one can be planned before its tokens are known: lengths are
known, and `UNKNOWN_TOKEN` stands for each token still to come.

Decodes are not a phase either: they are requests with one token to compute. Because only their
length changes from step to step, they are planned and applied together, as columns.
"""

from collections.abc import Iterable, Sequence
from itertools import count

from engine.batch import NO_DECODES, Batch, BatchRow, StepResult
from engine.cache.kv_cache import KVCache
from engine.config import EngineConfig
from engine.output.stopping import finish_reason_of
from engine.request import FinishReason, Priority, Progress, Request, RequestState, Run, take_text
from engine.scheduling.decode_set import limit_of, that_filled_a_block
from engine.scheduling.picture_budget import PictureBudget
from engine.scheduling.plan import Plan
from engine.scheduling.policy import POLICIES, comes_before
from engine.scheduling.preemption import Preemption
from engine.scheduling.running_set import RunningSet
from engine.scheduling.shares import ClassShares, Lane
from engine.scheduling.speculation import Speculation
from engine.scheduling.step_mix import StepMix
from engine.scheduling.waiting_queue import WaitingQueue
from engine.stats import SchedulerStats, StepStats


class Scheduler:
    """Only it and its parts mutate a Request. Every method runs on the engine thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.kv_cache = KVCache.of(config)
        self.stats = SchedulerStats()
        self.requests: dict[str, Request] = {}
        self.running = RunningSet(config)
        self._shares = ClassShares(config, self.running)
        self._preemption = Preemption(
            config, self.running, self.kv_cache, self.stats, shares=self._shares
        )
        self._speculation = Speculation(config, self.kv_cache, self.stats)
        self._pictures = PictureBudget(config.max_num_batched_tokens)
        self._mix = StepMix(config)
        self._waiting = WaitingQueue()
        self._policy = POLICIES[config.policy]
        self._sequence = count()
        #: Step numbers: of the last plan, of the last one passed to `_advance`, and of the last one
        #: planned when a request finished.
        self._last_step = self._last_advance = self._last_end = 0

    @property
    def num_preempted(self) -> int:
        """Requests that were running, were preempted, and wait to be admitted again."""
        return self._waiting.num_preempted

    @property
    def num_waiting(self) -> int:
        """Requests that were never admitted."""
        return len(self._waiting) - self._waiting.num_preempted

    @property
    def has_open_plan(self) -> bool:
        """Whether the last plan has not been launched or applied yet."""
        return self._last_advance < self._last_step

    def needs_tokens_of(self, batch: Batch) -> bool:
        """Whether the step after `batch` needs its tokens: for constraints, penalties or drafts."""
        return self.running.needs_tokens or self._speculation.has_room_behind(batch)

    def add(self, request: Request) -> None:
        """Queue a request under the rank that the policy gives it now, once and for all."""
        assert request.request_id not in self.requests
        request.standing = self._policy(request, self.config)
        request.rank = (request.arrival_time + request.standing, next(self._sequence))
        self.requests[request.request_id] = request
        self._waiting.push(request)

    def schedule(self, *, now: float, after: Batch | None = None) -> Batch:
        """Plan one step: decodes and the requests that have to catch up, the best of them first.

        `after` is the batch in flight, if any: launched, and its tokens not applied yet.
        """
        if after is not None:
            assert not after.drafted_rows, "the lengths of their requests are not known yet"
            self._advance(after)
        self._last_step += 1
        plan = self._begin_plan(now)
        if self._mix.prefers_prefill:
            self._plan_catch_up(plan)
            if plan.rows:
                return plan.as_batch(self._last_step, NO_DECODES)
            self._plan_decodes(plan)
        else:
            self._plan_decodes(plan)
            if self._mix.allows_prefill(
                num_decodes=len(self.running.decodes), has_prefill=self._has_prefill
            ):
                self._plan_catch_up(plan)
        if after is None:
            self._plan_drafts(plan)
        return plan.as_batch(self._last_step, self.running.decodes.rows())

    def apply(self, batch: Batch, result: StepResult, *, now: float) -> Progress:
        """Commit what the device computed for a batch; returns the new tokens.

        Rows of requests that have ended since they were planned are ignored.
        """
        if batch.step > self._last_advance:
            self._advance(batch)
        progress = self._apply_decodes(batch, result.decoded, now)
        for row, request in zip(batch.catch_up_rows, batch.catch_up_requests, strict=True):
            if request.is_finished:
                continue
            if row.num_drafted:
                token_ids = result.runs[row.request_id]
                progress.runs.append(self._take_run(request, row, token_ids, now))
                continue
            self._remember([(request, row.end)])
            if scored := row.scored:
                request.take_prompt_logprobs(scored, result.prompt_logprobs[row.request_id])
            if row.samples and request.pooling is not None:
                is_scored = request.sampling.prompt_logprobs is not None
                vector = request.likelihoods() if is_scored else result.vectors[row.request_id]
                request.vector, request.times.first_token = vector, now
                progress.pooled.append(request)
                self.finish(request, FinishReason.POOLED, now=now)
            elif row.samples:
                request.append_token(result.token_ids[row.request_id])
                progress.add(request)
                self.running.decodes.note_last_token(request)
                self._take_token(request, now)
        return progress

    def note_step(self, stats: StepStats) -> None:
        """Count a computed step, and learn from it what it costs to compute tokens again."""
        self.stats.note_step(stats)
        self._preemption.cost.note_step(
            num_prefill_tokens=stats.num_prefill_tokens,
            num_tokens=stats.num_tokens,
            seconds=stats.seconds,
        )

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        now: float,
        error: str | None = None,
        faulty_field: str | None = None,
    ) -> None:
        """End a request, whatever its state, and free all that it holds."""
        if request.state is RequestState.RUNNING:
            self.running.leave(request)
            request.transition(RequestState.FINISHED)
        else:
            request.times.end_preemption(now)
            request.transition(RequestState.FINISHED)
            self._waiting.mark_dead(request)
        self.running.forget(request)
        request.finish_reason, request.error = reason, error
        request.faulty_field = faulty_field
        request.times.finished = now
        self._last_end = self._last_step
        self.kv_cache.release(request)
        del self.requests[request.request_id]

    # -- planning ---------------------------------------------------------------------------------

    @property
    def _has_prefill(self) -> bool:
        return bool(self.running.catching_up) or len(self._waiting) > 0

    def _begin_plan(self, now: float) -> Plan:
        config = self.config
        self._mix.open_batch(
            num_running=len(self.running),
            num_waiting=len(self._waiting),
            max_requests=self.running.max_requests,
        )
        return Plan(
            budget=config.max_num_batched_tokens,
            prefill_budget=config.max_prefill_tokens or config.max_num_batched_tokens,
            scored_budget=config.max_scored_tokens,
            pictures=self._pictures.begin_step(),
            now=now,
            state_moves=self.kv_cache.begin_step(),
        )

    def _plan_decodes(self, plan: Plan) -> None:
        """One token for each request that has caught up; long prompts take only what is left."""
        plan.budget -= len(self.running.decodes)
        plan.has_decodes = True
        at_boundary = self.running.decodes.at_block_boundary()
        if self.kv_cache.grow_by_a_block(at_boundary):
            return
        for request in at_boundary:
            if request.state is RequestState.RUNNING:
                self._make_room_to_grow(request, plan)

    def _plan_catch_up(self, plan: Plan) -> None:
        """Chunks for requests that catch up: classes that lack their share first, then all."""
        plan.behind = set(() if self.config.whole_prompts else self.running.catching_up)
        for lane in self._shares.lanes(plan):
            self._plan_lane(plan, lane)
        self._shares.note(plan, self._waiting)

    def _plan_lane(self, plan: Plan, lane: Lane) -> None:
        """Chunks for requests of a lane, running or waiting, whichever comes first."""
        running = [one for one in self.running.catching_up.values() if lane.takes(one, plan)]
        running.sort(key=lambda one: one.order, reverse=True)
        blocked: Priority | None = None
        while lane.room > 0 and not plan.is_full:
            may_admit = self._mix.admits and plan.room > 0 and self._shares.may_admit(lane)
            waiting = self._waiting.peek(above=blocked, only=lane.level) if may_admit else None
            if waiting is not None and (not running or comes_before(waiting, running[-1])):
                if self._admit(waiting, plan, above=blocked, only=lane.level):
                    self._plan_row(waiting, plan, lane)
                else:
                    # Nobody of its class or a lower one overtakes it: a large one would starve.
                    blocked = waiting.priority
            elif running:
                request = running.pop()
                if request.state is RequestState.RUNNING:
                    self._plan_row(request, plan, lane)
            else:
                break

    def _plan_row(self, request: Request, plan: Plan, lane: Lane) -> None:
        planned = plan.num_planned(request)
        room = min(plan.room_for(request), lane.room + planned)
        length = min(request.num_pending_tokens, room, self.config.max_tokens_per_row)
        if (next_snapshot := self.kv_cache.next_snapshot(request)) is not None:
            length = min(length, next_snapshot - request.num_computed_tokens)
        if length <= planned:
            plan.wait(request)
            return
        if self.config.whole_prompts and length < request.num_pending_tokens:
            return
        lane.room -= length - planned
        end = request.num_computed_tokens + length
        grown = self.kv_cache.grow(request.request_id, end)
        assert grown, "admission promised these blocks"
        block_ids = self.kv_cache.block_ids(request.request_id)
        slot = self.kv_cache.snapshot_slot(request, end, next_snapshot)
        plan.take(request, end=end, block_ids=block_ids, snapshot_slot=slot)

    def _plan_drafts(self, plan: Plan) -> None:
        """Turn decodes into rows with drafts; until these are checked, their requests catch up."""
        for request, draft in self._speculation.drafts(self.running.decodes.requests, plan):
            self.running.stop_decoding(request)
            plan.budget += 1
            block_ids = self.kv_cache.block_ids(request.request_id)
            plan.take(request, end=request.num_tokens, block_ids=block_ids, draft=draft)

    # -- admission --------------------------------------------------------------------------------

    def _admit(
        self, request: Request, plan: Plan, *, above: Priority | None, only: Priority | None
    ) -> bool:
        """Move the head of the queue to RUNNING, preempting lower classes for it if it must.

        With `above` it is the head of the classes above, and overtakes requests that are blocked.
        It must preempt somebody then: the room that is free is kept for those it overtakes, and
        they are overtaken no more often than there are lower classes that run.
        """
        # Preempted by this very plan, its last token may still be in flight.
        if request.request_id in plan.preempted_ids:
            return False
        least = 0 if above is None else 1
        victims = self._preemption.victims_for(request, planned=plan.rows, least=least)
        if victims is None:
            return False
        self._waiting.pop(above, only=only)
        self._mix.note_admission()
        for victim in victims:
            self._preempt(victim, plan)
        request.times.end_preemption(plan.now)
        if self.kv_cache.is_swapped(request.request_id):
            plan.swap_in += self.kv_cache.swap_in(request)
        else:
            request.num_computed_tokens = self.kv_cache.admit(request)
        request.transition(RequestState.RUNNING)
        self.running.join(request)
        request.num_tokens_at_admission = request.num_tokens
        if request.times.first_scheduled is None:
            request.times.first_scheduled = plan.now
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self.stats.prompt_tokens += request.num_prompt_tokens
            self.stats.cached_prompt_tokens += request.num_cached_tokens
        return True

    # -- preemption -------------------------------------------------------------------------------

    def _make_room_to_grow(self, request: Request, plan: Plan) -> None:
        """Get a block for a decode by preempting those that stand worst, itself if it does."""
        while not self.kv_cache.grow(request.request_id, request.num_tokens):
            victim = self._preemption.victim_beside(request)
            self._preempt(victim, plan)
            if victim is request:
                return

    def _preempt(self, victim: Request, plan: Plan) -> None:
        """Move a running request back to the queue; it keeps its rank, and so its order there."""
        assert victim.request_id not in plan.rows
        if plan.has_decodes and victim.request_id not in self.running.catching_up:
            plan.budget += 1
        self.running.preempt(victim)
        plan.behind.discard(victim.request_id)
        plan.swap_out += self._preemption.vacate(victim)
        victim.times.preempted_at = plan.now
        victim.transition(RequestState.PREEMPTED)
        plan.preempted_ids.add(victim.request_id)
        self._waiting.push(victim)

    # -- progress ---------------------------------------------------------------------------------

    def _advance(self, batch: Batch) -> None:
        """Count the tokens that a launched step computes, and those it will bring, as done.

        Every request among the decodes is in the batch, or none is: requests join them only here
        and in `_take_run`, both after the batch was planned and before the next one is.
        """
        self._last_advance = batch.step
        self._pictures.end_step(batch)
        for request in self.running.decodes.advance() if len(batch.decodes) else ():
            self.running.expect_end(request)
        for row, request in zip(batch.catch_up_rows, batch.catch_up_requests, strict=True):
            if request.is_finished or row.num_drafted:
                continue
            request.num_computed_tokens = row.end
            if request.pooling is not None:
                if row.samples:
                    self.running.expect_end(request)
                continue
            if row.samples:
                request.expect_token()
            if request.num_tokens >= limit_of(request, self.config):
                self.running.expect_end(request)
            elif request.num_pending_tokens == 1:
                self.running.start_decoding(request, self.kv_cache.block_ids(request.request_id))

    def _apply_decodes(self, batch: Batch, token_ids: Sequence[int], now: float) -> Progress:
        """Append the new token of every decode; then see to full blocks and possible ends."""
        rows = batch.decodes
        if self._last_end >= batch.step:
            rows, token_ids = rows.without_finished(token_ids)
        progress, may_end = self.running.decodes.append_tokens(rows, token_ids)
        self._remember(that_filled_a_block(rows))
        for request in may_end:
            self._take_token(request, now)
        return progress

    def _take_run(
        self, request: Request, row: BatchRow, token_ids: Sequence[int], now: float
    ) -> Run:
        """Append the tokens of a row with a draft, one by one, until one ends the request."""
        run = Run(request, request.num_output_tokens)
        self._speculation.learn(request, row, len(token_ids) - 1)
        for token_id in token_ids:
            request.expect_token()
            request.append_token(token_id)
            self._take_token(request, now)
            run.token_ids.append(token_id)
            run.texts.append(take_text(request, final=request.is_finished))
            if request.is_finished:
                break
        else:
            # KV computed behind the last accepted token will be overwritten.
            request.num_computed_tokens = request.num_tokens - 1
            self.kv_cache.shrink(request.request_id, request.num_tokens)
            self._remember([(request, request.num_computed_tokens)])
            self.running.start_decoding(request, self.kv_cache.block_ids(request.request_id))
        request.num_accepted_draft_tokens += len(run.token_ids) - 1
        return run

    def _remember(self, computed: Iterable[tuple[Request, int]]) -> None:
        """Put full blocks into the prefix cache, but for requests preempted in the meantime."""
        running = RequestState.RUNNING
        self.kv_cache.remember(one for one in computed if one[0].state is running)

    def _take_token(self, request: Request, now: float) -> None:
        """See to the token just appended: first-token time, text, and whether it is the last."""
        if request.times.first_token is None:
            request.times.first_token = now
        token_id = request.output_token_ids[-1]
        stop_string_found = request.text is not None and request.text.append(token_id)
        reason = finish_reason_of(request, self.config, stop_string_found=stop_string_found)
        if reason is not None:
            self.finish(request, reason, now=now)
