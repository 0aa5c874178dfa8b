"""What transformers generates, for tests with real models."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine.request import Request
from service.worker.model.text import ModelTokenizer
from tests.engine.model.builders import make_request, make_runner

#: Two logits that differ by less may swap when additions are ordered differently.
NEAR_TIE = 1e-3


@torch.inference_mode()
def generated(model, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy answer, up to its end token; no two tokens may be nearly as likely."""
    output = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    for index, logits in enumerate(output.logits):
        first, second = logits[0].topk(2).values.tolist()
        assert first - second > NEAR_TIE, f"a near-tie at token {index} after {prompt[:40]}"
    return tokens


class Subject:
    """A served GGUF file, its tokenizer, prompts, and what transformers generates from each."""

    def __init__(
        self,
        file: Path,
        prompts_of: Callable[[ModelTokenizer], list[list[int]]],
        *,
        num_blocks: int,
        num_tokens: int,
    ) -> None:
        self.runner = make_runner(file, block_size=16, num_blocks=num_blocks, num_host_blocks=64)
        self.tokenizer = ModelTokenizer.load(str(file))
        self.prompts = prompts_of(self.tokenizer)
        self._num_tokens = num_tokens
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32
        )
        self.expected = {
            str(index): generated(model, prompt, num_tokens)
            for index, prompt in enumerate(self.prompts)
        }

    def requests(self, *, published: int = 0) -> list[Request]:
        """One for each prompt whose answer has more than the published tokens."""
        return [
            make_request(
                str(index),
                prompt,
                output=self.expected[str(index)][:published],
                max_tokens=self._num_tokens,
                ignore_eos=False,
            )
            for index, prompt in enumerate(self.prompts)
            if len(self.expected[str(index)]) > published
        ]
