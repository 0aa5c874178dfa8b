"""What is generated with adapters is what transformers generates with their weights merged in."""

import functools
from collections.abc import Mapping

import pytest
import torch

from engine.cache import block_hashes
from engine.errors import ModelRefused
from engine.model.adapters import read_adapters
from engine.model.checks.probe import check_adapter, probe
from engine.model.kernels.build import best_variant
from engine.model.load.fast_path import WrongLogits, check_against
from engine.model.wide.loader import load_model
from tests.engine.model.adapted import ALPHA, merged, save_adapter
from tests.engine.model.builders import (
    CONFIGS,
    Oracle,
    generate,
    make_prompt,
    make_request,
    make_runner,
    save_model,
    with_seers,
)
from tests.engine.model.decoders import FAMILIES

NATIVE = f"decoder-{best_variant().name}"
#: How a runner is told to take each form.
FORMS = {
    "transformers": {"model_path": "wide"},
    "decoder-torch": {"model_path": "fast", "attention_backend": "reference"},
    NATIVE: {"model_path": "fast"},
}
RANKS = {"a": 8, "b": 5}
NAMES = (None, "a", "b", "a", None, "b")


class Stage:
    """A model with two adapters; runners and oracles are made when they are first asked for."""

    def __init__(self, config, folder, *, seed: int) -> None:
        self.folder = save_model(config, folder / "model")
        self.adapters = {
            name: save_adapter(self.folder, folder / name, r=rank, seed=seed + rank)
            for name, rank in RANKS.items()
        }
        self.runner = functools.cache(self._runner)
        self.oracle = functools.cache(self._oracle)

    def _runner(self, form: str, **overrides):
        runner = make_runner(self.folder, adapters=self.adapters, **(FORMS[form] | overrides))
        assert runner.model.name.startswith(form)
        return runner

    def _oracle(self, name: str | None) -> Oracle:
        if name is None:
            return Oracle(self.folder)
        return merged(self.folder, self.adapters[name], ALPHA / RANKS[name])

    def expected(self, request) -> list[int]:
        prompt = tuple(request.prompt_token_ids)
        return self.oracle(request.adapter).greedy(prompt, request.sampling.max_tokens)

    def check(self, form: str, *waves, **overrides) -> None:
        """Generated together, the requests get what each gets alone with its merged weights."""
        found = generate(self.runner(form), *waves, adapters=frozenset(RANKS), **overrides)
        for wave in waves:
            for request in wave:
                assert found.tokens[request.request_id] == self.expected(request)


@pytest.fixture(scope="module")
def stage_of(tmp_path_factory):
    @functools.cache
    def stage(family: str) -> Stage:
        seed = {"olmo2": 30}.get(family, 0)
        folder = tmp_path_factory.mktemp("adapted")
        return Stage((CONFIGS | FAMILIES)[family], folder, seed=seed)

    return stage


@pytest.fixture(scope="module")
def stage(stage_of):
    return stage_of("llama")


def requests_of(names=NAMES, *, length: int = 5, **sampling):
    """A request for each name, no two of one length."""
    requests = [
        make_request(f"r{number}", make_prompt(length + 7 * number, salt=number), **sampling)
        for number in range(len(names))
    ]
    for request, name in zip(requests, names, strict=True):
        request.adapter = name
    return requests


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("llama", form) for form in FORMS),
        ("llama, odd sizes", NATIVE),
        ("llama, biases", "decoder-torch"),
        ("qwen3", NATIVE),
        ("phi3", NATIVE),
        ("granite", "decoder-torch"),
        ("olmo2", NATIVE),
        ("gemma3", "transformers"),
        ("deepseek", "transformers"),
    ],
)
def test_every_form_generates_what_the_merged_weights_do(stage_of, family, form):
    """Of every family in every form, the logits: test_adapted_kernels."""
    stage_of(family).check(form, requests_of())


def test_the_adapters_change_what_is_generated(stage):
    """Or all of this would show nothing."""
    for name in RANKS:
        for request in requests_of():
            prompt = tuple(request.prompt_token_ids)
            tokens = [stage.oracle(one).greedy(prompt, 12) for one in (None, name)]
            assert tokens[0][:6] != tokens[1][:6]


