"""The engine's mutable record of one generation. Does not know who asked for it.

Only the Scheduler and its parts mutate a Request, and its state only through `transition()`. Beside
the tokens one counter is kept: how many of them are still to be computed. All other quantities are
derived, so that nothing can drift apart; and while a request decodes the counter stays at 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.constraint import Constraint
from engine.logprobs import Logprobs
from engine.picture import Picture
from engine.prompt_lookup import PromptLookup
from engine.sampling_params import SamplingParams

#: The slot of a request that has none.
NO_SLOT = -1


class Priority(IntEnum):
    """Four classes; a higher value wins."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    CRITICAL = 3


class RequestState(StrEnum):
    """Where a request is in the engine. FINISHED is absorbing."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Activity(StrEnum):
    """What a request does that has not ended. It is derived from the state and the counters."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"


class FinishReason(StrEnum):
    """Why a generation ended. EOS, a stop condition and the length limit are told apart."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    #: The request's own fields left no token to choose; `Request.faulty_field` names the one.
    REFUSED = "refused"
    #: The vector of the prompt is computed; only for requests with `pooling`.
    POOLED = "pooled"
    #: The engine gave the request up unfinished (drain); another engine may go on from its tokens.
    RELEASED = "released"


LEGAL_TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.PREEMPTED, RequestState.FINISHED}),
    RequestState.PREEMPTED: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """Asks for a vector of the prompt instead of an output.

    Args:
        dimensions: how many numbers of the vector are kept; None for all.
        second_from: index of the first token of the second text, for a pair of texts; None for one
            text.
        activates: whether scores become probabilities.
    """

    dimensions: int | None = None
    second_from: int | None = None
    activates: bool = True


class TextStream(Protocol):
    """Turns output token ids into text, one at a time.

    `engine.output.detokenizer.Detokenizer` is the real one.
    """

    def append(self, token_id: int) -> bool:
        """Take the next output token; True if a stop string is now complete."""
        ...

    def take_text(self, *, final: bool) -> str:
        """The text that became certain since the last call; all of the rest when `final`."""
        ...


@dataclass(slots=True)
class RequestTimes:
    """Readings of the engine's clock in seconds; None until the event happened.

    waiting = first_scheduled - arrival; prefill = first_token - first_scheduled;
    decode = finished - first_token. They add up to finished - arrival and never move afterwards.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    preempted_at: float | None = None
    preempted_seconds: float = 0.0

    def end_preemption(self, now: float) -> None:
        """Count the time since it was preempted, if it is."""
        if self.preempted_at is not None:
            self.preempted_seconds += now - self.preempted_at
            self.preempted_at = None


