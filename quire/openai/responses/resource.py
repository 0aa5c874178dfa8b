"""The body of a response, while it runs and after its end.

Pure functions of what is kept of the response, of its output items and of its terminal record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.openai.responses.call import Kept
from quire.openai.responses.fields import path_in_response
from quire.wire.ends import End
from quire.wire.output import Completion, FinishReason, State

#: The states of a request that has not ended -> the status of its response.
STATUS_OF = {
    State.SCHEDULED: "queued",
    State.QUEUED: "queued",
    State.RUNNING: "in_progress",
}

#: The codes of OpenAI's API that an error of a response has. Our own code is in its message.
_REJECTED, _FAILED = "invalid_prompt", "server_error"


def resource(
    kept: Kept,
    status: str,
    *,
    output: Sequence[Mapping[str, Any]] = (),
    end: Completion | None = None,
    num_reasoning_tokens: int = 0,
) -> dict[str, Any]:
    """The body. `end` is the terminal record of a response that has ended."""
    completed_at = None
    if end is not None and status == "completed":
        completed_at = kept.shown["created_at"] + round(end.timing.total_seconds or 0)
    return {
        **kept.shown,
        "status": status,
        "completed_at": completed_at,
        "error": _error(end) if end is not None and status == "failed" else None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": list(output),
        "usage": _usage(end, num_reasoning_tokens) if end is not None else None,
    }


def status_at_end(end: Completion | End) -> str:
    """The status of a response with this terminal record, or this end."""
    if end.state is State.COMPLETED:
        return "incomplete" if end.finish_reason is FinishReason.LENGTH else "completed"
    return "cancelled" if end.state is State.CANCELLED else "failed"


def _usage(end: Completion, num_reasoning_tokens: int) -> dict[str, Any]:
    usage = end.usage
    return {
        "input_tokens": usage.prompt_tokens,
        # OpenAI charges for tokens that it writes to its cache. Here none are charged for.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error(end: Completion) -> dict[str, str]:
    error = end.error
    if error is None:
        return {"code": _FAILED, "message": f"the request ended as {end.state}"}
    code = _REJECTED if error.code == "invalid_request" else _FAILED
    field = f" ({path_in_response(error.field).removeprefix('body.')})" if error.field else ""
    return {"code": code, "message": f"{error.code}: {error.message}{field}"}
