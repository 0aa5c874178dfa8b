"""Whether vLLM computes a request alike alone and beside others, bit for bit. Knows no vllm."""

from collections.abc import Sequence

from engine.errors import ModelRefused
from engine.logprobs import Logprobs
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.vllm.backend import Backend

#: Tokens of the prompt and of the output, and how many of the best are compared at each index.
_PROMPT, _OUTPUT, _TOP = 300, 12, 5
_SUBJECT = "subject"


def refuse_if_batch_variant(
    backend: Backend, *, vocab_size: int, max_num_seqs: int, max_model_len: int
) -> None:
    """Compare the log-probabilities of one request in batches of several sizes.

    It may miss a difference that affects few tokens. No other requests may be in the backend.

    Raises:
        ModelRefused: they differ.
    """
    length = min(_PROMPT, max_model_len - _OUTPUT)
    told = [
        _told(backend, [_request(at, length, vocab_size, salt=str(size)) for at in range(size)])
        for size in sorted({1, min(2, max_num_seqs), min(7, max_num_seqs), max_num_seqs})
    ]
    if any(one != told[0] for one in told):
        raise ModelRefused("deterministic: log-probabilities of a request depend on its batch")


def _request(at: int, length: int, vocab_size: int, *, salt: str) -> Request:
    """The subject, or another one with a shorter prompt. The salt keeps it from cached blocks."""
    tokens = [(7919 * (at + 1) + 31 * index) % vocab_size for index in range(length)]
    params = SamplingParams(
        max_tokens=_OUTPUT, temperature=0.0, ignore_eos=True, logprobs=None if at else _TOP
    )
    name = f"{at}" if at else _SUBJECT
    return Request(name, tokens[: max(1, length - 17 * at)], params, 0.0, cache_salt=salt)


def _told(backend: Backend, requests: Sequence[Request]) -> Sequence[Logprobs | None]:
    """The log-probabilities of the output of the subject, in a batch with the others."""
    for request in requests:
        backend.add(request)
    told: list[Logprobs | None] = []
    while len(told) < _OUTPUT:
        told += [new.logprobs for new in backend.step() if new.request_id == _SUBJECT]
    backend.remove([request.request_id for request in requests])
    return told
