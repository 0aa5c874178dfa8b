"""Whole lives of requests, moved between engines: all that comes out is what they say alone.

Every field of a request and every rule by which one ends is drawn, together with what may happen to
it: it is cancelled, runs into its deadline, is released and taken over by another engine of another
size, or is in a step that fails.
"""

from dataclasses import dataclass, field, fields
from itertools import pairwise

from hypothesis import event, given, settings
from hypothesis import strategies as st

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake_runner import FakeRunner, Script
from engine.output.detokenizer import Detokenizer
from engine.picture import Picture
from engine.port import RequestOutput
from engine.request import FinishReason, Priority, Request
from engine.sampling_params import SamplingParams
from tests.engine.builders import EOS, Residues, make_config
from tests.engine.scheduling.test_properties import configs

#: Few tokens, so that ends come early, guesses are often right and texts have stop strings.
VOCAB_SIZE = 6
LETTERS = "abc"
ADAPTERS = ("a", "b")
#: Ends that come from outside, at any token.
FROM_OUTSIDE = {FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.RELEASED}


class Letters:
    """A letter for each token; every fourth token has none before the next one says it."""

    def __init__(self) -> None:
        self._undecided = ""

    def step(self, token_id: int) -> str | None:
        self._undecided += LETTERS[token_id % len(LETTERS)]
        if token_id % 4 == 3:
            return None
        text, self._undecided = self._undecided, ""
        return text

    def rest(self) -> str:
        return self._undecided


