"""Finds out which requests cannot be served, and which field is the cause."""

from typing import NamedTuple

import numpy as np

from engine.config import EngineConfig
from engine.constraint import Failure
from engine.errors import RequestRejected
from engine.request import Request


class Fault(NamedTuple):
    """The field of a request that allows no next token, and the reason in one sentence."""

    field: str
    message: str


def refuse_if_never_servable(request: Request, config: EngineConfig) -> None:
    """Raise RequestRejected, with the field, if the request could never be served."""
    if not request.prompt_token_ids:
        raise RequestRejected("prompt", "the prompt is empty")
    if request.adapter is not None and request.adapter not in config.adapters:
        raise RequestRejected("adapter", f"there is no adapter {request.adapter!r} here")
    _refuse_unknown_tokens(request, config.vocab_size)
    scores = request.sampling.prompt_logprobs is not None
    if scores and not config.max_scored_tokens:
        raise RequestRejected("prompt_logprobs", "this engine computes none")
    if (request.pooling is not None and not scores) != config.pools:
        message = "this model makes " + ("vectors, no output" if config.pools else "no vectors")
        raise RequestRejected("kind", message)
    _refuse_if_too_long(request, config)
    _refuse_misplaced_pictures(request, config)


def _refuse_unknown_tokens(request: Request, vocab_size: int) -> None:
    """RequestRejected for the first token id that the model does not have.

    The field is that of a member, for a bias that of its key. In a prompt, which may have hundreds
    of thousands, it is the prompt.
    """
    sampling = request.sampling
    for field, token_ids in (
        ("prompt", request.token_ids_between(0, request.num_tokens)),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                member = {"prompt": "", "logit_bias": f".{token_id}"}.get(field, f".{index}")
                message = f"token id {token_id} is outside the vocabulary of {vocab_size}"
                raise RequestRejected(f"{field}{member}", message)


def _refuse_if_too_long(request: Request, config: EngineConfig) -> None:
    num_tokens, model_len = request.num_prompt_tokens, config.max_model_len
    if request.pooling is not None and num_tokens > model_len:
        message = f"{num_tokens} tokens are more than the model length of {model_len}"
        raise RequestRejected("prompt", message)
    if request.pooling is None and num_tokens >= model_len:
        message = f"{num_tokens} tokens leave no room in a model length of {model_len}"
        raise RequestRejected("prompt", message)
    if num_tokens + (request.pooling is None) > config.max_request_tokens:
        message = f"{num_tokens} tokens do not fit a KV cache of {config.max_request_tokens} tokens"
        raise RequestRejected("prompt", message)


def _refuse_misplaced_pictures(request: Request, config: EngineConfig) -> None:
    if request.pictures and not config.reads_pictures:
        raise RequestRejected("pictures", "this worker's model reads no pictures")
    free = 0
    for index, picture in enumerate(request.pictures):
        if not free <= picture.start < picture.end <= request.num_prompt_tokens:
            message = "its tokens are not in the prompt, or not behind those of the one before"
            raise RequestRejected(f"pictures.{index}", message)
        free = picture.end


def fault_of(request: Request, config: EngineConfig) -> Fault | None:
    """The field of a request that allows no next token; None if a token is still allowed.

    Call it only after a row has failed: in a working model, every token that the parameters allow
    has a finite logit. A constraint that failed by itself is a fault only if its `Failure` has a
    field.
    """
    sampling, constraint = request.sampling, request.constraint
    index = request.num_output_tokens
    left = np.ones(config.vocab_size, dtype=np.bool_)
    if constraint is not None:
        bits = constraint.allowed(request.output_token_ids)
        failure = constraint.failure
        if failure is not None:
            return _fault_of_constraint(failure)
        allowed = np.unpackbits(bits, count=config.vocab_size, bitorder="little")
        left &= allowed.astype(np.bool_)
        if not left.any():
            message = f"allows only tokens that the model does not have, after {index} tokens"
            return Fault(constraint.field, message)
    if sampling.allowed_token_ids:
        listed = np.zeros_like(left)
        listed[list(sampling.allowed_token_ids)] = True
        left &= listed
        if not left.any():
            message = f"has no token that the constraint allows after {index} tokens"
            return Fault("allowed_token_ids", message)
    if index < sampling.min_tokens:
        banned = config.eos_token_ids.union(sampling.stop_token_ids)
        left[[token_id for token_id in banned if token_id < config.vocab_size]] = False
        if not left.any():
            message = f"only tokens that end the output are left after {index} tokens"
            return Fault("min_tokens", message)
    return None


def _fault_of_constraint(failure: Failure) -> Fault | None:
    return None if failure.field is None else Fault(failure.field, failure.message)
