"""A real model from a GGUF file: every way to compute a chat gives the tokens of `generate`.

Needs the file of `make fetch-model`, or another copy that QUIRE_TEST_SMOLLM2 names.
"""

import json
import re
from collections.abc import Mapping

import jsonschema
import pytest

from models.fetch import MODELS
from quire.wire.choices import seed_of
from quire.wire.constraints import Constraint
from service.worker.constraints.grammars import CompiledGrammars, load_grammars
from tests.engine.model.builders import generate, make_request, make_runner
from tests.models.goldens import Subject
from tests.models.smollm2_chats import CHATS

SMOLLM2 = MODELS["smollm2"]
FILE = SMOLLM2.at_hand()
pytestmark = [
    pytest.mark.skipif(
        FILE is None,
        reason=f"SmolLM2 is not at hand: run `make fetch-model`, or set {SMOLLM2.variable}",
    ),
    pytest.mark.timeout(1500),
]

#: Of each answer; some end earlier.
NUM_TOKENS = 10
NUM_CHOICES = 3
#: The longest chat needs 25 blocks of 16 tokens; with so few blocks requests are preempted.
SCARCE_BLOCKS = 40
#: The chats with several answers need up to 5 blocks each.
SCARCE_BLOCKS_OF_CHOICES = 18


@pytest.fixture(scope="module")
def subject():
    def prompts_of(tokenizer):
        return [tokenizer.encode_chat(chat, created_ms=0).token_ids for chat in CHATS]

    return Subject(FILE, prompts_of, num_blocks=400, num_tokens=NUM_TOKENS)


def test_thirty_different_chats_have_different_answers(subject):
    assert len(CHATS) == 30
    assert len({tuple(tokens) for tokens in subject.expected.values()}) > 25
    assert min(map(len, subject.prompts)) < 40 < 300 < max(map(len, subject.prompts))


def test_alone_each_answer_is_that_of_generate(subject):
    for request in subject.requests():
        found = generate(subject.runner, [request]).tokens[request.request_id]
        assert found == subject.expected[request.request_id], CHATS[int(request.request_id)]


def test_batched_is_alone(subject):
    assert generate(subject.runner, subject.requests()).tokens == subject.expected


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_is_undisturbed(subject, mode):
    found = generate(
        subject.runner,
        subject.requests(),
        num_blocks=SCARCE_BLOCKS,
        preemption_mode=mode,
        enable_prefix_caching=False,
    )
    assert getattr(found.snapshot, f"preemptions_{mode}") > 0
    assert found.tokens == subject.expected


@pytest.mark.parametrize("published", [1, 6])
def test_resumed_is_uninterrupted(subject, published):
    found = generate(subject.runner, subject.requests(published=published)).tokens
    for name, tokens in found.items():
        assert tokens == subject.expected[name][published:]


def test_the_wide_path_gives_the_same(subject):
    wide = make_runner(FILE, block_size=16, num_blocks=400, num_host_blocks=64, model_path="wide")
    assert generate(wide, subject.requests()).tokens == subject.expected


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PATTERN = r"[A-Z][a-zäöüß]{2,12} (ist|est) \d{2,4}\."
CHOICE = ("Vienna is it", "Vienna, I think", "日本の東京", "no 🌤️ answer")


def constrained(subject, kind: str, value) -> list[str]:
    """The texts of some chats under one constraint, each the same batched and alone."""
    facts = subject.runner.config_facts
    grammars = load_grammars(
        subject.tokenizer.backend, vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids
    )
    assert isinstance(grammars, CompiledGrammars), grammars

    def request(index: int):
        made = make_request(str(index), subject.prompts[index], max_tokens=60, ignore_eos=False)
        made.constraint = grammars.constraint(Constraint(kind, value, f"body.{kind}"), ())
        return made

    some = range(0, len(CHATS), 10)
    together = generate(subject.runner, [request(index) for index in some]).tokens
    for index in some:
        assert generate(subject.runner, [request(index)]).tokens == {
            str(index): together[str(index)]
        }
    decode = subject.tokenizer.backend.decode
    return [decode(tokens, skip_special_tokens=True) for tokens in together.values()]


