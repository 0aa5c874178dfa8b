"""The configuration of an engine; knows no device and no settings file.

Frozen: "auto" values resolve into a new object, never in place.
"""

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["fcfs", "sjf", "priority", "adaptive"]
PreemptionMode = Literal["recompute", "swap", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes and rules of one engine.

    `num_blocks * block_size` tokens of KV exist on the device, `num_host_blocks * block_size` more
    on the host for requests preempted by swap.
    """

    num_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    #: Names of the LoRA adapters that requests may ask for.
    adapters: frozenset[str] = frozenset()
    block_size: int = 16
    num_host_blocks: int = 0
    #: Rows per step, and so requests in RUNNING at once.
    max_num_seqs: int = 64
    #: Tokens computed per step, prefill and decode together.
    max_num_batched_tokens: int = 512
    #: The most tokens of one request per step; 0 leaves only the budget.
    long_prefill_token_threshold: int = 0
    #: Share of the pool kept free when a request is admitted, so that the running ones can grow.
    watermark: float = 0.01
    #: The most drafted tokens of one request per step; 0 for no speculation.
    num_speculative_tokens: int = 0
    #: A step gets drafts only up to this number of tokens in all.
    max_speculative_step_tokens: int = 32
    enable_prefix_caching: bool = True
    policy: PolicyName = "priority"
    #: Seconds of waiting that are worth one priority class.
    aging_seconds: float = 30.0
    preemption_mode: PreemptionMode = "auto"
    #: In "auto", a victim with fewer tokens to recompute than this is not worth the copies.
    swap_min_tokens: int = 64
    #: Check the laws of `engine.invariants` after every step (tests, staging); idle engines always
    #: do.
    check_invariants: bool = False

    def __post_init__(self) -> None:
        assert self.num_blocks >= 1 and self.block_size >= 1 and self.num_host_blocks >= 0
        assert self.max_num_seqs >= 1 and self.max_model_len >= 1 and self.vocab_size >= 1
        assert self.max_num_batched_tokens >= 1 and self.long_prefill_token_threshold >= 0
        assert self.num_speculative_tokens >= 0 and self.max_speculative_step_tokens >= 0
        assert 0.0 <= self.watermark < 1.0 and self.aging_seconds > 0.0

    @property
    def max_request_tokens(self) -> int:
        """The longest a request may become: what the model can read and the pool can hold."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def max_tokens_per_row(self) -> int:
        """The longest chunk of one request in one step."""
        return self.long_prefill_token_threshold or self.max_num_batched_tokens
