"""The interface between the engine and vLLM: requests in, one token per request and step out.

Knows no vllm, so that the engine can be tested without it; `engine.vllm.library` implements it.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.logprobs import Logprobs
from engine.request import Request


class NewToken(NamedTuple):
    """The next token of one request.

    `num_cached_tokens` counts the tokens that were found in the prefix cache when vLLM admitted the
    request. `logprobs` is None if the request asks for none. With a `failure` the row had no
    possible token, and `token_id` means nothing.
    """

    request_id: str
    token_id: int
    num_cached_tokens: int
    logprobs: Logprobs | None = None
    failure: str | None = None


class ScoredPrompt(NamedTuple):
    """Log-probabilities of tokens of one prompt, from the index `first` on.

    A prompt that one step does not compute brings one for each of its chunks, in order, the last
    one with its first token. With a `failure` one of them is no number.
    """

    request_id: str
    first: int
    logprobs: Sequence[Logprobs]
    failure: str | None = None


class StepTokens(NamedTuple):
    """What one step has computed: requests, tokens of prompts, tokens of decodes."""

    num_rows: int
    num_prefill_tokens: int
    num_decode_tokens: int


class Backend(Protocol):
    """vLLM, as far as the engine uses it. All methods belong to the engine's thread."""

    def add(self, request: Request) -> None:
        """Pass a request to vLLM, with the tokens that it has already.

        One that has none is scored from the beginning, if it asks for log-probabilities of its
        prompt.
        """
        ...

    def remove(self, request_ids: Sequence[str]) -> None:
        """Take requests out; full blocks stay in the prefix cache. Unknown ids are ignored."""
        ...

    def step(self) -> Sequence[NewToken]:
        """Compute one step.

        Raises:
            DeviceFailed: vLLM failed, and with it all its requests.
        """
        ...

    @property
    def last_step(self) -> StepTokens:
        """What the last step has computed."""
        ...

    @property
    def last_scored(self) -> Sequence[ScoredPrompt]:
        """The log-probabilities of prompts that the last step has computed."""
        ...

    def waiting_ids(self) -> Sequence[str]:
        """The requests that were added and have no blocks, first the one that comes next."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a request can take; with prefix caching some of them hold cached tokens."""
        ...