def test_a_schema_holds_with_its_vocabulary(subject):
    for text in constrained(subject, "json_schema", SCHEMA):
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_regex_holds_with_its_vocabulary(subject):
    for text in constrained(subject, "regex", PATTERN):
        assert re.fullmatch(PATTERN, text), text


def test_a_choice_holds_with_its_vocabulary(subject):
    assert set(constrained(subject, "choice", CHOICE)) <= set(CHOICE)


def test_a_stop_string_over_the_border_of_two_tokens_ends_the_text_before_it(subject):
    stopped = 0
    for index, prompt in enumerate(subject.prompts[:10]):
        tokens = subject.expected[str(index)]
        whole = subject.tokenizer.backend.decode(tokens, skip_special_tokens=True)
        pieces = [subject.tokenizer.text_of(token) for token in tokens]
        if len(pieces) < 5 or not (pieces[3] and pieces[4]):
            continue
        stop = pieces[3][-1] + pieces[4][0]
        request = make_request(
            str(index), prompt, max_tokens=NUM_TOKENS, ignore_eos=False, stop=(stop,)
        )
        request.text = subject.tokenizer.text_stream(request.sampling, prompt=prompt)
        found = generate(subject.runner, [request]).tokens[str(index)]
        assert tokens[: len(found)] == found
        replayed = subject.tokenizer.text_stream(request.sampling, prompt=prompt)
        for token in found:
            replayed.append(token)
        assert replayed.take_text(final=True) == whole[: whole.index(stop)]
        assert len(found) < len(tokens)
        stopped += 1
    assert stopped >= 5


#: Every way of sampling that a seed has to decide.
SAMPLED = (
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": 0.4},
)


def choices(subject, *, seed: int, published: Mapping[str, list[int]] | None = None):
    """Some answers to each of some chats, with seeds as a client derives them."""
    for number, index in enumerate(range(1, len(CHATS), 7)):
        for choice in range(NUM_CHOICES):
            name = f"{index}:{choice}"
            yield make_request(
                name,
                subject.prompts[index],
                output=(published or {}).get(name, ()),
                max_tokens=NUM_TOKENS,
                ignore_eos=False,
                seed=seed_of(seed + index, choice),
                **SAMPLED[number % len(SAMPLED)],
            )


@pytest.fixture(scope="module")
def sampled(subject):
    """Each choice alone."""
    tokens = {}
    for request in choices(subject, seed=5):
        tokens |= generate(subject.runner, [request]).tokens
    return tokens


def test_the_choices_of_a_chat_differ_and_another_seed_gives_others(subject, sampled):
    assert len({tuple(tokens) for tokens in sampled.values()}) > 0.9 * len(sampled)
    others = generate(subject.runner, list(choices(subject, seed=1005))).tokens
    assert sum(others[name] == sampled[name] for name in sampled) < 0.1 * len(sampled)


def test_the_choices_of_a_chat_are_the_same_together_and_share_its_prompt(subject, sampled):
    found = generate(subject.runner, list(choices(subject, seed=5)))
    assert found.tokens == sampled
    assert found.snapshot.cached_prompt_tokens > 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_choices_are_the_same_when_preempted(subject, sampled, mode):
    found = generate(
        subject.runner,
        list(choices(subject, seed=5)),
        num_blocks=SCARCE_BLOCKS_OF_CHOICES,
        preemption_mode=mode,
        enable_prefix_caching=False,
    )
    assert getattr(found.snapshot, f"preemptions_{mode}") > 0
    assert found.tokens == sampled


def test_choices_go_on_as_undisturbed_when_resumed(subject, sampled):
    published = {name: tokens[:4] for name, tokens in sampled.items() if len(tokens) > 4}
    assert len(published) > 10
    for request in choices(subject, seed=5, published=published):
        if request.request_id in published:
            found = generate(subject.runner, [request]).tokens[request.request_id]
            assert found == sampled[request.request_id][4:]
