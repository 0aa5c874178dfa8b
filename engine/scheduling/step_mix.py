"""What a step computes: decodes, prefill, or both. Knows no blocks, no ranks and no device.

- `mixed`: every decode gets its token, and prefill gets the rest of the budget. This keeps both the
  device and the decodes busy (Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference
  with Sarathi-Serve", OSDI 2024).
- `prefer-decode`: up to `MAX_PURE_DECODE_STEPS` steps in a row compute decodes alone, then one step
  is mixed. Most tokens come sooner after the one before; first tokens come later.
- `prefer-prefill`: while a request has prefill to do, steps compute prefill alone and the decodes
  wait. First tokens come sooner; running requests wait. Decodes cannot wait for ever: each admitted
  request takes a slot, and when none is free the decodes run.

Static batching (`dynamic_batching` off) is an admission rule: a batch is filled once, and the next
one begins when all its requests have ended.
"""

from engine.config import EngineConfig

#: Steps without prefill in a row that `prefer-decode` allows while a request has prefill to do.
MAX_PURE_DECODE_STEPS = 8


class StepMix:
    """Decides, step by step, whether decodes or prefill take part, and whether batches are open."""

    def __init__(self, config: EngineConfig) -> None:
        self._mode = config.batch_mode
        self._is_static = not config.dynamic_batching
        self._num_pure_decode_steps = 0
        self._num_admissible = 0

    @property
    def prefers_prefill(self) -> bool:
        """Whether prefill is planned first, and decodes only in steps without any."""
        return self._mode == "prefer-prefill"

    def allows_prefill(self, *, num_decodes: int, has_prefill: bool) -> bool:
        """Whether this step computes prefill. To be asked once per step."""
        if self._mode != "prefer-decode" or not num_decodes or not has_prefill:
            self._num_pure_decode_steps = 0
            return True
        self._num_pure_decode_steps += 1
        if self._num_pure_decode_steps <= MAX_PURE_DECODE_STEPS:
            return False
        self._num_pure_decode_steps = 0
        return True

    def open_batch(self, *, num_running: int, num_waiting: int, max_requests: int) -> None:
        """Note what runs and waits before a step: a static batch is filled when nothing runs."""
        if self._is_static and not num_running:
            self._num_admissible = min(num_waiting, max_requests)

    @property
    def admits(self) -> bool:
        """Whether a waiting request may be admitted to the running batch."""
        return not self._is_static or self._num_admissible > 0

    def note_admission(self) -> None:
        self._num_admissible -= 1
