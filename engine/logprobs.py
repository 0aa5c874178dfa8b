"""How likely a token was, and which were the likeliest at its place. Does not know what was asked.

The numbers are the model's own: natural logarithms of the softmax of its logits as they came, in
float32, before anything that a request asked for has changed them.
"""

from typing import NamedTuple


class Logprobs(NamedTuple):
    """Of one sampled token. `top` are pairs of token id and log-probability, the best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
