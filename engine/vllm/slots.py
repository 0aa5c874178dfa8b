"""Quire's sampler inside vLLM's second runner, which waits for no step: tokens stay on the device.

vLLM says which slot of its state is in which row of the logits. It plans and launches the next step
while one is in flight, so what there is to say of a step is told when its tokens arrive.

A draw that the candidates cannot decide is settled then, too. Meanwhile the device goes on from the
best candidate. If that is not the token, the request is misled: its step in flight is lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

from engine.vllm.row import EXTRA_ARG, Row, Scores
from engine.vllm.sampling import DrawnStep, RowSampler, attach_report
from engine.vllm.scorer import Piece, piece_of


class SlotTokens:
    """The tokens that vLLM has generated in a slot; only reading them waits for the device."""

    def __init__(self, state: LogitsProcRequestState, slot: int) -> None:
        self._of_slot = state.all_token_ids.gpu[slot]
        self._num_prompt = int(state.prompt_len.np[slot])
        self._num_tokens = int(state.prefill_len.np[slot])

    def see(self, num_tokens: int) -> None:
        """Follow a step: with those of the prompt, `num_tokens` exist when it samples."""
        self._num_tokens = max(self._num_prompt, num_tokens)

    def __len__(self) -> int:
        return self._num_tokens - self._num_prompt

    def __getitem__(self, which: slice) -> list[int]:
        tokens: list[int] = self._of_slot[self._num_prompt : self._num_tokens][which].tolist()
        return tokens


class SlotSampler(RowSampler, LogitsProcessor):
    """Samples with `engine.model.sampling.sampler`, on the device of the logits."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        super().__init__(vllm_config.additional_config)
        self._state = req_states
        self._rows: dict[int, Row] = {}
        self._tokens: dict[int, SlotTokens] = {}
        #: Slots whose prompts are to be scored.
        self._scoring: set[int] = set()
        self._drawn: DrawnStep | None = None

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """See vLLM's LogitsProcessor. Only requests that warm vLLM up have no Row."""
        self._scoring.discard(req_idx)
        row = (sampling_params.extra_args or {}).get(EXTRA_ARG)
        if row is None:
            self._rows.pop(req_idx, None)
            return False
        self._rows[req_idx] = row
        self._tokens[req_idx] = SlotTokens(self._state, req_idx)
        row.attach(self._tokens[req_idx])
        if row.wants_scores:
            self._scoring.add(req_idx)
        return True

    def pieces(self, runner: Any) -> Sequence[Piece]:
        """What the step that `runner` has computed tells of prompts; perhaps nothing."""
        state = runner.execute_model_state
        if state is None or not self._scoring:
            return ()
        found, batch = [], state.input_batch
        for index, slot in enumerate(batch.idx_mapping_np.tolist()):
            if slot in self._scoring:
                start = int(batch.num_computed_tokens_np[index])
                computed = range(start, start + int(batch.num_scheduled_tokens[index]))
                first = int(batch.query_start_loc_np[index])
                internal: str = batch.req_ids[index]
                found.append(piece_of(self._rows[slot], internal, computed, first=first))
        return found

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Choose the tokens of [rows, vocabulary], and make their logits the largest, in place."""
        slots: list[int] = ctx.idx_mapping_np.tolist()
        if not all(slot in self._rows for slot in slots):
            return logits
        for slot, num_tokens in zip(slots, ctx.seq_lens_upper_bound_np.tolist(), strict=False):
            self._tokens[slot].see(num_tokens)
        rows = [self._rows[slot] for slot in slots]
        self._scoring = {slot for slot in self._scoring if self._rows[slot].wants_scores}
        draws = self._draw(logits, rows)
        self._drawn = DrawnStep(rows, draws)
        # A row may have numbers that are none, behind which vLLM would find no token.
        return logits.zero_().scatter_(1, draws.guesses()[:, None], 1.0)

    def tell(self, output: Any, scores: Mapping[str, Scores]) -> Any:
        """Have vLLM's output of the last step say more once its tokens arrive; return it."""
        drawn, self._drawn = self._drawn, None
        if drawn is None or not isinstance(output, AsyncModelRunnerOutput):
            return output
        return TellingOutput(output, drawn, scores)


class TellingOutput(AsyncModelRunnerOutput):
    """vLLM's output of a step in flight, with the right tokens and the report of the sampler."""

    def __init__(
        self, output: AsyncModelRunnerOutput, drawn: DrawnStep, scores: Mapping[str, Scores]
    ) -> None:
        self._output, self._drawn, self._scores = output, drawn, scores

    def get_output(self) -> ModelRunnerOutput:
        """See vLLM's AsyncModelRunnerOutput."""
        output = self._output.get_output()
        _, wrong, report = self._drawn.wait()
        for index, token in wrong.items():
            # The row of a chunk that does not end its prompt has no token.
            if output.sampled_token_ids[index]:
                output.sampled_token_ids[index] = [token]
        misled = frozenset(output.req_ids[index] for index in wrong)
        attach_report(output, replace(report, misled=misled), self._scores)
        return output
