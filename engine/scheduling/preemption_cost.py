"""Whether a victim's KV is cheaper to copy to the host and back, or to compute again.

Both costs are measured on this machine: the copies once, when the model is loaded
(`EngineConfig.block_copy_seconds` and `state_copy_seconds`); the computation in every step with
prefill. Knows no block and no request.
"""

#: Weight of the newest step in the running mean of the seconds per token.
NEWEST_WEIGHT = 0.2


class PreemptionCost:
    """The costs of the two ways to preempt.

    Args:
        block_copy_seconds: to copy one block to the host and back.
        state_copy_seconds: the same for a recurrent state; 0.0 without one.
    """

    def __init__(self, block_copy_seconds: float, *, state_copy_seconds: float = 0.0) -> None:
        self._block_copy_seconds = block_copy_seconds
        self._state_copy_seconds = state_copy_seconds
        self._token_seconds: float | None = None

    def note_step(self, *, num_prefill_tokens: int, num_tokens: int, seconds: float) -> None:
        """Learn from a step how long a token of prefill takes.

        Counts only steps that are mostly prefill: a decode costs more than a token of a prompt,
        because it shares no reading of its context.
        """
        if 2 * num_prefill_tokens <= num_tokens:
            return
        newest = seconds / num_tokens
        if self._token_seconds is None:
            self._token_seconds = newest
        else:
            self._token_seconds += NEWEST_WEIGHT * (newest - self._token_seconds)

    def prefers_swap(self, *, num_blocks: int, num_dropped_tokens: int) -> bool:
        """Whether copying `num_blocks` and a state is cheaper than computing tokens again.

        False as long as no prefill has been measured.
        """
        if self._token_seconds is None:
            return False
        recompute = num_dropped_tokens * self._token_seconds
        swap = num_blocks * self._block_copy_seconds + self._state_copy_seconds
        return swap < recompute
