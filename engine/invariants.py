"""The engine's invariants as code: conditions that must hold between any two steps.

Tests and staging check them after every step. In production they are checked when an engine becomes
idle; a violation is then logged and counted, but never ends the worker.
"""

from engine.request import NO_SLOT, Request, RequestState
from engine.scheduling.scheduler import Scheduler


def violations(scheduler: Scheduler) -> list[str]:
    """The violated invariants, between two steps; empty if all hold.

    Linear in blocks, tables and requests: too slow for every step in production.
    """
    cache, config, alive = scheduler.kv_cache, scheduler.config, scheduler.requests
    running = scheduler.running
    found = cache.violations(set(alive)) + cache.states.violations(alive.values())
    found += cache.snapshots.violations()
    if running.ending:
        found.append("tokens are expected between two steps")
    if len(running) > config.max_num_seqs:
        found.append("more requests run than max_num_seqs")
    if len(running) + scheduler.num_waiting + scheduler.num_preempted != len(alive):
        found.append("running + waiting + preempted != alive")
    if len(running.catching_up) + len(running.decodes) != len(running):
        found.append("catching up + decodes != running")
    found += running.decodes.violations()
    if not alive and cache.pool.num_owned:
        found.append("an idle engine owns blocks")
    if not alive and cache.states.pool.num_owned:
        found.append("an idle engine owns slots of states")
    if not alive and cache.snapshots.pool.num_owned:
        found.append("an idle engine owns snapshots of states")
    for request in alive.values():
        laws = [*progress_laws(request, scheduler), *holding_laws(request, scheduler)]
        found += [f"{request.request_id}: {law}" for law in laws]
    return found


def progress_laws(request: Request, scheduler: Scheduler) -> list[str]:
    """Violated invariants of one request's state and counters."""
    found = []
    is_running = request.request_id in scheduler.running.requests
    if (request.state is RequestState.RUNNING) != is_running:
        found.append(f"state {request.state} contradicts the running set")
    # A request admitted by a plan may have a single token to compute until that plan is applied.
    is_catching_up = request.request_id in scheduler.running.catching_up and not (
        scheduler.has_open_plan and request.num_pending_tokens == 1
    )
    may_catch_up = request.num_pending_tokens > 1
    if request.pooling is not None:
        # A pooled request never decodes: also its last token is one of the prompt.
        is_catching_up, may_catch_up = request.request_id in scheduler.running.catching_up, True
    if is_running and may_catch_up != is_catching_up:
        found.append("its pending tokens contradict whether it is catching up")
    if not 0 <= request.num_computed_tokens < request.num_tokens:
        found.append(f"computed {request.num_computed_tokens} of {request.num_tokens} tokens")
    if request.expects_token:
        found.append("a token is expected between two steps")
    return found


def holding_laws(request: Request, scheduler: Scheduler) -> list[str]:
    """Violated invariants of what one request holds: the blocks and the slot that it needs."""
    found = []
    cache, name = scheduler.kv_cache, request.request_id
    holds_device = cache.holds(name) and not cache.is_swapped(name)
    if holds_device != (request.state is RequestState.RUNNING):
        found.append(f"holds device blocks in state {request.state}")
    if cache.states.is_needed:
        if (request.state_slot != NO_SLOT) != holds_device:
            found.append(f"has state slot {request.state_slot} in state {request.state}")
        if (request.host_state_slot != NO_SLOT) != cache.is_swapped(name):
            found.append("its state and its blocks are not swapped together")
    if holds_device:
        num_slots = len(cache.block_ids(name)) * cache.block_size
        if num_slots < request.num_computed_tokens:
            found.append("has fewer slots than computed tokens")
        if num_slots - request.num_tokens >= cache.block_size:
            found.append("holds a whole block it does not need")
    return found
