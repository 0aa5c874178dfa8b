"""The gate for figures: it checks that the tokens of a run are those of the model.

First, each output must have the requested length. Then the reference checks the tokens:
transformers in float32 reads a prompt with its output, and says for each token which one it would
have chosen. In float32 a correct engine agrees everywhere, so it has generated the reference's
tokens. In bfloat16 rounding decides between tokens that are nearly equally likely. There our engine
must agree at least as often as each peer with the same prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.models import model_folder
from benchmarks.common.workloads import Workload

#: Workload -> the number of requests that the reference reads. With all of W4 it takes minutes.
GATED_REQUESTS = {"W1": 64, "W2": 1, "W3": 24, "W4": 1, "W5": 1, "paths": 8, "contexts": 1}


@dataclass(frozen=True, slots=True)
class Agreement:
    """The number of tokens that the reference would have chosen, too, and of all tokens."""

    num_agreed: int
    num_tokens: int

    @property
    def share(self) -> float:
        return self.num_agreed / self.num_tokens

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(self.num_agreed + other.num_agreed, self.num_tokens + other.num_tokens)


NOTHING_READ = Agreement(0, 0)


class Reference:
    """transformers in float32, loaded at the first use.

    Args:
        model: a name of benchmarks.common.models.
        gguf_file: the file whose dequantized weights it has instead.
    """

    def __init__(self, model: str, gguf_file: Path | None = None) -> None:
        self._name, self._gguf_file = model, gguf_file
        self._model: Any = None

    def agreement(self, workload: Workload, tokens: Sequence[Sequence[int]]) -> Agreement:
        """Counts the tokens that the reference would have chosen after the same tokens."""
        import torch

        if self._model is None:
            from transformers import AutoModelForCausalLM

            file = self._gguf_file
            self._model = AutoModelForCausalLM.from_pretrained(
                model_folder(self._name) if file is None else file.parent,
                **({} if file is None else {"gguf_file": file.name}),
                dtype=torch.float32,
                attn_implementation="sdpa",
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
    """Whether each request of a run has exactly the requested number of tokens."""
    wanted = [item.num_output_tokens for item in workload.items]
    return [len(output) for output in tokens] == wanted
