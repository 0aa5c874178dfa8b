"""Quire's sampler inside vLLM: a logits processor after which vLLM's argmax is Quire's token.

vLLM makes one for each process that samples, and says which request is in which row of the logits.
"""

from collections.abc import Mapping, Sequence

import torch
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from engine.constraint import TokenBitmask
from engine.logprobs import Logprobs
from engine.model.causal_model import BROKEN
from engine.model.device.transfer import index_on
from engine.model.sampling.sampler import Sampler
from engine.vllm.row import EXTRA_ARG, Report, Row

#: The key of the end-of-sequence tokens in vLLM's `additional_config`.
EOS_KEY = "quire_eos_token_ids"


class QuireSampler(LogitsProcessor):
    """Samples with `engine.model.sampling.sampler`, on the device of the logits."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        is_pin_memory: bool,  # noqa: FBT001 - vLLM's signature.
    ) -> None:
        del device, is_pin_memory
        config = vllm_config.additional_config
        assert isinstance(config, dict)
        self._sampler = Sampler(frozenset(config[EOS_KEY]))
        #: By row of the logits.
        self._rows: dict[int, Row] = {}
        self._in_order: list[Row] | None = None
        #: Indices of rows whose prompts are to be scored; some of them may be done by now.
        self._scoring: Sequence[int] = ()
        self._masks: Mapping[str, TokenBitmask] = {}
        self._report: Report | None = None

    def expect(self, masks: Mapping[str, TokenBitmask]) -> None:
        """Set which tokens may come in the next step, by request id, for rows with a constraint."""
        self._masks = masks

    def scoring_rows(self) -> Sequence[tuple[int, Row]]:
        """The rows that want log-probabilities of their prompts, with their indices."""
        if self._scoring:
            self._scoring = [index for index in self._scoring if self._rows[index].wants_scores]
        return [(index, self._rows[index]) for index in self._scoring]

    def take_report(self) -> Report | None:
        """The report of the last step, once; None if there is nothing to say."""
        report, self._report = self._report, None
        return report

    def is_argmax_invariant(self) -> bool:
        """It decides the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests through the rows: removed, then added, then moved."""
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
        rows = self._in_order
        for row in rows:
            row.expect(self._masks.get(row.request_id))
        draws = self._sampler.draw(logits, rows)
        chosen: list[int] = draws.tokens.tolist()
        draws.settle(chosen)
        told = {rows[at].request_id: one for at, one in draws.logprobs(chosen).items()}
        self._keep_report(rows, chosen, told)
        chosen = [max(token, 0) for token in chosen]
        logits.scatter_(1, index_on(chosen, logits.device)[:, None], float("inf"))
        return logits

    def _keep_report(
        self, rows: list[Row], chosen: list[int], told: Mapping[str, Logprobs]
    ) -> None:
        broken = frozenset[str]()
        if BROKEN in chosen:
            pairs = zip(rows, chosen, strict=True)
            broken = frozenset(row.request_id for row, token in pairs if token == BROKEN)
        self._report = Report(broken, told) if broken or told else None
