"""A Backend without vLLM: known tokens, blocks that run out, and failures on command."""

import math
from collections.abc import Callable, Sequence

from engine.fake_runner import fake_next_token
from engine.request import Request
from engine.vllm.backend import NewToken, StepTokens
from engine.vllm.row import Row

VOCAB_SIZE = 50


class FakeVllm:
    """Computes one token per request and step, for requests that have blocks; the best first."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocabulary: Sequence[int] = range(1, VOCAB_SIZE),
        before_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._vocabulary, self._before_step = vocabulary, before_step
        self.rows: dict[str, tuple[Request, Row, list[int]]] = {}
        self.waiting: list[str] = []
        self.failing: dict[str, str] = {}
        self.added: list[str] = []
        self.last_step = StepTokens(0, 0, 0)

    def add(self, request: Request, row: Row) -> None:
        live: list[int] = []
        row.attach(live)
        self.rows[request.request_id] = (request, row, live)
        self.waiting.append(request.request_id)
        self.added.append(request.request_id)

    def remove(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.rows.pop(request_id, None)
            if request_id in self.waiting:
                self.waiting.remove(request_id)

    def step(self) -> list[NewToken]:
        self._before_step()
        self.waiting.sort(key=lambda id_: -self.rows[id_][0].priority)
        while self.waiting and self._blocks_of(self.waiting[0]) <= self.num_free_blocks:
            self.waiting.pop(0)
        tokens = []
        for request_id, (request, row, live) in self.rows.items():
            if request_id in self.waiting:
                continue
            known = [*row.prompt_token_ids, *row.output_token_ids]
            row.failure = self.failing.get(request_id)
            token_id = fake_next_token(known, request.sampling.seed, self._vocabulary)
            live.append(token_id)
            tokens.append(NewToken(request_id, token_id, 0))
        self.last_step = StepTokens(len(tokens), 0, len(tokens))
        return tokens

    def waiting_ids(self) -> list[str]:
        return self.waiting

    @property
    def num_free_blocks(self) -> int:
        return self._num_blocks - sum(
            self._blocks_of(id_) for id_ in self.rows if id_ not in self.waiting
        )

    def _blocks_of(self, request_id: str) -> int:
        return math.ceil(self.rows[request_id][0].num_tokens / self._block_size)
