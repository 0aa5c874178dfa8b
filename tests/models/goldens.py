"""What transformers generates, for tests with real models."""

from collections.abc import Sequence

import torch

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
