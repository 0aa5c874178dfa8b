"""Quire's sampler inside vLLM's first runner: a logits processor that decides vLLM's argmax.

vLLM makes one for each process that samples, and says which request is in which row of the logits.
Each step waits for its tokens. This runner serves CPUs; elsewhere vLLM prefers its second one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from engine.model.device.transfer import index_on
from engine.vllm.row import EXTRA_ARG, NOTHING_TO_SAY, Row, Scores
from engine.vllm.sampling import DrawnStep, RowSampler, attach_report
from engine.vllm.scorer import Piece, piece_of


class QuireSampler(RowSampler, LogitsProcessor):
    """Samples with `engine.model.sampling.sampler`, on the device of the logits."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        is_pin_memory: bool,  # noqa: FBT001 - vLLM's signature.
    ) -> None:
        del device, is_pin_memory
        super().__init__(vllm_config.additional_config)
        #: By row of the logits.
        self._rows: dict[int, Row] = {}
        self._in_order: list[Row] | None = None
        #: Indices of rows whose prompts are to be scored; some of them may be done by now.
        self._scoring: Sequence[int] = ()
        self._report = NOTHING_TO_SAY

    def pieces(self, runner: Any) -> Sequence[Piece]:
        """The tokens of prompts to score that the step of `runner` has computed; perhaps none.

        The hidden states have a row per token; `first` is that of the first token computed here.
        """
        self._scoring = [index for index in self._scoring if self._rows[index].wants_scores]
        state = runner.execute_model_state
        if state is None or not self._scoring:
            return ()
        found = []
        for index in self._scoring:
            internal: str = runner.input_batch.req_ids[index]
            start: int = runner.requests[internal].num_computed_tokens
            end = start + state.scheduler_output.num_scheduled_tokens[internal]
            first = int(runner.query_start_loc.np[index])
            found.append(piece_of(self._rows[index], internal, range(start, end), first=first))
        return found

    def tell(self, output: Any, scores: Mapping[str, Scores]) -> Any:
        """Add what there is to say of the last step to vLLM's output, and return it."""
        if isinstance(output, ModelRunnerOutput):
            report, self._report = self._report, NOTHING_TO_SAY
            attach_report(output, report, scores)
        return output

    def is_argmax_invariant(self) -> bool:
        """Says no: this sampler decides the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow vLLM's batch. It is told what was removed, then added, then moved."""
        if batch_update is None:
            return
        rows, self._in_order = self._rows, None
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, params, _, live in batch_update.added:
            assert params.extra_args is not None
            row: Row = params.extra_args[EXTRA_ARG]
            row.attach(live)
            rows[index] = row
        for one, other, direction in batch_update.moved:
            from_one, from_other = rows.pop(one, None), rows.pop(other, None)
            if from_one is not None:
                rows[other] = from_one
            if from_other is not None and direction is MoveDirectionality.SWAP:
                rows[one] = from_other
        self._scoring = [index for index, row in rows.items() if row.wants_scores]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose the tokens of [rows, vocabulary], and make their logits the largest, in place."""
        if self._in_order is None or len(self._in_order) != len(logits):
            self._in_order = [self._rows[index] for index in range(len(logits))]
        chosen, _, self._report = DrawnStep(
            self._in_order, self._draw(logits, self._in_order)
        ).wait()
        valid = [max(token, 0) for token in chosen]
        logits.scatter_(1, index_on(valid, logits.device)[:, None], float("inf"))
        return logits
