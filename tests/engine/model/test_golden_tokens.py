"""Golden tokens: however the engine computes a request, it gives the tokens of the request alone.

Greedy output is compared with transformers' own `generate`, token for token in float32: batched,
chunked, preempted by recompute and by swap, from the prefix cache, resumed from published tokens.
Sampled output is compared with itself. Before every run the whole pool is filled with NaN.
"""

import pytest

from tests.engine.model.builders import (
    ROOT,
    Oracle,
    generate,
    make_prompt,
    make_request,
    make_runner,
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

#: Shorter than, as long as and longer than blocks, windows and chunks.
PROMPTS = [make_prompt(length, salt=salt) for salt, length in enumerate((3, 17, 40, 29))]
NUM_TOKENS = 12
#: Too few for all requests at once, enough for each alone (a block holds four tokens).
SCARCE_BLOCKS = 20


class Subject:
    """A model under test: its runner, its oracle, and prompts made of tokens that it knows."""

    def __init__(self, folder, *, model_path: str = "auto", ahead: bool = False) -> None:
        self.runner = make_runner(folder, model_path=model_path)
        self.runner._runs_ahead = ahead
        self._oracle = Oracle(folder)
        vocab_size = self.runner.config_facts.vocab_size
        self.prompts = [[3 + t % (vocab_size - 3) for t in prompt] for prompt in PROMPTS]

    def expected(self, prompts=None) -> dict[str, list[int]]:
        prompts = self.prompts if prompts is None else prompts
        return {
            str(index): self._oracle.greedy(tuple(prompt), NUM_TOKENS)
            for index, prompt in enumerate(prompts)
        }

    def requests(self, **sampling):
        return [
            make_request(str(index), prompt, max_tokens=NUM_TOKENS, **sampling)
            for index, prompt in enumerate(self.prompts)
        ]


@pytest.fixture(scope="module", params=MODELS)
def subject(request, model_folder):
    name, *ways = request.param.split()
    path = "wide" if "wide" in ways else "auto"
    if name != "abacus":
        return Subject(model_folder(name), model_path=path, ahead="ahead" in ways)
    if not (ABACUS / "model.safetensors").exists():
        pytest.skip("models/abacus/model.safetensors is not there yet")
    return Subject(ABACUS)


def test_the_outputs_differ_so_that_equality_says_something(subject):
    expected = subject.expected()
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)


def test_batched_is_alone(subject):
    assert generate(subject.runner, subject.requests()).tokens == subject.expected()


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunked_is_whole(subject, chunk):
    """512 tokens a step is the default of every other test here."""
    found = generate(subject.runner, subject.requests(), max_num_batched_tokens=chunk)
    assert found.tokens == subject.expected()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_is_undisturbed(subject, mode):
    found = generate(
        subject.runner,
        subject.requests(),
        num_blocks=SCARCE_BLOCKS,
        preemption_mode=mode,
        enable_prefix_caching=False,
    )
    snapshot = found.snapshot
    assert getattr(snapshot, f"preemptions_{mode}") > 0
    assert found.tokens == subject.expected()


def test_from_the_prefix_cache_is_cold(subject):
    again = [
        make_request(f"again {index}", prompt, max_tokens=NUM_TOKENS)
        for index, prompt in enumerate(subject.prompts)
    ]
    found = generate(subject.runner, subject.requests(), again)
    assert found.snapshot.cached_prompt_tokens > 0
    expected = subject.expected()
    assert found.tokens == expected | {f"again {name}": expected[name] for name in expected}


@pytest.mark.parametrize("published", [1, 5, NUM_TOKENS - 1])
def test_resumed_is_uninterrupted(subject, published):
    expected = subject.expected()
    requests = [
        make_request(
            str(index), prompt, output=expected[str(index)][:published], max_tokens=NUM_TOKENS
        )
        for index, prompt in enumerate(subject.prompts)
    ]
    found = generate(subject.runner, requests)
    assert found.tokens == {name: tokens[published:] for name, tokens in expected.items()}


SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": 0.4, "min_tokens": 4},
]


def sampled_requests(subject, outputs=None):
    return [
        make_request(
            str(index),
            prompt,
            output=() if outputs is None else outputs[str(index)],
            max_tokens=NUM_TOKENS,
            seed=1000 + index,
            **SAMPLED[index % len(SAMPLED)],
        )
        for index, prompt in enumerate(subject.prompts)
    ]


def test_sampled_output_is_the_same_alone_batched_chunked_preempted_and_resumed(subject):
    alone = {}
    for request in sampled_requests(subject):
        alone |= generate(subject.runner, [request]).tokens
    assert all(len(tokens) == NUM_TOKENS for tokens in alone.values())
    assert generate(subject.runner, sampled_requests(subject)).tokens == alone
    chunked = generate(subject.runner, sampled_requests(subject), max_num_batched_tokens=7)
    assert chunked.tokens == alone
    for mode in ("recompute", "swap"):
        preempted = generate(
            subject.runner,
            sampled_requests(subject),
            num_blocks=SCARCE_BLOCKS,
            preemption_mode=mode,
            enable_prefix_caching=False,
        )
        assert getattr(preempted.snapshot, f"preemptions_{mode}") > 0
        assert preempted.tokens == alone
    published = {name: tokens[:5] for name, tokens in alone.items()}
    resumed = generate(subject.runner, sampled_requests(subject, published))
    assert resumed.tokens == {name: tokens[5:] for name, tokens in alone.items()}


def test_another_seed_gives_another_output(subject):
    first, second = (
        generate(subject.runner, subject.requests(temperature=1.5, seed=seed)).tokens
        for seed in (1, 2)
    )
    assert first != second
