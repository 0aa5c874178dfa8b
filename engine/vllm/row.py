"""One request as the sampler inside vLLM sees it. Knows neither vLLM nor torch.

vLLM may have a process for each rank. So a Row is sent there once, when the request is passed to
vLLM. The masks of constraints are computed in the engine's process and sent before each step
samples; what a sampler reports comes back with the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from engine.constraint import Constraint, Failure, TokenBitmask
from engine.logprobs import Logprobs
from engine.request import Request
from engine.sampling_params import SamplingParams

#: The key of a Row in the `extra_args` of vLLM's sampling parameters.
EXTRA_ARG = "quire"


class Generated(Protocol):
    """What vLLM says of the tokens that it has generated for a request."""

    def __len__(self) -> int: ...

    def __getitem__(self, which: slice, /) -> Sequence[int]: ...


class Row:
    """A row of the sampler, made when a request is passed to vLLM.

    For vLLM the prompt is the true prompt followed by the tokens that exist already, and the output
    starts behind them. The sampler needs the true prompt, and the whole output.

    Args:
        mask_bytes: the length of the masks of its constraint; None without a constraint.
    """

    def __init__(self, request: Request, *, mask_bytes: int | None = None) -> None:
        self.request_id = request.request_id
        self.sampling: SamplingParams = request.sampling
        self.prompt_token_ids: Sequence[int] = list(request.prompt_token_ids)
        self._mask_bytes = mask_bytes
        self._mask: TokenBitmask | None = None
        self._output = list(request.output_token_ids)
        self._num_before = len(self._output)
        self._live: Generated = ()

    def attach(self, live: Generated) -> None:
        """Follow what vLLM says of the tokens that it has generated; it grows."""
        self._live = live

    def expect(self, mask: TokenBitmask | None) -> None:
        """Set the tokens that may come in this step; None if its token will not be used."""
        self._mask = mask

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The whole output so far."""
        num_new = len(self._live) + self._num_before - len(self._output)
        if num_new > 0:
            self._output += self._live[-num_new:]
        return self._output

    @property
    def output_index(self) -> int:
        return self._num_before + len(self._live)

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of its prompt are still to come: none of its output exists."""
        return self.sampling.prompt_logprobs is not None and not self.output_index

    @property
    def constraint(self) -> "Row | None":
        """What says which tokens may come: the row itself, by the mask of the step."""
        return None if self._mask_bytes is None else self

    @property
    def failure(self) -> Failure | None:
        """None: why a mask has no token is known in the engine's process, where it was made."""
        return None

    def allowed(self, output_token_ids: Sequence[int]) -> TokenBitmask:
        """The mask of this step; all tokens if vLLM will not use the token."""
        del output_token_ids
        if self._mask is None:
            assert self._mask_bytes is not None
            return np.full(self._mask_bytes, 0xFF, dtype=np.uint8)
        return self._mask


class Masks(dict[str, TokenBitmask]):
    """The masks of one step by request id, in the place of vLLM's own of structured outputs."""


class Scores(NamedTuple):
    """The log-probabilities of one prompt that one step has computed; see `ScoredPrompt`."""

    first: int
    logprobs: Sequence[Logprobs]
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank has to say of a step besides its tokens, by request id.

    Args:
        broken: requests without a possible token; vLLM's token means nothing.
        told: the log-probabilities of the tokens of requests that want them. vLLM's own would be
            computed by code that it compiles at the first request that wants them, for many seconds
            in which all others wait.
        scores: those of prompts, by vLLM's id: a prompt may bring some before it has a token, and
            after its request was removed.
        misled: requests, by vLLM's id, for which the device went on from another token than theirs.
    """

    broken: frozenset[str] = frozenset()
    told: Mapping[str, Logprobs] = field(default_factory=dict)
    scores: Mapping[str, Scores] = field(default_factory=dict)
    misled: frozenset[str] = frozenset()


NOTHING_TO_SAY = Report()


class GuardedConstraint:
    """A constraint whose errors end its own request.

    An exception inside vLLM's step would end the engine, and with it all its requests.
    """

    def __init__(self, constraint: Constraint, *, vocab_size: int) -> None:
        self._constraint = constraint
        self.mask_bytes = -(-vocab_size // 8)
        self._failure: Failure | None = None

    @property
    def failure(self) -> Failure | None:
        """See `engine.constraint.Constraint`."""
        return self._failure or self._constraint.failure

    def allowed(self, output_token_ids: Sequence[int]) -> TokenBitmask:
        """See `engine.constraint.Constraint`; no token after an error."""
        try:
            return self._constraint.allowed(output_token_ids)
        except Exception as error:  # noqa: BLE001 - it must cost one request, and not all.
            self._failure = Failure(repr(error))
            return np.zeros(self.mask_bytes, dtype=np.uint8)
