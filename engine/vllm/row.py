"""One request as the sampler inside vLLM sees it. Knows neither vLLM nor torch."""

from collections.abc import Sequence

import numpy as np

from engine.constraint import Constraint, Failure, TokenBitmask
from engine.logprobs import Logprobs
from engine.request import Request
from engine.sampling_params import SamplingParams

#: The key of a Row in the `extra_args` of vLLM's sampling parameters.
EXTRA_ARG = "quire"


class Row:
    """A row of the sampler, made when a request is passed to vLLM.

    For vLLM the prompt is the true prompt followed by the tokens that exist already, and the output
    starts behind them. The sampler needs the true prompt, and the whole output.

    Args:
        failure: set by the sampler if the row has no token; then vLLM's token means nothing.
        told: set by the sampler with each token, if the request wants log-probabilities. vLLM's own
            would be computed by code that it compiles at the first request that wants them, for
            many seconds in which all others wait.
    """

    def __init__(self, request: Request, constraint: Constraint | None) -> None:
        self.request_id = request.request_id
        self.sampling: SamplingParams = request.sampling
        self.prompt_token_ids: Sequence[int] = request.prompt_token_ids
        self.constraint = constraint
        self.failure: str | None = None
        self.told: Logprobs | None = None
        self._output = list(request.output_token_ids)
        self._num_before = len(self._output)
        self._live: Sequence[int] = ()

    def attach(self, live: Sequence[int]) -> None:
        """Follow vLLM's list of the tokens that it has generated, to which it appends."""
        self._live = live

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The whole output so far."""
        num_new = len(self._live) + self._num_before - len(self._output)
        if num_new > 0:
            self._output += self._live[-num_new:]
        return self._output

    @property
    def output_index(self) -> int:
        return len(self.output_token_ids)


class GuardedConstraint:
    """A constraint whose errors end its own request.

    An exception inside vLLM's step would end the engine, and with it all its requests.
    """

    def __init__(self, constraint: Constraint, *, vocab_size: int) -> None:
        self._constraint = constraint
        self._vocab_size = vocab_size
        self._failure: Failure | None = None

    @property
    def field(self) -> str:
        return self._constraint.field

    @property
    def failure(self) -> Failure | None:
        return self._failure or self._constraint.failure

    def allowed(self, output_token_ids: Sequence[int]) -> TokenBitmask:
        """See `engine.constraint.Constraint`; no token after an error."""
        try:
            return self._constraint.allowed(output_token_ids)
        except Exception as error:  # noqa: BLE001 - it must cost one request, and not all.
            self._failure = Failure(repr(error))
            return np.zeros(-(-self._vocab_size // 8), dtype=np.uint8)

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        """See `engine.constraint.Constraint`."""
        return self._constraint.is_complete(output_token_ids)

    def draft(self, output_token_ids: Sequence[int], guess: Sequence[int]) -> Sequence[int]:
        """See `engine.constraint.Constraint`."""
        return self._constraint.draft(output_token_ids, guess)

    def assuming(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> Constraint:
        """See `engine.constraint.Constraint`."""
        return self._constraint.assuming(output_token_ids, draft)
