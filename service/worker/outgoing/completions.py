"""Builds the terminal records of the protocol from the engine's outputs and from errors.

Attempts, timing and metadata are left out: the broker adds them, because it saw all attempts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import RequestRejected
from engine.port import RequestOutput
from engine.request import FinishReason as EngineReason
from engine.request import Priority, Request
from quire.errors import InvalidRequest
from quire.wire.adapters import name_with
from quire.wire.protocol import Completion, ErrorInfo, Execution, FinishReason, State, Usage
from service.worker.model.adapters import is_same_chat

#: The engine's finish reason -> state and finish reason on the wire; RELEASED has no record.
ENDS = {
    EngineReason.EOS: (State.COMPLETED, FinishReason.EOS),
    EngineReason.STOP: (State.COMPLETED, FinishReason.STOP),
    EngineReason.LENGTH: (State.COMPLETED, FinishReason.LENGTH),
    # The wire has no reason of its own for it: older readers refuse a record with an unknown one.
    EngineReason.POOLED: (State.COMPLETED, FinishReason.STOP),
    EngineReason.CANCELLED: (State.CANCELLED, FinishReason.CANCELLED),
    EngineReason.DEADLINE: (State.EXPIRED, FinishReason.DEADLINE),
    EngineReason.ERROR: (State.FAILED, FinishReason.ERROR),
    EngineReason.REFUSED: (State.FAILED, FinishReason.REJECTED),
}
#: The field of a body that has the prompt, for kinds that do not call it `prompt`.
PROMPT_FIELDS = {
    "chat.completions": "body.messages",
    "embeddings": "body.input",
    "scores": "body.input",
}
#: The longest error message in a record, in characters; those of some libraries fill pages.
MAX_MESSAGE_LENGTH = 500

#: The longest name of a class in a record, in characters.
MAX_LABEL_LENGTH = 256

#: Errors for early ends; the same as the broker's for queued requests.
EARLY_ENDS = {
    FinishReason.CANCELLED: ErrorInfo("cancelled", "the request was cancelled"),
    FinishReason.DEADLINE: ErrorInfo(
        "deadline_exceeded", "the deadline passed before the request was complete"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Facts of a claimed request that its terminal record, log lines and metrics need."""

    request_id: str
    model: str
    adapter: str | None = None
    priority: Priority = Priority.NORMAL
    tenant: str = "default"
    kind: str = ""
    attempts: int = 1
    #: The number of tokens that it must publish before other requests may start; 0 unless it is a
    #: suspect.
    trial_tokens: int = 0
    #: The epoch of the claim: 1 for a request's first claim, larger for each later one.
    epoch: int = 1
    #: The time of the claim on the worker's clock.
    received: float = 0.0
    #: The request's arrival in the queue on the same clock; no two of a shard have the same.
    arrived: float = 0.0
    #: When its target latency is over, on the same clock; None without one.
    due: float | None = None
    #: The most tokens of an output without `max_tokens`; see `Claimed`.
    answer_limit: int | None = None
    #: Seconds from the submit to the claim.
    waited_seconds: float = 0.0
    num_resumed_tokens: int = 0
    #: The fingerprint of this engine, with the adapter if there is one.
    fingerprint: str = ""
    #: The names of the classes that the model scores, in their order.
    class_labels: tuple[str, ...] = ()
    #: The fingerprint of the engine that generated the resumed tokens, if it differs.
    other_fingerprint: str | None = None
    #: The ids of the caller's trace; see `logs.trace_ids`.
    trace_ids: Mapping[str, str] = field(default_factory=dict)
    #: The header that these ids are from; empty without one.
    traceparent: str = ""

    @property
    def fingerprint_changed(self) -> bool:
        return self.other_fingerprint is not None

    @property
    def model_name(self) -> str:
        """The model's name, with that of the adapter if there is one."""
        return name_with(self.model, self.adapter)

    @property
    def names(self) -> dict[str, object]:
        """The fields of every log line about this request; they identify it and the claim."""
        return {"request_id": self.request_id, "epoch": self.epoch, **self.trace_ids}

    @property
    def priority_name(self) -> str:
        """The priority class in labels and logs."""
        return self.priority.name.lower()


