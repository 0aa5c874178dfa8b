"""What the samplers for both of vLLM's runners share. Knows no vllm.

`engine.vllm.processor` has the sampler of the first runner, `engine.vllm.slots` of the second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.constraint import TokenBitmask
from engine.model.causal_model import BROKEN
from engine.model.device.transfer import ToHost
from engine.model.sampling.sampler import Draws, Sampler, guess_of
from engine.vllm.row import NOTHING_TO_SAY, Report, Row, Scores

#: The attribute of vLLM's ModelRunnerOutput with the Report of the sampler.
REPORT = "quire_report"
#: The key of the end-of-sequence tokens in vLLM's `additional_config`.
EOS_KEY = "quire_eos_token_ids"


class DrawnStep:
    """The tokens that one step has drawn; only `wait` waits for the device."""

    def __init__(self, rows: Sequence[Row], draws: Draws) -> None:
        self._ids = [row.request_id for row in rows]
        self._draws = draws
        self._arriving = ToHost(draws.tokens)

    def wait(self) -> tuple[Sequence[int], Mapping[int, int], Report]:
        """The token of each row, those that `Draws.guesses` has wrong by row, and the report."""
        chosen = self._arriving.wait()
        guesses = list(map(guess_of, chosen))
        wrong: dict[int, int] = {}
        if self._draws.settle(chosen):
            wrong = {
                at: token for at, token in enumerate(chosen) if token not in (guesses[at], BROKEN)
            }
        told = {self._ids[at]: one for at, one in self._draws.logprobs(chosen).items()}
        broken = frozenset[str]()
        if BROKEN in chosen:
            pairs = zip(self._ids, chosen, strict=True)
            broken = frozenset(id_ for id_, token in pairs if token == BROKEN)
        return chosen, wrong, Report(broken, told)


class RowSampler:
    """Quire's sampler for rows of vLLM's.

    Args:
        config: vLLM's `additional_config`.
    """

    def __init__(self, config: Any) -> None:
        assert isinstance(config, dict)
        self._sampler = Sampler(frozenset(config[EOS_KEY]))
        self._masks: Mapping[str, TokenBitmask] = {}

    def expect(self, masks: Mapping[str, TokenBitmask]) -> None:
        """Set which tokens may come in this step, by request id, for rows with a constraint."""
        self._masks = masks

    def _draw(self, logits: torch.Tensor, rows: Sequence[Row]) -> Draws:
        for row in rows:
            row.expect(self._masks.get(row.request_id))
        return self._sampler.draw(logits, rows)


def attach_report(output: Any, report: Report, scores: Mapping[str, Scores]) -> None:
    """Add a report to vLLM's ModelRunnerOutput of a step, if it says anything."""
    if scores:
        report = replace(report, scores=scores)
    if report != NOTHING_TO_SAY:
        setattr(output, REPORT, report)
