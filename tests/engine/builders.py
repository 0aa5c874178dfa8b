"""Builders of the engine's tests: short names for what a scenario needs, real objects only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.batch import Batch
from engine.config import EngineConfig
from engine.constraint import Failure
from engine.engine import Engine
from engine.fake_runner import FakeRunner, fake_generation, fake_next_token
from engine.port import RequestOutput
from engine.request import Priority, Request
from engine.sampling_params import SamplingParams

VOCAB_SIZE = 1000
EOS = 0


def make_config(**overrides) -> EngineConfig:
    values = {
        "num_blocks": 64,
        "block_size": 4,
        "max_model_len": 256,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": frozenset({EOS}),
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "watermark": 0.0,
        "check_invariants": True,
    }
    return EngineConfig(**(values | overrides))


def make_request(
    request_id: str = "r",
    *,
    prompt: int | Sequence[int] = 5,
    max_tokens: int = 4,
    priority: Priority = Priority.NORMAL,
    arrival: float = 0.0,
    output: Iterable[int] = (),
    seed: int = 0,
    **others,
) -> Request:
    """A request whose prompt of a given length is made from its id, so that prompts differ."""
    if isinstance(prompt, int):
        salt = sum(map(ord, request_id))
        prompt = [1 + (salt * 31 + 7 * position) % (VOCAB_SIZE - 1) for position in range(prompt)]
    names = ("adapter", "constraint", "deadline", "pictures", "text")
    request_fields = {name: others.pop(name) for name in names if name in others}
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, seed=seed, **others),
        arrival_time=arrival,
        priority=priority,
        output_token_ids=list(output),
        **request_fields,
    )


class Residues:
    """A constraint: what is left of each token by 7 is said by all tokens before it.

    After `length` tokens the output is complete; at number `stuck_at` nothing may come.
    """

    failure: Failure | None = None
    field = "residues"

    def __init__(self, *, length: int = 1000, stuck_at: int | None = None) -> None:
        self.length = length
        self.stuck_at = stuck_at

    def may_come(self, output: Sequence[int]) -> list[int]:
        if len(output) >= self.length:
            return [EOS]
        first = (3 * sum(output) + len(output)) % 7 or 7
        return [] if len(output) == self.stuck_at else list(range(first, VOCAB_SIZE, 7))

    def allowed(self, output_token_ids: Sequence[int]):
        bits = np.zeros(VOCAB_SIZE, dtype=np.uint8)
        bits[(found := self.may_come(output_token_ids))] = 1
        self.failure = None if found else Failure("a rule without a way out", self.field)
        return np.packbits(bits, bitorder="little")

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        return len(output_token_ids) >= self.length

    def draft(self, output_token_ids: Sequence[int], guess: Sequence[int]) -> Sequence[int]:
        output, found = list(output_token_ids), []
        while len(found) < len(guess) and guess[len(found)] in self.may_come([*output, *found]):
            found.append(guess[len(found)])
        return found

    def assuming(self, output_token_ids: Sequence[int], draft: Sequence[int]) -> "Residues":
        return Residues(length=self.length, stuck_at=self.stuck_at)


def expected_under(constraint: Residues, request: Request) -> list[int]:
    """What the request generates under its constraint when it runs alone and nothing goes wrong."""
    tokens = list(request.prompt_token_ids)
    while (number := len(tokens) - len(request.prompt_token_ids)) < request.sampling.max_tokens:
        if number == constraint.length:
            break
        vocabulary = constraint.may_come(tokens[len(request.prompt_token_ids) :])
        tokens.append(fake_next_token(tokens, request.sampling.seed, vocabulary))
    return tokens[len(request.prompt_token_ids) :]


def expected_tokens(request: Request, *, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """What the request generates when it runs alone and nothing goes wrong."""
    return fake_generation(
        request.prompt_token_ids,
        num_tokens=request.sampling.max_tokens,
        seed=request.sampling.seed,
        vocab_size=vocab_size,
        never=(EOS,),
        adapter=request.adapter,
    )


@dataclass
class Machine:
    """An engine over a FakeRunner under a clock that ticks once per step."""

    config: EngineConfig
    now: float = 0.0
    runs_ahead: bool = False
    #: Tokens that the fake model may choose from: with few of them an output repeats itself.
    vocab_size: int = VOCAB_SIZE
    batches: list[Batch] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(
            num_blocks=self.config.num_blocks,
            num_host_blocks=self.config.num_host_blocks,
            num_state_slots=self.config.num_state_slots,
            num_host_state_slots=self.config.num_host_state_slots,
            num_state_snapshots=self.config.num_state_snapshots,
            block_size=self.config.block_size,
            vocab_size=self.vocab_size,
            never=(EOS,),
            before_run=self.batches.append,
            runs_ahead=self.runs_ahead,
        )
        self.engine = Engine(self.config, self.runner)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add_request(request)

    def step(self) -> list[RequestOutput]:
        self.now += 1.0
        outputs = self.engine.step(lambda: self.now)
        self.outputs += outputs
        return outputs

    def run(self, *, max_steps: int = 1000) -> "Machine":
        """Step until idle; a machine that does not come to rest is a livelock."""
        for _ in range(max_steps):
            if not self.engine.has_work():
                return self
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.engine.snapshot()}")

    def tokens(self, request_id: str) -> list[int]:
        """All tokens reported for a request, checked to be contiguous with exactly one end."""
        outputs = [output for output in self.outputs if output.request_id == request_id]
        expected_start = outputs[0].start
        for output in outputs:
            assert output.start == expected_start
            expected_start += len(output.token_ids)
        ends = [output.finish_reason is not None for output in outputs]
        assert ends == [False] * (len(outputs) - 1) + [True]
        return [token_id for output in outputs for token_id in output.token_ids]

    def finish_reason(self, request_id: str):
        return [output for output in self.outputs if output.request_id == request_id][
            -1
        ].finish_reason