def completion_of(origin: Origin, output: RequestOutput) -> Completion:
    """The record for the engine's last output of a request."""
    assert output.finish_reason is not None
    state, reason = ENDS[output.finish_reason]
    request = output.request
    error = EARLY_ENDS.get(reason)
    if reason is FinishReason.ERROR:
        message = output.error or "the engine gave no reason"
        error = short_error("engine_error", message)
    elif reason is FinishReason.REJECTED:
        error = short_error("invalid_request", output.error or "", f"body.{request.faulty_field}")
    return Completion(
        request_id=origin.request_id,
        state=state,
        finish_reason=reason,
        usage=Usage(
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=request.num_output_tokens,
            cached_tokens=request.num_cached_tokens,
        ),
        error=error,
        preemptions=request.num_preemptions,
        execution=execution_of(request, received=origin.received),
        model=origin.model_name,
        resumed_fingerprint_changed=origin.fingerprint_changed,
        fingerprint=origin.fingerprint,
        vector=b"" if request.vector is None else request.vector.astype("<f4").tobytes(),
        label=_label_of(request, origin.class_labels),
    )


def _label_of(request: Request, labels: Sequence[str]) -> str:
    """The name of the class with the largest score; empty without names or scores."""
    if request.vector is None or len(request.vector) != len(labels):
        return ""
    return labels[int(request.vector.argmax())][:MAX_LABEL_LENGTH]


def execution_of(request: Request, *, received: float) -> Execution:
    """What this claim did; `received` is the reading of the engine's clock at the claim."""
    times = request.times
    num_new = request.num_output_tokens - request.num_resumed_tokens
    decode_seconds = _between(times.first_token, times.finished)
    return Execution(
        waiting_seconds=_between(received, times.first_scheduled),
        prefill_seconds=_between(times.first_scheduled, times.first_token),
        decode_seconds=decode_seconds,
        preempted_seconds=round(times.preempted_seconds, 4),
        processing_seconds=_between(times.first_scheduled, times.finished),
        decode_steps=max(0, num_new - 1 - request.num_accepted_draft_tokens),
        tokens_per_second=round((num_new - 1) / decode_seconds, 2)
        if decode_seconds and num_new > 1
        else None,
        swaps=request.num_swaps,
    )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 4)


def short_error(code: str, message: str, field: str | None = None) -> ErrorInfo:
    """An error with message and field cut to MAX_MESSAGE_LENGTH; they may quote the request."""
    return ErrorInfo(code, message[:MAX_MESSAGE_LENGTH], field and field[:MAX_MESSAGE_LENGTH])


def rejection(origin: Origin, *, error: InvalidRequest) -> Completion:
    """The record of an invalid request; the error names the field."""
    info = short_error("invalid_request", error.message, error.field)
    return _failed(origin, FinishReason.REJECTED, info)


def counted(origin: Origin, *, num_tokens: int) -> Completion:
    """The record of a request of which only the prompt is counted."""
    return Completion(
        request_id=origin.request_id,
        state=State.COMPLETED,
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=num_tokens),
        model=origin.model_name,
        fingerprint=origin.fingerprint,
    )


def refusal(origin: Origin, *, error: RequestRejected) -> Completion:
    """The record of a request that this engine can never serve. The field has its wire name."""
    field = f"body.{error.field}"
    if error.field == "prompt":
        field = PROMPT_FIELDS.get(origin.kind, field)
    return _failed(
        origin, FinishReason.REJECTED, ErrorInfo("invalid_request", error.message, field)
    )


def own_failure(origin: Origin, *, error: Exception) -> Completion:
    """The record of a request that failed in intake by our own error, not by its caller's."""
    message = f"{type(error).__name__} while the request was prepared"
    return _failed(origin, FinishReason.ERROR, ErrorInfo("internal_error", message))


def not_resumable(origin: Origin) -> Completion:
    """The record of a request whose published tokens this worker must not continue.

    There are three cases. The tokens were generated without the adapter or with another revision of
    it. They were generated with an adapter, but the requested name is that of a model here. They
    were generated by another version of Quire, which built another prompt from the chat.
    """
    message = f"its tokens were not generated with this revision of adapter {origin.adapter!r}"
    if origin.adapter is None:
        message = f"its tokens were generated with an adapter, but {origin.model!r} is a model here"
    if not is_same_chat(origin.other_fingerprint or "", origin.fingerprint):
        message = "its tokens were generated by a version that makes another prompt of this chat"
    return _failed(origin, FinishReason.ERROR, ErrorInfo("not_resumable", message))


def _failed(origin: Origin, reason: FinishReason, error: ErrorInfo) -> Completion:
    return Completion(
        request_id=origin.request_id,
        state=State.FAILED,
        finish_reason=reason,
        error=error,
        model=origin.model_name,
    )


def latency_of(completion: Completion, *, due: float | None, now: float) -> str | None:
    """Whether a request met its target latency, which is over at `due`; None if it has none.

    Both times are readings of the worker's clock. A caller's mistake or cancel says nothing.
    """
    is_callers = completion.finish_reason in (FinishReason.CANCELLED, FinishReason.REJECTED)
    if due is None or is_callers:
        return None
    return "met" if completion.state is State.COMPLETED and now <= due else "missed"