@pytest.mark.parametrize("form", FORMS)
def test_chunks_and_decodes_of_different_adapters_share_a_step(stage, form):
    stage.check(form, requests_of(), max_num_batched_tokens=11, long_prefill_token_threshold=4)


@pytest.mark.parametrize("form", FORMS)
def test_preempted_requests_go_on_with_their_adapters(stage, form):
    requests = requests_of()
    stage.check(form, requests, num_blocks=24, preemption_mode="recompute")
    assert sum(request.num_preemptions for request in requests) > 0


@pytest.mark.parametrize("form", FORMS)
def test_guesses_are_checked_with_the_adapter(stage, form):
    plain = generate(stage.runner(form), requests_of(), adapters=frozenset(RANKS))
    guessed = generate(
        stage.runner(form),
        with_seers(requests_of(), plain, {3, 8}),
        adapters=frozenset(RANKS),
        num_speculative_tokens=3,
    )
    assert guessed.snapshot.accepted_draft_tokens > 20
    assert guessed.snapshot.rejected_draft_tokens > 0
    assert guessed.tokens == plain.tokens


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_request_goes_on_with_its_adapter(stage, form):
    whole = {one.request_id: stage.expected(one) for one in requests_of()}
    resumed = requests_of()
    for request in resumed:
        request.output_token_ids = whole[request.request_id][:5]
        request.__post_init__()
    found = generate(stage.runner(form), resumed, adapters=frozenset(RANKS))
    for name, tokens in found.tokens.items():
        assert tokens == whole[name][5:]


@pytest.mark.parametrize("form", FORMS)
def test_the_same_prompt_is_cached_for_its_adapter_alone(stage, form):
    prompt = make_prompt(33)

    def wave(number: int):
        requests = [make_request(f"{name}-{number}", prompt) for name in (None, *RANKS)]
        for request, name in zip(requests, (None, *RANKS), strict=True):
            request.adapter = name
        return requests

    first, second = wave(1), wave(2)
    stage.check(form, first[:1], first[1:2], first[2:], second)
    assert [request.num_cached_tokens for request in (*first, *second)] == [0] * 3 + [32] * 3


