"""Decides whether a generation has ended, and why. Knows no blocks."""

from engine.config import EngineConfig
from engine.request import FinishReason, Request


def finish_reason_of(
    request: Request, config: EngineConfig, *, stop_string_found: bool
) -> FinishReason | None:
    """Why the last output token ends the generation; None if it does not.

    The order of the checks is part of the contract: an end of sequence as the last allowed token is
    EOS, not LENGTH. Up to `min_tokens` output tokens, only a limit or a complete constraint ends
    the request.
    """
    sampling, constraint = request.sampling, request.constraint
    if request.num_output_tokens > sampling.min_tokens:
        token_id = request.output_token_ids[-1]
        if token_id in config.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.EOS
        if token_id in sampling.stop_token_ids or stop_string_found:
            return FinishReason.STOP
    if constraint is not None and constraint.is_complete(request.output_token_ids):
        return FinishReason.STOP
    if request.num_output_tokens >= sampling.max_tokens:
        return FinishReason.LENGTH
    if request.num_tokens >= config.max_request_tokens:
        return FinishReason.LENGTH
    return None
