"""Log-probabilities of a token, sampled or of the prompt, and of the top tokens at its index.

They are the natural logarithms of the softmax of the model's raw logits, in float32, before
temperature, penalties, biases or masks are applied.
"""

from typing import NamedTuple


class Logprobs(NamedTuple):
    """The log-probabilities of one token. `top` has pairs of id and log-probability, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
