"""Log-probabilities of a token and of the likeliest tokens at its place. Knows no request.

They are natural logarithms of the softmax of the model's raw logits, in float32, before
temperature, penalties, biases or masks are applied.
"""

from typing import NamedTuple


class Logprobs(NamedTuple):
    """Of one sampled token. `top` are pairs of token id and log-probability, the best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
