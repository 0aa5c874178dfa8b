"""Golden tokens: however the engine computes a request, it gives the tokens of the request alone.

Greedy output is compared with transformers' own `generate`, token for token in float32: batched,
chunked, preempted by recompute and by swap, from the prefix cache, resumed from published tokens.
Sampled output is compared with itself. Before every run the whole pool is filled with NaN.
"""

import dataclasses
import functools

import pytest

from tests.engine.model.builders import (
    NUM_TOKENS,
    PROMPTS,
    ROOT,
    SCARCE,
    Oracle,
    generate,
    make_request,
    make_runner,
    requests_of,
)

#: Each by the path it is served by; "wide" in the name insists on that one. With "ahead" the next
#: step is launched while one is in flight.
MODELS = [
    "llama",
    "llama ahead",
    "llama wide",
    "qwen3",
    "qwen3 wide",
    "mistral",
    "mistral wide",
    "mistral wide ahead",
    "gemma2",
    "gemma2 wide",
    "gemma3",
    "gpt2",
    "mixtral",
    "mixtral wide",
    "deepseek",
    "llama4",
    "gpt_oss",
    "gpt_oss wide",
    "abacus",
]
ABACUS = ROOT / "models" / "abacus"
#: One of each way to compute: noise and penalties are the sampler's, and know no model.
SAMPLED_MODELS = ["llama", "llama ahead", "mistral wide", "mixtral", "abacus"]


class Subject:
    """A model under test: its runner, prompts of tokens that it knows, and what is expected."""

    def __init__(self, folder, *, model_path: str = "auto", ahead: bool = False) -> None:
        self.runner = make_runner(folder, model_path=model_path)
        self.runner._runs_ahead = ahead
        vocab_size = self.runner.config_facts.vocab_size
        self.prompts = [[3 + t % (vocab_size - 3) for t in prompt] for prompt in PROMPTS]
        self.expected = Oracle(folder).alone(self.prompts)

    def requests(self, **sampling):
        return requests_of(self.prompts, **sampling)


@pytest.fixture(scope="module")
def subject_of(model_folder):
    @functools.cache
    def subject(described: str) -> Subject:
        name, *ways = described.split()
        folder = ABACUS if name == "abacus" else model_folder(name)
        return Subject(
            folder, model_path="wide" if "wide" in ways else "auto", ahead="ahead" in ways
        )

    return subject


@pytest.fixture(scope="module", params=MODELS)
def subject(request, subject_of):
    return subject_of(request.param)


def test_batched_is_alone(subject):
    assert generate(subject.runner, subject.requests()).tokens == subject.expected


def test_chunked_is_whole(subject):
    """512 tokens a step is the default of every other test here."""
    found = generate(subject.runner, subject.requests(), max_num_batched_tokens=7)
    assert found.tokens == subject.expected


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_is_undisturbed(subject, mode):
    found = generate(subject.runner, subject.requests(), preemption_mode=mode, **SCARCE)
    assert getattr(found.snapshot, f"preemptions_{mode}") > 0
    assert found.tokens == subject.expected


def test_from_the_prefix_cache_is_cold(subject):
    again = [
        make_request(f"again {index}", prompt, max_tokens=NUM_TOKENS)
        for index, prompt in enumerate(subject.prompts)
    ]
    found = generate(subject.runner, subject.requests(), again)
    assert found.snapshot.cached_prompt_tokens > 0
    expected = subject.expected
    assert found.tokens == expected | {f"again {name}": expected[name] for name in expected}


def test_resumed_is_uninterrupted(subject):
    published = {name: tokens[:5] for name, tokens in subject.expected.items()}
    found = generate(subject.runner, subject.requests(published=published))
    assert found.tokens == {name: tokens[5:] for name, tokens in subject.expected.items()}


SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": 0.4, "min_tokens": 4},
]


def sampled(subject, published=None):
    """A request for each prompt, each sampled in another way."""
    requests = subject.requests(published=published)
    for index, request in enumerate(requests):
        options = SAMPLED[index % len(SAMPLED)]
        request.sampling = dataclasses.replace(request.sampling, seed=1000 + index, **options)
    return requests


@pytest.mark.parametrize("described", SAMPLED_MODELS)
def test_sampled_output_is_the_same_alone_batched_chunked_preempted_and_resumed(
    subject_of, described
):
    subject, alone = subject_of(described), {}
    for request in sampled(subject):
        alone |= generate(subject.runner, [request]).tokens
    assert all(len(tokens) == NUM_TOKENS for tokens in alone.values())
    assert generate(subject.runner, sampled(subject)).tokens == alone
    chunked = generate(subject.runner, sampled(subject), max_num_batched_tokens=7)
    assert chunked.tokens == alone
    for mode in ("recompute", "swap"):
        preempted = generate(subject.runner, sampled(subject), preemption_mode=mode, **SCARCE)
        assert getattr(preempted.snapshot, f"preemptions_{mode}") > 0
        assert preempted.tokens == alone
    published = {name: tokens[:5] for name, tokens in alone.items()}
    resumed = generate(subject.runner, sampled(subject, published))
    assert resumed.tokens == {name: tokens[5:] for name, tokens in alone.items()}


def test_another_seed_gives_another_output(subject_of):
    subject = subject_of("llama")
    first, second = (
        generate(subject.runner, subject.requests(temperature=1.5, seed=seed)).tokens
        for seed in (1, 2)
    )
    assert first != second
