"""The gate before any figure counts: are the tokens of a run what the model says?

Lengths must be the ones asked for. Beyond that the reference decides: transformers in float32,
which is given a prompt with its output and says at each place which token it would have chosen. In
float32 an engine that computes right agrees everywhere, which is the same as having generated the
reference's tokens. In bfloat16 rounding moves near-ties: there we agree no less often than any peer
that was given the same prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.models import model_folder
from benchmarks.common.workloads import Workload

#: Requests of a run that the reference reads: prompts of W4 alone would take it minutes.
GATED_REQUESTS = {"W1": 64, "W2": 1, "W3": 24, "W4": 1}


@dataclass(frozen=True, slots=True)
class Agreement:
    """Places at which a run chose the reference's token, of how many."""

    num_agreed: int
    num_tokens: int

    @property
    def share(self) -> float:
        return self.num_agreed / self.num_tokens

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(self.num_agreed + other.num_agreed, self.num_tokens + other.num_tokens)


NOTHING_READ = Agreement(0, 0)


class Reference:
    """transformers in float32, loaded when first asked."""

    def __init__(self, model: str) -> None:
        self._name = model
        self._model: Any = None

    def agreement(self, workload: Workload, tokens: Sequence[Sequence[int]]) -> Agreement:
        """How often the reference, given all tokens before, would have chosen the token."""
        import torch

        if self._model is None:
            from transformers import AutoModelForCausalLM

            self._model = AutoModelForCausalLM.from_pretrained(
                model_folder(self._name), dtype=torch.float32, attn_implementation="sdpa"
            ).eval()
        total = NOTHING_READ
        gated = GATED_REQUESTS[workload.name]
        for item, output in list(zip(workload.items, tokens, strict=True))[:gated]:
            ids = torch.tensor([[*item.prompt_token_ids, *output]])
            with torch.inference_mode():
                logits = self._model(ids, logits_to_keep=len(output) + 1, use_cache=False).logits
            chosen = logits[0, :-1].argmax(dim=-1)
            agreed = int((chosen == torch.tensor(output)).sum())
            total += Agreement(agreed, len(output))
        return total


def right_lengths(workload: Workload, tokens: Sequence[Sequence[int]]) -> bool:
    """Whether every request of a run has exactly the tokens that it asked for."""
    wanted = [item.num_output_tokens for item in workload.items]
    return [len(output) for output in tokens] == wanted