class Parities(Residues):
    """Every other token may come; which, all tokens before say."""

    def may_come(self, output):
        if len(output) >= self.length:
            return [EOS]
        found = [id_ for id_ in range(1, VOCAB_SIZE) if (id_ + sum(output) + len(output)) % 2]
        return [] if len(output) == self.stuck_at else found

    def assuming(self, output_token_ids, draft):
        return Parities(length=self.length, stuck_at=self.stuck_at)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a caller asks for; made into a request anew for each engine that takes it in."""

    prompt: list[int]
    sampling: SamplingParams
    priority: Priority
    cache_salt: str
    adapter: str | None
    pictures: tuple[Picture, ...]
    has_text: bool
    constraint: Parities | None
    #: Steps that it is given; None for all that it needs.
    patience: int | None

    def request(self, name: str, *, now: float, output: list[int], deadline: float | None):
        sampling = self.sampling
        text = Detokenizer(
            Letters(),
            stop=sampling.stop,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        return Request(
            request_id=name,
            prompt_token_ids=list(self.prompt),
            sampling=sampling,
            arrival_time=now,
            priority=self.priority,
            output_token_ids=list(output),
            deadline=deadline,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            pictures=self.pictures,
            text=text if self.has_text else None,
            constraint=self.constraint and self.constraint.assuming((), ()),
        )


@st.composite
def samplings(draw) -> SamplingParams:
    max_tokens = draw(st.integers(1, 6) | st.integers(10, 40) | st.integers(20, 60))
    stops = st.tuples(st.text(LETTERS, min_size=1, max_size=4))
    penalty = {"repetition_penalty": 1.1}
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.just(0) | st.integers(0, max_tokens)),
        seed=draw(st.integers(0, 3)),
        logprobs=draw(st.none() | st.integers(0, 2)),
        prompt_logprobs=draw(st.none() | st.integers(0, 2)),
        prompt_logprobs_from=draw(st.just(1) | st.integers(1, 9)),
        stop=draw(st.just(()) | st.just(()) | stops),
        stop_token_ids=draw(st.sampled_from([(), (), (1,), (2, 5)])),
        ignore_eos=draw(st.sampled_from([True, True, False])),
        include_stop_str_in_output=draw(st.booleans()),
        **draw(st.sampled_from([{}, {}, penalty])),
    )


constraints = st.builds(
    Parities, length=st.integers(1, 30), stuck_at=st.none() | st.integers(0, 12)
)


@st.composite
def prompts(draw) -> tuple[list[int], tuple[Picture, ...]]:
    """Tokens, and which of them stand for pictures, of which there are two."""
    tokens = draw(
        st.lists(st.integers(0, 2), min_size=1, max_size=8)
        | st.lists(st.integers(1, 2), min_size=10, max_size=20)
    )
    ends = draw(st.just([]) | st.lists(st.integers(0, len(tokens)), max_size=6))
    places = pairwise(sorted(set(ends)))
    names = st.sampled_from([b"cat", b"dog"])
    return tokens, tuple(
        Picture(draw(names), start, end - start, {}) for start, end in places if draw(st.booleans())
    )


def wanted(prompt: tuple[list[int], tuple[Picture, ...]], **others) -> Wanted:
    return Wanted(prompt=prompt[0], pictures=prompt[1], **others)


wishes = st.builds(
    wanted,
    prompt=prompts(),
    sampling=samplings(),
    priority=st.sampled_from(Priority),
    cache_salt=st.sampled_from(["", "other"]),
    adapter=st.sampled_from([None, None, *ADAPTERS]),
    has_text=st.booleans(),
    constraint=st.none() | st.none() | constraints,
    patience=st.none() | st.none() | st.integers(0, 30),
)


@dataclass
class Life:
    """What all engines have said of one request."""

    wanted: Wanted
    deadline: float | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list = field(default_factory=list)
    prompt_logprobs: tuple = ()
    reason: FinishReason | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.reason is None and output.start == len(self.tokens)
        self.tokens += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        assert output.start == 0 or not output.prompt_logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.reason = output.finish_reason


class Stumbling(Script):
    """Some steps raise while they have several rows: none of them is to blame."""

    def __init__(self, steps: frozenset[int]) -> None:
        super().__init__()
        self._steps = steps

    def raise_if_failing(self, batch: Batch) -> None:
        if batch.step in self._steps and batch.num_rows > 1:
            raise MemoryError("a step too large")


@dataclass
class Host:
    """An engine, and the lives of those in it."""

    config: EngineConfig
    runs_ahead: bool = False
    stumbles: frozenset[int] = frozenset()
    memory: int = 0
    now: float = 0.0
    lives: dict[str, Life] = field(default_factory=dict)

    def __post_init__(self) -> None:
        runner = FakeRunner(
            num_blocks=self.config.num_blocks,
            num_host_blocks=self.config.num_host_blocks,
            num_state_slots=self.config.num_state_slots,
            num_host_state_slots=self.config.num_host_state_slots,
            num_state_snapshots=self.config.num_state_snapshots,
            block_size=self.config.block_size,
            vocab_size=VOCAB_SIZE,
            never=(),
            memory=self.memory,
            runs_ahead=self.runs_ahead,
        )
        runner.script = Stumbling(self.stumbles)
        self.engine = Engine(self.config, runner)

    def take(self, name: str, life: Life) -> None:
        life.reason = None
        self.lives[name] = life
        request = life.wanted.request(
            name, now=self.now, output=life.tokens, deadline=life.deadline
        )
        self.engine.add_request(request)

    def step(self) -> None:
        self.now += 1.0
        for output in self.engine.step(lambda: self.now):
            self.lives[output.request_id].add(output)


def alone(wanted: Wanted, *, max_model_len: int, memory: int) -> Life:
    """All that it says in an engine of its own, with room for everything and nothing clever."""
    config = make_config(
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        adapters=frozenset(ADAPTERS),
        reads_pictures=True,
    )
    host = Host(config, memory=memory)
    life = Life(wanted)
    host.take("alone", life)
    while host.engine.has_work():
        host.step()
    return life


def text_of(life: Life, tokens: list[int]) -> str:
    """What is out of a text once it has ended behind these tokens."""
    text = life.wanted.request("text", now=0.0, output=[], deadline=None).text
    if text is None:
        return ""
    for token_id in tokens:
        text.append(token_id)
    return text.take_text(final=True)


def check(life: Life, whole: Life) -> None:
    """What came out is what the request says alone, or the beginning of it."""
    assert life.reason is not None
    event(f"ended by {life.reason}")
    assert life.prompt_logprobs == (whole.prompt_logprobs if life.tokens else ())
    if life.reason in FROM_OUTSIDE:
        count = len(life.tokens)
        assert life.tokens == whole.tokens[:count] and life.logprobs == whole.logprobs[:count]
        if count < len(whole.tokens):
            assert life.text == text_of(whole, life.tokens)
    else:
        said, expected = ((one.tokens, one.text, one.logprobs, one.reason) for one in (life, whole))
        assert said == expected


@dataclass(frozen=True)
class Turn:
    """What happens to a request so many steps after it came, or after the turn before.

    It moves to an engine, or is cancelled where that is None.
    """

    after: int
    engine: int | None


@dataclass
class Guest:
    """A request on its way through the engines."""

    name: str
    life: Life
    host: Host
    turns: list[Turn]
    due: float = 0.0

    def take_turn(self, now: float) -> None:
        """Give it up where it is, if a turn is due."""
        if self.turns and now >= self.due:
            moves = self.turns[0].engine is not None
            reason = FinishReason.RELEASED if moves else FinishReason.CANCELLED
            self.host.engine.abort(self.name, reason)

    def go_on(self, hosts: list[Host]) -> None:
        """Let the next engine take it, if it was released."""
        if self.life.reason is FinishReason.RELEASED:
            turn = self.turns.pop(0)
            del self.host.lives[self.name]
            self.host = hosts[turn.engine]
            self.enter()

    def enter(self) -> None:
        self.host.take(self.name, self.life)
        self.due = self.host.now + self.turns[0].after if self.turns else 0.0


def play(hosts: list[Host], plan: list[tuple[int, Wanted, list[Turn]]]) -> list[Life]:
    """Let requests come, each some steps after the one before, until all have ended."""
    guests: list[Guest] = []

    def step() -> None:
        for guest in guests:
            guest.take_turn(hosts[0].now)
        for host in hosts:
            host.step()
        for guest in guests:
            guest.go_on(hosts)

    for gap, wanted, turns in plan:
        for _ in range(gap):
            step()
        deadline = None if wanted.patience is None else hosts[0].now + wanted.patience
        host = hosts[len(guests) % len(hosts)]
        guests.append(Guest(f"r{len(guests)}", Life(wanted, deadline), host, list(turns)))
        guests[-1].enter()
    while any(host.engine.has_work() for host in hosts):
        assert hosts[0].now < 3000, "livelock"
        step()
    for host in hosts:
        assert host.engine.violations() == []
        # Nothing was asked of a step that it could not know.
        assert host.stumbles or not host.engine.snapshot().failed_steps
    return [guest.life for guest in guests]


turns = st.lists(
    st.builds(Turn, st.integers(0, 12), st.sampled_from([0, 1, 1, 0, None])), max_size=2
)
plans = st.lists(st.tuples(st.integers(0, 4), wishes, turns), min_size=2, max_size=10)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.tuples(configs, configs),
    block_size=st.tuples(st.sampled_from([4, 1, 3, 5]), st.sampled_from([4, 2, 5])),
    max_model_len=st.just(60) | st.integers(2, 60),
    ahead=st.tuples(st.booleans(), st.booleans()),
    stumbles=st.frozensets(st.integers(1, 60), max_size=10),
    memory=st.sampled_from([0, 1, 2]),
    plan=plans,
)
def test_whatever_happens_to_a_request_it_says_what_it_says_alone(
    sizes, block_size, max_model_len, ahead, stumbles, memory, plan
):
    """Tokens, texts, log-probabilities and the reason, to the piece."""
    sizes = [made(size, block_size=block) for size, block in zip(sizes, block_size, strict=True)]
    limit = min(max_model_len, *(size.max_request_tokens for size in sizes))
    hosts = [
        Host(made(size, max_model_len=limit), runs_ahead, stumbles, memory)
        for size, runs_ahead in zip(sizes, ahead, strict=True)
    ]
    plan = [entry for entry in plan if len(entry[1].prompt) < limit]
    for life in play(hosts, plan):
        check(life, alone(life.wanted, max_model_len=limit, memory=memory))


def made(config: EngineConfig, **overrides) -> EngineConfig:
    """Another configuration with some of its fields changed."""
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    told = {"vocab_size": VOCAB_SIZE, "adapters": frozenset(ADAPTERS), "reads_pictures": True}
    return EngineConfig(**(values | told | overrides))
