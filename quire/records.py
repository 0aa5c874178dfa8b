"""What became of a request: its states, and the fields of its terminal record.

Knows no encoding: quire/wire/ reads and writes these records. They are apart from it, so that the
errors of quire/errors.py can carry one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """The state of a request in the broker. The last four are terminal and never change again.

    RUNNING: a worker has claimed it; Activity says whether the worker computes it.
    """

    SCHEDULED = "scheduled"
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        return self not in (State.SCHEDULED, State.QUEUED, State.RUNNING)


class Activity(StrEnum):
    """What a claimed request does in its worker.

    WAITING: nothing of it was computed by this claim. PREFILLING: its prompt is computed, or, after
    a takeover or a preemption, its prompt and its output so far. DECODING: each step brings tokens.
    PREEMPTED: it has given its memory to another request, and waits to continue.
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"

    @property
    def is_computing(self) -> bool:
        """Whether the steps of the worker compute the request."""
        return self in (Activity.PREFILLING, Activity.DECODING)


class FinishReason(StrEnum):
    """Why a generation ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `cached_tokens` are the prompt tokens whose KV came from the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Why a request failed: a stable code, a sentence, and if it was rejected the field."""

    code: str
    message: str
    field: str | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds on the broker's clock from submit to first claim, to first token, and to the end.

    None for what the request never reached.
    """

    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    total_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Execution:
    """What the last claim of a request did on its worker, measured with the clock of the worker.

    Earlier claims are not in it: a worker that died could not report its part. Seconds are None for
    a phase that the claim did not complete.

    Args:
        waiting_seconds: from the claim to the first step that computed the request.
        prefill_seconds: from there to the first token of this claim.
        decode_seconds: from there to the end.
        preempted_seconds: how long the request was preempted; a part of the phases above.
        processing_seconds: from the first step to the end.
        decode_steps: steps that brought tokens after the first one; with speculative decoding fewer
            than tokens.
        tokens_per_second: tokens after the first one, per second of `decode_seconds`; None with
            fewer than two tokens.
        swaps: preemptions by swap, of all `Completion.preemptions`.
    """

    waiting_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    preempted_seconds: float = 0.0
    processing_seconds: float | None = None
    decode_steps: int = 0
    tokens_per_second: float | None = None
    swaps: int = 0


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the likeliest tokens at an index: its natural log-probability, and its text.

    `raw` are its bytes if `text` has U+FFFD, as they may be a part of a character; empty if the
    worker does not know them.
    """

    token_id: int
    logprob: float
    text: str
    raw: bytes = b""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token, and the likeliest tokens at its index, best first.

    The numbers are the model's own: they are computed in single precision from the unchanged
    logits, before temperature, penalties, biases and every other parameter. So the sampled token
    may be missing from `top`. `text` is the text of this token alone, as it is after other text;
    bytes of an incomplete character show as U+FFFD. `raw` is as that of TopLogprob.
    """

    token_id: int
    logprob: float
    text: str
    top: tuple[TopLogprob, ...] = ()
    raw: bytes = b""


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of the prompt, how likely the model found it there, and the likeliest at its index.

    `logprob` is None for the first token, as there is nothing before it; it has no `top` either.
    Numbers, `text` and `raw` are as those of TokenLogprob.
    """

    token_id: int
    logprob: float | None
    text: str
    top: tuple[TopLogprob, ...] = ()
    raw: bytes = b""


@dataclass(frozen=True, slots=True)
class TerminalRecord:
    """The fields of a Completion, which is the one terminal record of a request.

    A Completion adds the encoding, and says who fills in which field.
    """

    request_id: str
    state: State
    finish_reason: FinishReason
    usage: Usage = Usage()
    error: ErrorInfo | None = None
    timing: Timing = Timing()
    #: Measured by the worker that ended the request; None if it had no engine.
    execution: Execution | None = None
    attempts: int = 0
    resumes: int = 0
    preemptions: int = 0
    model: str | None = None
    #: The engine that finished differs from the one that began, in revision, dtype or backend.
    resumed_fingerprint_changed: bool = False
    #: Text that was held back, because a stop string could begin in it, until the generation ended.
    #: All tokens were published by then, so it is in no chunk. `text` includes it.
    tail: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    token_ids: tuple[int, ...] = ()
    #: For each token, the length of `text` after it; empty if a writer did not send it.
    text_ends: tuple[int, ...] = ()
    #: The hash of all tokens of the log; see TokenChunk.
    prefix_hash: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    #: One for each token of the prompt if the request has `prompt_logprobs`, else none.
    prompt_tokens: tuple[PromptToken, ...] = ()
    #: The ids of the prompt if the request has `return_token_ids` or `prompt_logprobs`, else none.
    prompt_token_ids: tuple[int, ...] = ()
    #: That of the engine that ended it, with the adapter; empty without one, or of older versions.
    fingerprint: str = ""
    #: The vector of a request for an embedding or for scores: float32, little-endian.
    vector: bytes = b""
    #: The model's name of the class with the largest score; empty without scores.
    label: str = ""

    def __post_init__(self) -> None:
        assert self.state.is_terminal, f"a completion cannot be {self.state}"
