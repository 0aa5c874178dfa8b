"""A Backend without vLLM: known tokens, prompts in chunks, blocks that run out, and failures."""

import math
from collections.abc import Callable, Sequence

from engine.fake_runner import fake_next_token, fake_prompt_logprob
from engine.request import Request
from engine.vllm.backend import NewToken, ScoredPrompt, StepTokens

VOCAB_SIZE = 50


class FakeVllm:
    """Computes one token per request and step, for requests that have blocks; the best first.

    Args:
        chunk: the most tokens that a step computes of one request.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        chunk: int = 1 << 30,
        vocabulary: Sequence[int] = range(1, VOCAB_SIZE),
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._vocabulary, self._before_step = vocabulary, before_step
        self._chunk = chunk
        self._num_computed: dict[str, int] = {}
        #: The scored tokens of each step, by request.
        self.scored: list[tuple[str, range]] = []
        self.last_scored: list[ScoredPrompt] = []
        self.unscorable: dict[str, str] = {}
        self.requests: dict[str, Request] = {}
        self.waiting: list[str] = []
        self.failing: dict[str, str] = {}
        self.added: list[str] = []
        self.last_step = StepTokens(0, 0, 0)

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self._num_computed[request.request_id] = 0
        self.waiting.append(request.request_id)
        self.added.append(request.request_id)

    def remove(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)
            if request_id in self.waiting:
                self.waiting.remove(request_id)

    def step(self) -> list[NewToken]:
        self._before_step()
        self.waiting.sort(key=lambda id_: -self.requests[id_].priority)
        while self.waiting and self._blocks_of(self.waiting[0]) <= self.num_free_blocks:
            self.waiting.pop(0)
        tokens, self.last_scored = [], []
        for request_id, request in self.requests.items():
            if request_id in self.waiting:
                continue
            known = [*request.prompt_token_ids, *request.output_token_ids]
            if not self._catches_up(request, len(known)):
                continue
            token_id = fake_next_token(known, request.sampling.seed, self._vocabulary)
            failure = self.failing.get(request_id)
            tokens.append(NewToken(request_id, token_id, 0, failure=failure))
        self.last_step = StepTokens(len(tokens), 0, len(tokens))
        return tokens

    def _catches_up(self, request: Request, num_known: int) -> bool:
        """Compute the next chunk, with what it tells of the prompt; whether it was the last."""
        start = self._num_computed[request.request_id]
        end = self._num_computed[request.request_id] = min(start + self._chunk, num_known)
        prompt, sampling = request.prompt_token_ids, request.sampling
        scored = sampling.scored(start, end, num_prompt_tokens=len(prompt))
        if scored and not request.output_token_ids:
            told = [
                fake_prompt_logprob(prompt[:index], prompt[index], sampling.prompt_logprobs or 0)
                for index in scored
            ]
            failure = self.unscorable.get(request.request_id)
            self.last_scored.append(ScoredPrompt(request.request_id, scored.start, told, failure))
            self.scored.append((request.request_id, scored))
        return end == num_known

    def waiting_ids(self) -> list[str]:
        return self.waiting

    @property
    def num_free_blocks(self) -> int:
        return self._num_blocks - sum(
            self._blocks_of(id_) for id_ in self.requests if id_ not in self.waiting
        )

    def _blocks_of(self, request_id: str) -> int:
        return math.ceil(self.requests[request_id].num_tokens / self._block_size)