@dataclass(slots=True, eq=False)
class Request:
    """One generation. A request taken over from a dead worker simply starts with output tokens.

    Args:
        request_id: unique among the requests alive in the engine.
        prompt_token_ids: at least one id, each below the vocabulary size.
        sampling: its `max_tokens` counts all `output_token_ids`, the resumed ones included.
        output_token_ids: tokens already published by an earlier claim; empty for a new request.
        deadline: reading of the engine's clock after which the generation is given up; None for
        never.
        due: reading of the engine's clock at which its target latency is over; it ranks the request
        and never ends it. None for none.
        cache_salt: requests share prefix-cache blocks only with requests of the same salt, and of
        the same adapter.
        adapter: name of the LoRA adapter; None for the model alone.
        text: receives every output token, the resumed ones included; None when nobody wants text.
        constraint: says which tokens may come next, and when the output is complete; None for any.
        pooling: asks for a vector of the prompt; the request then has no output. None for an
        output. With `prompt_logprobs` the vector has the log-probabilities of these tokens.
        pictures: the pictures of the prompt, in the order of their tokens.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float
    priority: Priority = Priority.NORMAL
    output_token_ids: list[int] = field(default_factory=list)
    deadline: float | None = None
    due: float | None = None
    cache_salt: str = ""
    adapter: str | None = None
    text: TextStream | None = None
    constraint: Constraint | None = None
    pooling: Pooling | None = None
    pictures: tuple[Picture, ...] = ()

    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    #: The field of the request that is at fault; only where the reason is REFUSED.
    faulty_field: str | None = None
    #: Tokens whose KV is not computed: 1 while it decodes, more while it catches up.
    num_pending_tokens: int = field(init=False)
    #: A launched step will bring another token, which `num_tokens` counts already.
    expects_token: bool = False
    #: Prompt tokens found in the prefix cache at first admission.
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    #: Log-probabilities of its prompt's tokens, from `prompt_logprobs_from` on; complete with the
    #: first output token. A request that is resumed has none: they were reported with that token.
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    #: The vector of the prompt, [numbers] in float32; only where the reason is POOLED.
    vector: NDArray[np.float32] | None = None
    #: Tokens that came as the accepted part of a draft, and so without a step of their own.
    num_accepted_draft_tokens: int = 0
    #: What the policy adds to the arrival time, in seconds; the lower, the better.
    standing: float = 0.0
    #: Order in the queue, lower is sooner: arrival time plus standing, and a number that orders
    #: equals. Given once by the Scheduler, so that preemption keeps it.
    rank: tuple[float, int] = (0.0, 0)
    #: Length when last admitted; a victim must have grown since, or two requests could thrash.
    num_tokens_at_admission: int = 0
    num_resumed_tokens: int = 0
    #: Created when its next tokens are guessed for the first time.
    lookup: PromptLookup | None = None
    #: Hashes of its first full blocks; the KV cache appends to them as it needs more.
    block_hashes: list[bytes] = field(default_factory=list)
    #: Its slots for a recurrent state, on the device and on the host; set by `StateSlots` alone.
    state_slot: int = NO_SLOT
    host_state_slot: int = NO_SLOT
    #: Length of the cached prefix found at admission, also of the part without a snapshot of the
    #: recurrent state; 0 for a model without such a state.
    parted_at: int = 0
    times: RequestTimes = field(init=False)

    def __post_init__(self) -> None:
        self.num_pending_tokens = self.num_tokens
        self.num_resumed_tokens = len(self.output_token_ids)
        self.times = RequestTimes(arrival=self.arrival_time)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output, an expected token included; the KV of the last is not computed yet."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.expects_token

    @property
    def order(self) -> tuple[float, tuple[float, int]]:
        """Order among the running requests: the higher, the sooner it gives way."""
        return self.standing, self.rank

    @property
    def output_index(self) -> int:
        """Index of the output token that its next step yields."""
        return len(self.output_token_ids) + self.expects_token

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the cache; this number chases `num_tokens`."""
        return self.num_tokens - self.num_pending_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, count: int) -> None:
        self.num_pending_tokens = self.num_tokens - count

    @property
    def last_token_id(self) -> int:
        """The last token that is known."""
        return (self.output_token_ids or self.prompt_token_ids)[-1]

    @property
    def max_cached_tokens(self) -> int:
        """The most tokens whose KV may come from a cache; those behind them must give logits."""
        sampling = self.sampling
        if sampling.prompt_logprobs is None or self.output_token_ids:
            return self.num_tokens - 1
        return min(self.num_tokens, sampling.prompt_logprobs_from) - 1

    def num_scored(self, start: int, end: int) -> int:
        """How many tokens of the prompt get a log-probability when `start .. end - 1` are computed.

        None after the first output token, with which all of them were reported.
        """
        if self.output_token_ids:
            return 0
        return len(self.sampling.scored(start, end, num_prompt_tokens=self.num_prompt_tokens))

    def take_prompt_logprobs(self, scored: range, logprobs: Sequence[Logprobs]) -> None:
        """Record log-probabilities; of tokens that were computed again, the new ones."""
        first = scored.start - self.sampling.prompt_logprobs_from
        assert first <= len(self.prompt_logprobs)
        self.prompt_logprobs[first:] = logprobs

    def likelihoods(self) -> NDArray[np.float32]:
        """The log-probabilities of its prompt's tokens, [tokens], without their alternatives."""
        return np.array([one.logprob for one in self.prompt_logprobs], dtype=np.float32)

    def token_ids_between(self, start: int, end: int) -> list[int]:
        """Tokens `start .. end - 1` of prompt and output, as many of them as are known."""
        offset = len(self.prompt_token_ids)
        if start >= offset:
            return self.output_token_ids[start - offset : end - offset]
        prompt = self.prompt_token_ids[start:end]
        return prompt if end <= offset else prompt + self.output_token_ids[: end - offset]

    @property
    def needs_known_tokens(self) -> bool:
        """Whether its next token cannot be sampled before the last one is known on the host."""
        return self.constraint is not None or self.sampling.has_penalties

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def activity(self) -> Activity:
        """What it does now; with more than one token to compute it catches up."""
        assert not self.is_finished
        if self.state is not RequestState.RUNNING:
            return Activity(self.state)
        is_prefilling = self.num_pending_tokens > 1 or self.pooling is not None
        return Activity.PREFILLING if is_prefilling else Activity.DECODING

    @property
    def progressed_since_admission(self) -> bool:
        return self.num_tokens > self.num_tokens_at_admission

    def expect_token(self) -> None:
        """Count the token that a launched step will bring; its own KV is still to be computed."""
        assert not self.expects_token
        self.expects_token = True
        self.num_pending_tokens += 1

    def append_token(self, token_id: int) -> None:
        """Record the expected token."""
        assert self.expects_token
        self.expects_token = False
        self.output_token_ids.append(token_id)

    def transition(self, state: RequestState) -> None:
        """Move to `state`; an illegal move is our bug."""
        assert state in LEGAL_TRANSITIONS[self.state], f"{self.request_id}: {self.state} -> {state}"
        self.state = state


@dataclass(frozen=True, slots=True)
class Run:
    """The tokens that one step brought to a request with a draft, each with its own text.

    Their texts are kept apart because the published log may end after any of them, and whoever
    resumes there takes the text up to that token as published.
    """

    request: Request
    start: int
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Progress:
    """The new tokens of one step, as columns in batch order: request, output index, token id.

    `starts` counts from the first token ever published. Requests with a draft, which may have got
    several tokens, are in `runs` instead, and those with a vector in `pooled`.
    """

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    #: Requests whose vector this step brought; they have ended.
    pooled: list[Request] = field(default_factory=list)

    def add(self, request: Request) -> None:
        """Add the token just appended to a request."""
        self.requests.append(request)
        self.starts.append(request.num_output_tokens - 1)
        self.token_ids.append(request.output_token_ids[-1])


def take_text(request: Request, *, final: bool) -> str:
    """The text of a request that became final since the last call; empty if it has no text."""
    return "" if request.text is None else request.text.take_text(final=final)
