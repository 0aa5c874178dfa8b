"""A model without a device, for the tests of the service: known tokens, and steps on command."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engine.batch import Batch
from engine.constraint import allows
from engine.engine import Engine
from engine.fake_runner import (
    FakeRunner,
    fake_generation,
    fake_logprobs,
    fake_next_token,
    fake_prompt_logprob,
)
from quire.records import PromptToken
from quire.wire.constraints import Constraint
from quire.wire.logprobs import TokenLogprob
from service.worker.constraints.grammars import Grammars, load_grammars
from service.worker.model.adapters import adapters_in
from service.worker.model.engine_config import engine_config
from service.worker.model.served import ServedModel
from service.worker.model.text import Messages, ModelTokenizer
from service.worker.model.vectors import ServedVectors
from service.worker.settings.config import Settings

#: The end of sequence, then the 256 bytes, then the beginning.
EOS_ID, BOS_ID, VOCAB_SIZE = 0, 257, 258
#: What a fake model never says by itself.
NEVER = (EOS_ID, BOS_ID)
MAX_MODEL_LEN = 1024
#: How long a condition may take until a test calls it false. Only failing tests wait so long.
PATIENCE_SECONDS = 30.0

_Value = TypeVar("_Value")


def eventually(
    read: Callable[[], _Value], what: str = "", *, seconds: float = PATIENCE_SECONDS
) -> _Value:
    """The first true value of `read`; fails the test when none comes."""
    began = time.monotonic()
    pause = threading.Event()
    while not (value := read()):
        waited = time.monotonic() - began
        assert waited < seconds, f"never came true: {what or read}"
        # A tenth more than it takes: a look may cost as much as what is waited for.
        pause.wait(min(0.05, max(0.002, waited / 10)))
    return value


def stays(read: Callable[[], bool], what: str = "", *, seconds: float = 0.3) -> None:
    """Watch for a while that something which must not happen does not."""
    give_up = time.monotonic() + seconds
    pause = threading.Event()
    while time.monotonic() < give_up:
        assert read(), f"did not stay so: {what or read}"
        pause.wait(0.01)


class StepGate:
    """Lets a FakeRunner make as many steps as a test allows; open from the start unless told."""

    def __init__(self, *, steps: int | None = None) -> None:
        self._allowed = threading.Semaphore(steps or 0)
        self._is_open = threading.Event()
        self._has_arrived = threading.Event()
        self.batches: list[Batch] = []
        if steps is None:
            self._is_open.set()

    def __call__(self, batch: Batch) -> None:
        self.batches.append(batch)
        self._has_arrived.set()
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not self._is_open.is_set() and not self._allowed.acquire(timeout=0.01):
            assert time.monotonic() < give_up, "a closed gate was forgotten"

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    def open(self) -> None:
        self._is_open.set()

    def step_until(
        self, condition: Callable[[], Any], *, may_step: Callable[[], bool] = lambda: True
    ) -> None:
        """Allow one step after another, slowly, until the condition is true.

        Args:
            may_step: asked before each; after a False it is asked again.

        No second one is allowed before the engine has taken the first: else an engine that starts
        late makes all steps of the wait at once, and the request has ended when somebody looks.
        """

        give_up = time.monotonic() + PATIENCE_SECONDS
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < give_up, f"no step makes it true: {condition}"
            if may_step():
                self._allowed.acquire(blocking=False)
                self._allowed.release()
            pause.wait(0.005)

    def step_to_end_of(self, worker: Any) -> None:
        """Let a `WorkerThread` end that was asked to, with one more step at most.

        None is allowed before the stop has come to the engine: a request would go on meanwhile, on
        a busy machine to its end.
        """
        eventually(worker.worker._parts.loop._stopping.is_set, "the stop has come to the engine")
        self.step_until(lambda: worker.has_ended)

    def wait_for_arrival(self) -> None:
        """Return once the engine stands in a step."""
        assert self._has_arrived.wait(PATIENCE_SECONDS)


@cache
def byte_tokenizer() -> Tokenizer:
    """A token for each byte and two special ones; random tokens break characters all the time."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": EOS_ID} | {symbol: 1 + n for n, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<bos>": BOS_ID}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", "<bos>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS_ID)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def byte_grammars() -> Grammars:
    """Grammars over the bytes; one for all fake models of a process, as each holds many."""
    return load_grammars(byte_tokenizer(), vocab_size=VOCAB_SIZE, eos_token_ids={EOS_ID})


def text_of(token_ids: Sequence[int]) -> str:
    """What the tokens spell when they are decoded all at once."""
    text: str = byte_tokenizer().decode(list(token_ids))
    return text


def render_chat(messages: Messages) -> str:
    """A chat template in one line; refuses what it does not know, as templates do."""
    if any(message["role"] not in ("system", "user", "assistant") for message in messages):
        raise ValueError("unknown role")
    return "".join(f"{message['role']}:{message['content'] or ''}\n" for message in messages)


def fake_model(
    settings: Settings,
    *,
    before_run: Callable[[Batch], None] | None = None,
    fingerprint: str = "fake-1",
    num_blocks: int = 512,
    runs_ahead: bool = False,
    tokenizer: ModelTokenizer | None = None,
    grammars: Grammars | None = None,
    adapters: Mapping[str, str] | None = None,
    vectors: ServedVectors | None = None,
) -> ServedModel:
    """A served model whose tokens are a pure function of prompt, seed and adapter, without torch.

    With `vectors` it makes vectors of prompts, `fake_vector`, and no text.

    Of the `adapters` by name it has the revisions named; without any, those in the folder that the
    settings name, whatever is in them.
    """
    if adapters is None:
        adapters = dict.fromkeys(adapters_in(settings.adapters), "folder")
    config = engine_config(
        settings,
        num_blocks=settings.num_blocks or num_blocks,
        max_num_batched_tokens=settings.max_num_batched_tokens or 512,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS_ID}),
        adapters=adapters,
    )
    config = replace(config, pools=vectors is not None)
    runner = FakeRunner(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        num_host_blocks=config.num_host_blocks,
        vocab_size=VOCAB_SIZE,
        never=NEVER,
        before_run=before_run,
        runs_ahead=runs_ahead,
    )
    return ServedModel(
        engine=Engine(config, runner),
        tokenizer=tokenizer or ModelTokenizer(byte_tokenizer(), render_chat=render_chat),
        fingerprint=fingerprint,
        grammars=grammars or byte_grammars(),
        adapters=adapters,
        vectors=vectors,
        build={"device": "none", "dtype": "none", "torch": "none"},
    )


