"""Requests that exercise each part of the sampler, and an engine run to its end."""

import time
from typing import Any

from engine.port import TokenEngine
from engine.request import Request
from engine.sampling_params import SamplingParams
from service.worker.model.served import ServedModel

PROMPTS = ("12+34=", "reverse: banana=", "sort: 5 3 9 1=", "count: 86 to 97=", "json: a=1 b=2=")
BLOCK_SIZE = 32
#: Parameters that exercise each part of the sampler.
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "logit_bias": ((97, 30.0),), "min_tokens": 5},
    {"temperature": 1.2, "allowed_token_ids": tuple(range(48, 58)), "logprobs": 3},
)


def requests(model: ServedModel, *, max_tokens: int = 20) -> list[Request]:
    return [
        Request(
            f"{number}-{prompt}",
            model.tokenizer.encode_prompt(prompt),
            SamplingParams(max_tokens=max_tokens, seed=number, **sampling),
            arrival_time=0.0,
        )
        for number, sampling in enumerate(SAMPLINGS)
        for prompt in PROMPTS
    ]


def generate(engine: TokenEngine, made: list[Request]) -> dict[str, list[int]]:
    for request in made:
        engine.add_request(request)
    while engine.has_work():
        engine.step(time.monotonic)
    return {request.request_id: request.output_token_ids for request in made}


def text_of(model: ServedModel, request: Request) -> str:
    return model.tokenizer.backend.decode(request.output_token_ids, skip_special_tokens=False)
