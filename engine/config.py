"""The configuration of an engine; knows no device and no settings file.

Frozen: resolving "auto" values creates a new object.
"""

import logging
from dataclasses import dataclass, replace
from typing import Literal

#: Default of `max_num_seqs` by type of device. A decode on a GPU reads the weights once for all its
#: rows, and takes little longer with more of them.
NUM_SEQS = {"cpu": 64, "cuda": 256}

#: The number of priority classes.
NUM_CLASSES = 4

logger = logging.getLogger(__name__)

#: The default of `max_scored_tokens`: enough rows for an efficient matrix product.
MAX_SCORED_TOKENS = 256

PolicyName = Literal["fcfs", "sjf", "priority", "adaptive"]
PreemptionMode = Literal["recompute", "swap", "auto"]
KVCacheDtype = Literal["auto", "int8"]
BatchMode = Literal["mixed", "prefer-decode", "prefer-prefill"]


@dataclass(frozen=True, slots=True)
class StateCapacity:
    """What a model has memory for, if its layers have a recurrent state.

    Args:
        num_slots: of running requests.
        num_host_slots: of swapped ones.
        num_snapshots: states that the prefix cache keeps.
        copy_seconds: to copy one state to the host and back.
    """

    num_slots: int
    num_host_slots: int
    num_snapshots: int
    copy_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and rules of one engine.

    The device has slots for `num_blocks * block_size` tokens. The host has slots for another
    `num_host_blocks * block_size` tokens, for requests that are preempted by swap.
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    #: Names of the LoRA adapters that requests may use.
    adapters: frozenset[str] = frozenset()
    block_size: int = 16
    num_host_blocks: int = 0
    #: Most rows per step, which is also the most requests in state RUNNING.
    max_num_seqs: int = NUM_SEQS["cpu"]
    #: Most tokens per step, of prefills and decodes together.
    max_num_batched_tokens: int = 512
    #: The most tokens of one request per step; with 0, only the step's limit applies.
    long_prefill_token_threshold: int = 0
    #: The most prefill tokens of all requests per step; with 0, only the step's limit applies.
    max_prefill_tokens: int = 0
    #: The most tokens of prompts whose log-probabilities a step computes, since each needs a row of
    #: logits. An engine with 0 computes none.
    max_scored_tokens: int = MAX_SCORED_TOKENS
    #: What a step computes when some requests decode and others prefill: see `step_mix`.
    batch_mode: BatchMode = "mixed"
    #: With False, no request is admitted until all requests of the running batch have ended: the
    #: static batching that continuous batching is compared with.
    dynamic_batching: bool = True
    #: Requests may have pictures in their prompts.
    reads_pictures: bool = False
    #: Requests ask for a vector of their prompt instead of an output: an embedding, or the scores
    #: of a classification head.
    pools: bool = False
    #: A prompt is computed in one step or not at all, as an encoder needs it: each token attends to
    #: all others. A step must have room for the longest prompt.
    whole_prompts: bool = False
    #: Share of the pool that stays free when a request is admitted, so that running ones can grow.
    watermark: float = 0.01
    #: The most drafted tokens of one request per step; 0 disables speculation.
    num_speculative_tokens: int = 0
    #: Drafts are added to a step only up to this total number of tokens.
    max_speculative_step_tokens: int = 32
    enable_prefix_caching: bool = True
    policy: PolicyName = "priority"
    #: Seconds of waiting that raise a request by one priority class.
    aging_seconds: float = 30.0
    #: The least share of each class, from LOW to CRITICAL, in the tokens and slots of a step while
    #: it has work: see `shares`. Empty for none.
    class_shares: tuple[float, ...] = ()
    preemption_mode: PreemptionMode = "auto"
    #: Measured seconds to copy one block to the host and back; "auto" compares it with the measured
    #: time of recomputing.
    block_copy_seconds: float = 0.0
    #: Slots for recurrent states on the device: no more requests run. 0 for a model without such a
    #: state. With slots there is no speculation: it would need a state that is gone.
    num_state_slots: int = 0
    #: Slots on the host, for requests that are preempted by swap.
    num_host_state_slots: int = 0
    #: Slots for snapshots of states, behind which requests begin with a cached prefix. With state
    #: slots and no snapshots there is no prefix cache.
    num_state_snapshots: int = 0
    #: Blocks of a prompt from one snapshot to the next; 0 for those at its end and where prefixes
    #: have parted alone.
    state_snapshot_blocks: int = 0
    #: As `block_copy_seconds`, for one state.
    state_copy_seconds: float = 0.0
    #: Check the invariants after every step (tests, staging); an idle engine always checks them.
    check_invariants: bool = False

    def __post_init__(self) -> None:
        assert self.num_blocks >= 1 and self.block_size >= 1 and self.num_host_blocks >= 0
        assert self.max_num_seqs >= 1 and self.max_model_len >= 1 and self.vocab_size >= 1
        assert self.max_num_batched_tokens >= 1 and self.long_prefill_token_threshold >= 0
        assert self.max_prefill_tokens >= 0 and self.block_copy_seconds >= 0.0
        assert self.max_scored_tokens >= 0
        assert self.num_speculative_tokens >= 0 and self.max_speculative_step_tokens >= 0
        assert 0.0 <= self.watermark < 1.0 and self.aging_seconds > 0.0
        assert len(self.class_shares) in (0, NUM_CLASSES) and min(self.class_shares, default=0) >= 0
        assert sum(self.class_shares) <= 1.0 + 1e-9
        assert self.num_state_slots >= 0 and self.num_host_state_slots >= 0
        assert self.num_state_snapshots >= 0 and self.state_snapshot_blocks >= 0
        if self.num_state_slots:
            assert self.enable_prefix_caching == (self.num_state_snapshots > 0)
            assert not self.num_speculative_tokens
        if self.whole_prompts:
            room = min(self.max_tokens_per_row, self.max_prefill_tokens or self.max_model_len)
            assert self.pools and room >= self.max_model_len and not self.enable_prefix_caching

    @property
    def max_request_tokens(self) -> int:
        """The most tokens of a request, limited by the model and by the size of the pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    def with_states(self, states: StateCapacity | None) -> "EngineConfig":
        """The configuration for a model that keeps recurrent states, or None for one that does not.

        Without speculation, and without snapshots also without the prefix cache, which is logged.
        """
        if states is None:
            return self
        if self.num_speculative_tokens:
            logger.info("the model has a recurrent state: no drafts, since none can be taken back")
        if self.enable_prefix_caching and not states.num_snapshots:
            logger.info(
                "the model has a recurrent state, and no snapshots of it are kept: no prefix cache"
            )
        caches = self.enable_prefix_caching and states.num_snapshots > 0
        return replace(
            self,
            num_state_slots=states.num_slots,
            num_host_state_slots=states.num_host_slots,
            num_state_snapshots=states.num_snapshots if caches else 0,
            state_copy_seconds=states.copy_seconds,
            enable_prefix_caching=caches,
            num_speculative_tokens=0,
        )

    @property
    def max_tokens_per_row(self) -> int:
        """The longest chunk of one request in one step."""
        return self.long_prefill_token_threshold or self.max_num_batched_tokens