def test_a_cache_that_forgets_the_adapter_would_show(stage, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(block_hashes, "_root", lambda request: request.cache_salt.encode())
    prompt = make_prompt(33)
    first, second = make_request("1", prompt), make_request("2", prompt)
    second.adapter = "a"
    found = generate(stage.runner("transformers"), [first], [second], adapters=frozenset(RANKS))
    assert second.num_cached_tokens == 32
    assert found.tokens["2"] != stage.expected(second)


def test_facts_tell_the_adapters_and_what_each_is(stage):
    facts = stage.runner("transformers").config_facts
    assert facts.adapters.keys() == RANKS.keys()
    assert len(set(facts.adapters.values())) == 2
    assert make_runner(stage.folder, model_path="wide").config_facts.adapters == {}


@pytest.mark.parametrize("form", ["transformers", "decoder-torch"])
def test_the_torch_forms_do_not_promise_determinism_with_adapters(stage, form):
    with pytest.raises(ModelRefused, match=f"cannot be promised with adapters by {form}"):
        make_runner(stage.folder, adapters=stage.adapters, deterministic=True, **FORMS[form])


def test_a_bad_adapter_refuses_the_model(stage, tmp_path):
    with pytest.raises(ModelRefused, match=f"the adapter in {tmp_path} cannot be served"):
        make_runner(stage.folder, adapters={**stage.adapters, "bad": tmp_path})


class Deaf:
    """A form that computes without one of the adapters."""

    def __init__(self, model, name: str, *, instead: str | None = None) -> None:
        self._model, self._name, self._instead = model, name, instead
        self.name, self.layer_shapes = "deaf", model.layer_shapes
        self.vocab_size, self.reads_unwritten_slots = model.vocab_size, True

    def forward(self, inputs, kv_pool):
        adapted = []
        for adapter, tokens in inputs.adapted:
            name = self._instead if adapter == self._name else adapter
            if name is not None:
                adapted.append((name, tokens))
        object.__setattr__(inputs, "adapted", adapted)
        return self._model.forward(inputs, kv_pool)


def served_with(stage, adapters):
    """The wide path of a stage's model with these folders' adapters."""
    loaded = load_model(stage.folder, dtype="float32")
    served = probe(loaded.model, max_model_len=loaded.max_model_len)
    served.add_adapters(read_adapters(loaded.model, adapters))
    return served


@pytest.mark.parametrize("instead", [None, "a"])
def test_a_form_that_drops_or_mistakes_an_adapter_is_not_chosen(stage, instead):
    served = served_with(stage, stage.adapters)
    check_against(served, served, block_size=4, adapters=list(RANKS))
    deaf = Deaf(served, "b", instead=instead)
    with pytest.raises(WrongLogits, match=r"off by|with the adapter b"):
        check_against(served, deaf, block_size=4, adapters=list(RANKS))


@pytest.mark.parametrize("place", range(4))
def test_nor_is_one_that_drops_what_is_far_less_than_the_tolerance_of_logits(
    stage, place, tmp_path
):
    names = ["a", "b", "c", "d"]
    adapters = {
        name: save_adapter(stage.folder, tmp_path / name, lora_alpha=0.001, seed=seed)
        for seed, name in enumerate(names)
    }
    served = served_with(stage, adapters)
    check_against(served, served, block_size=4, adapters=names)
    with pytest.raises(WrongLogits, match=f"computes another effect of the adapter {names[place]}"):
        check_against(served, Deaf(served, names[place]), block_size=4, adapters=names)


class Rough:
    """A form whose rounding is far off for some tokens, whatever is computed with."""

    def __init__(self, model, noise: Mapping[tuple[int, int], float]) -> None:
        self._model, self._noise = model, noise
        self.name, self.layer_shapes = "rough", model.layer_shapes
        self.vocab_size, self.reads_unwritten_slots = model.vocab_size, True

    def forward(self, inputs, kv_pool):
        logits = self._model.forward(inputs, kv_pool)
        tokens = zip(inputs.token_ids.tolist(), inputs.positions.tolist(), strict=True)
        logits[:, 0] += torch.tensor([self._noise[token] for token in tokens])
        return logits


def test_rounding_that_is_as_far_off_without_the_adapter_is_not_held_against_it(stage, tmp_path):
    """A late layer's adapter may do little, and most where the model's rounding does much."""
    served = served_with(
        stage, {"a": save_adapter(stage.folder, tmp_path, targets=["q_proj"], lora_alpha=0.001)}
    )
    effects = {}

    def forward(inputs, kv_pool):
        logits = served.forward(inputs, kv_pool)
        if inputs.adapted:
            object.__setattr__(inputs, "adapted", [])
            effect = (logits - served.forward(inputs, kv_pool)).norm(dim=-1).tolist()
            tokens = zip(inputs.token_ids.tolist(), inputs.positions.tolist(), strict=True)
            effects.update(zip(tokens, effect, strict=True))
        return logits

    seen = Rough(served, {})
    seen.forward = forward
    check_against(served, seen, block_size=4, adapters=["a"])
    most = max(effects.values())
    # Most tokens are off by so little that only the largest effects would be seen in it.
    noise = {
        token: effect if effect > 0.6 * most else most / 8 for token, effect in effects.items()
    }
    check_against(served, Rough(served, noise), block_size=4, adapters=["a"])


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (lambda mlp, hidden: mlp(hidden), None),
        (
            lambda mlp, hidden: torch.cat([mlp(half) for half in hidden.chunk(2, dim=1)], dim=1),
            r"layers\.0\.mlp\.\w+ cannot have an adapter: it does not get each token once",
        ),
        (lambda mlp, hidden: mlp(hidden) + 0 * mlp(hidden), "cannot have an adapter"),
        (
            lambda mlp, hidden: mlp(hidden.flip(1)).flip(1),
            "LlamaForCausalLM cannot be served with adapters",
        ),
    ],
    ids=["as they come", "in halves", "twice", "backwards"],
)
def test_a_layer_that_does_not_get_each_token_once_in_their_order_takes_no_adapter(
    stage, order, reason
):
    served = served_with(stage, stage.adapters)
    mlp = served.model.model.layers[0].mlp
    mlp.forward = functools.partial(order, mlp.forward)
    if reason is None:
        check_adapter(served, "a")
    else:
        with pytest.raises(ModelRefused, match=reason):
            check_adapter(served, "a")