def expected_tokens(
    prompt: Sequence[int], *, max_tokens: int, seed: int = 0, adapter: str | None = None
) -> tuple[int, ...]:
    """What a fake model generates for the prompt when nothing goes wrong."""
    tokens = fake_generation(
        prompt,
        num_tokens=max_tokens,
        seed=seed,
        vocab_size=VOCAB_SIZE,
        never=NEVER,
        adapter=adapter,
    )
    return tuple(tokens)


def expected_under(
    wanted: Constraint,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    seed: int = 0,
    adapter: str | None = None,
) -> tuple[int, ...]:
    """The same where the output has to be as `wanted` says: complete, if it has room for that."""
    rule, output = byte_grammars().constraint(wanted, []), list[int]()
    said = [id_ for id_ in range(VOCAB_SIZE) if id_ not in NEVER]
    while len(output) < max_tokens and not rule.is_complete(output):
        bits = rule.allowed(output)
        vocabulary = [id_ for id_ in said if allows(bits, id_)]
        known = [*prompt, *output]
        output.append(fake_next_token(known, seed, vocabulary, adapter=adapter))
    return tuple(output)


def expected_logprobs(token_ids: Sequence[int], *, number: int) -> tuple[TokenLogprob, ...]:
    """What a fake model says of these tokens to who asks for so many of the best, with texts."""
    told = _byte_model_tokenizer().with_texts
    return tuple(told(token_id, fake_logprobs(token_id, number)) for token_id in token_ids)


def expected_prompt_tokens(prompt: Sequence[int], *, number: int) -> tuple[PromptToken, ...]:
    """What a fake model says of a prompt to who asks for so many of the best, with texts."""
    told = _byte_model_tokenizer().with_texts
    begin = told(prompt[0], fake_logprobs(prompt[0], 0))
    first = PromptToken(begin.token_id, None, begin.text, raw=begin.raw)
    others = (
        told(prompt[at], fake_prompt_logprob(prompt[:at], prompt[at], number))
        for at in range(1, len(prompt))
    )
    return (
        first,
        *(PromptToken(one.token_id, one.logprob, one.text, one.top, one.raw) for one in others),
    )


@cache
def _byte_model_tokenizer() -> ModelTokenizer:
    return ModelTokenizer(byte_tokenizer())
