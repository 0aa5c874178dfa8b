"""The engine's counters and snapshots, which `service.worker.observe.metrics` reads."""

from dataclasses import dataclass
from typing import Literal

StepKind = Literal["prefill", "decode", "mixed"]


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start; they only grow."""

    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    #: Tokens whose keys and values were dropped by a preemption and must be computed again.
    preempted_tokens: int = 0
    #: Prompt tokens of requests at their first admission, and how many were in the prefix cache.
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    #: Drafted tokens that a step has checked, by outcome.
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    #: Tokens of all steps, as in `StepStats`.
    prefill_tokens: int = 0
    decode_tokens: int = 0
    drafted_tokens: int = 0

    def note_step(self, step: "StepStats") -> None:
        """Count the tokens of a step."""
        self.prefill_tokens += step.num_prefill_tokens
        self.decode_tokens += step.num_decode_tokens
        self.drafted_tokens += step.num_drafted_tokens


@dataclass(frozen=True, slots=True)
class StepStats:
    """The last step that computed any row."""

    kind: StepKind
    num_rows: int
    num_tokens: int
    #: Of `num_tokens`, those of prefill, and those of requests that decode; the rest is drafted.
    num_prefill_tokens: int
    num_decode_tokens: int
    seconds: float

    @property
    def num_drafted_tokens(self) -> int:
        return self.num_tokens - self.num_prefill_tokens - self.num_decode_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """One consistent reading of the engine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_waiting: int
    num_running: int
    num_preempted: int
    num_blocks: int
    num_blank_blocks: int
    num_cached_blocks: int
    num_owned_blocks: int
    num_promised_blocks: int
    num_host_blocks: int
    num_owned_host_blocks: int
    num_swapped: int
    preemptions_recompute: int
    preemptions_swap: int
    preempted_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    accepted_draft_tokens: int
    rejected_draft_tokens: int
    generated_tokens: int
    #: Tokens of all steps by what they were, as in `StepStats`.
    prefill_tokens: int
    decode_tokens: int
    drafted_tokens: int
    steps: int
    failed_steps: int
    last_step: StepStats | None

    @property
    def num_alive(self) -> int:
        """The number of requests in the engine, in any state."""
        return self.num_waiting + self.num_running + self.num_preempted

    @property
    def kv_cache_usage(self) -> float:
        """Owned blocks as a share of the pool, 0.0 to 1.0."""
        return self.num_owned_blocks / self.num_blocks

    @property
    def slot_usage(self) -> float:
        """Running requests as a share of the slots, 0.0 to 1.0."""
        return self.num_running / self.max_num_seqs

    @property
    def batch_usage(self) -> float:
        """Tokens of the last step as a share of its budget, 0.0 to 1.0; 0.0 for an idle engine."""
        if self.last_step is None or not self.num_running:
            return 0.0
        return self.last_step.num_tokens / self.max_num_batched_tokens

    @property
    def num_free_host_blocks(self) -> int:
        return self.num_host_blocks - self.num_owned_host_blocks
