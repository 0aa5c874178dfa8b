"""What a worker uses of an engine: request records in, outputs out, one `step()` at a time.

Knows no scheduler, no cache and no device. `engine.engine.Engine` is the native implementation;
another one may keep its requests in another library, as long as it keeps this contract:

- The tokens of a request are a function of the request alone: of prompt, sampling parameters and
  output so far, whatever runs beside it. So a request that another worker has begun continues with
  the same tokens.
- `step` reports each token once, in order, and each request ends once.
- All methods belong to one thread, except `abort`, which any thread may call.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from engine.config import EngineConfig
from engine.logprobs import Logprobs
from engine.request import Activity, FinishReason, Request
from engine.stats import EngineSnapshot

Clock = Callable[[], float]


class RequestOutput(NamedTuple):
    """What one step added to one request; a tuple, because a step makes one per running request.

    A step that accepts drafted tokens makes one for each token.

    `start` is the output index of the first new token, counted from the first one ever published: a
    request resumed with 57 tokens continues at 57. `finish_reason` is set on the last output only.
    `request` is the live record, to be read for usage and times and never to be changed.
    `logprobs` has one entry per token if the request asks for them, and is empty otherwise.
    `prompt_logprobs` has one per token of the prompt from `prompt_logprobs_from` on, and comes with
    the first token ever generated for the request.
    """

    request: Request
    start: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()

    @property
    def request_id(self) -> str:
        return self.request.request_id


class TokenEngine(Protocol):
    """The engine of a worker."""

    @property
    def config(self) -> EngineConfig:
        """The sizes and rules by which it was built."""
        ...

    def add_request(self, request: Request) -> None:
        """Queue a request; one with output tokens is resumed behind them.

        Raises:
            RequestRejected: this engine can never serve it; the field is named.
            DuplicateRequest: a request with this id is alive in this engine.
        """
        ...

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        *,
        error: str | None = None,
    ) -> None:
        """End a request early, whatever its state; unknown and finished ids are ignored.

        Callable from any thread. The next `step()` returns its last output.
        """
        ...

    def step(self, clock: Clock) -> list[RequestOutput]:
        """Compute one batch and return what it added, finished requests included.

        Raises:
            DeviceFailed: the process must end; nothing of the failed step was reported.
        """
        ...

    def has_work(self) -> bool:
        """Whether a `step()` now would do anything."""
        ...

    def alive_request_ids(self) -> list[str]:
        """Ids of all requests that are not finished."""
        ...

    def take_activities(self) -> dict[str, Activity]:
        """What requests do by now, by id: those for which it may have changed since the last call.

        A request of which nothing was said yet waits. An engine that cannot tell returns none.
        """
        ...

    def snapshot(self) -> EngineSnapshot:
        """One consistent reading of queues, memory and counters."""
        ...

    def violations(self) -> list[str]:
        """The engine's own invariants that do not hold now; empty when all is well."""
        ...
