"""Builders of the model room's tests: tiny random models, rows, and engines over them."""

import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.batch import Batch, BatchRow
from engine.config import EngineConfig
from engine.constraint import Constraint
from engine.engine import Engine
from engine.logprobs import Logprobs
from engine.model.load.load_runner import load_runner
from engine.model.run.model_runner import ModelRunner
from engine.model.sampling.sampler import Sampler
from engine.prompt_lookup import PromptLookup
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.stats import EngineSnapshot

ROOT = Path(__file__).parents[3]
VOCAB_SIZE = 211
EOS = 1
#: Wide enough that the most likely token stands out and the outputs wander.
INITIALIZER_RANGE = 0.3

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": INITIALIZER_RANGE,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 2,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2, "intermediate_size": 96}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**_GROUPED),
    "qwen3": transformers.Qwen3Config(**_GROUPED, head_dim=16),
    # A window shorter than most prompts of the tests.
    "mistral": transformers.MistralConfig(**_GROUPED, sliding_window=13),
    # Scores capped where they would often go further, and a window in every other layer.
    "gemma2": transformers.Gemma2Config(
        **_GROUPED,
        head_dim=16,
        sliding_window=13,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=1.0,
    ),
    # Norms of heads, and another rotary embedding in layers with a window.
    "gemma3": transformers.Gemma3TextConfig(
        **_GROUPED,
        head_dim=16,
        sliding_window=13,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=0,
        eos_token_id=EOS,
    ),
    "mixtral": transformers.MixtralConfig(
        **_GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    # Keys and values of different widths.
    "deepseek": transformers.DeepseekV3Config(
        **(_GROUPED | {"num_key_value_heads": 4}),
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        first_k_dense_replace=1,
    ),
    # The whole length is one attention chunk. Queries are scaled by their position, from 12 on.
    "llama4": transformers.Llama4TextConfig(
        **(_GROUPED | {"num_hidden_layers": 4}),
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=2,
        attention_chunk_size=256,
        floor_scale=13,
        attn_scale=0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    # Attention sinks, a window in every other layer, and experts with biases.
    "gpt_oss": transformers.GptOssConfig(
        **_GROUPED,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=13,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    ),
}


def save_model(
    config: PreTrainedConfig,
    folder: Path,
    *,
    seed: int = 0,
    model_class: type[PreTrainedModel] | None = None,
) -> Path:
    """A model of this config with random weights, in a folder as a user would have it."""
    torch.manual_seed(seed)
    model = (model_class or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])(config)
    for name, parameter in model.named_parameters():
        # Some families initialize sinks to zero. Trained ones differ from head to head, and take
        # much of the weight in some.
        if name.endswith(".sinks"):
            torch.nn.init.normal_(parameter, mean=1.0, std=2.0)
        # Most heads of transformers' first rates would forget a state within a token.
        elif name.endswith(".A_log") and parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, -5.0, 0.0)
    model.save_pretrained(folder)
    return folder


def make_runner(folder: Path, **overrides) -> ModelRunner:
    values = {
        "dtype": "float32",
        "block_size": 4,
        "num_blocks": 128,
        "num_host_blocks": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
    }
    runner = load_runner(folder, **(values | overrides))
    # A test that wants three threads must get them on a busy machine.
    runner.threads = None
    return runner


def make_row(
    prompt: Sequence[int] = (5, 6, 7),
    *,
    request_id: str = "r",
    output: Sequence[int] = (),
    start: int = 0,
    end: int | None = None,
    block_ids: Sequence[int] = range(64),
    constraint: Constraint | None = None,
    **sampling,
) -> BatchRow:
    """The tokens from `start` to `end` of a request, by default all that are known."""
    tokens = [*prompt, *output]
    end = len(tokens) if end is None else end
    return BatchRow(
        request_id=request_id,
        token_ids=tokens[start:end],
        start=start,
        block_ids=block_ids,
        samples=end == len(tokens),
        sampling=SamplingParams(**({"max_tokens": 64, "temperature": 0.0} | sampling)),
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
        constraint=constraint,
    )


class Chooser(Sampler):
    """A Sampler whose tokens are waited for."""

    def sample(self, logits: torch.Tensor, rows: Sequence[BatchRow]) -> list[int]:
        draws = self.draw(logits, rows)
        chosen = draws.tokens.tolist()
        draws.settle(chosen)
        assert draws.tokens.tolist() == chosen
        return chosen


def run_rows(runner: ModelRunner, *rows: BatchRow, **moves) -> dict[str, int]:
    return runner.run(Batch(step=1, catch_up_rows=rows, **moves))


def make_prompt(length: int, *, salt: int = 0) -> list[int]:
    """Different tokens for every salt, none of them special."""
    return [
        3 + (salt * 37 + position * (13 + salt)) % (VOCAB_SIZE - 3) for position in range(length)
    ]


#: Shorter than, as long as and longer than blocks, windows and chunks.
PROMPTS = [make_prompt(length, salt=salt) for salt, length in enumerate((3, 17, 40, 29))]
NUM_TOKENS = 12
#: Too few blocks for all prompts at once, enough for each alone (a block holds four tokens).
SCARCE = {"num_blocks": 20, "enable_prefix_caching": False}


def poison(runner: ModelRunner) -> None:
    """Fill the whole pool with NaN: whatever is read without having been written shows."""
    runner.kv_pool.spoil()
    if runner.kv_pool.states is not None:
        runner.kv_pool.states.poison()


@dataclass(frozen=True)
class Generated:
    """What an engine did: what is new of every request, and its counters at the end."""

    tokens: dict[str, list[int]]
    snapshot: EngineSnapshot
    logprobs: dict[str, list[Logprobs]]
    #: Of the prompts of requests that ask for them.
    prompt_logprobs: dict[str, tuple[Logprobs, ...]]


def make_request(
    request_id: str, prompt: Sequence[int], *, output: Sequence[int] = (), **sampling
) -> Request:
    """A request that goes on to its last token; greedy unless said otherwise."""
    defaults = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(**(defaults | sampling)),
        arrival_time=0.0,
        output_token_ids=list(output),
    )


def engine_over(runner: ModelRunner, **overrides) -> Engine:
    """An engine with an empty cache, whose unwritten slots would show."""
    facts = runner.config_facts
    values = {
        "num_blocks": facts.num_blocks,
        "num_host_blocks": facts.num_host_blocks,
        "block_size": facts.block_size,
        "vocab_size": facts.vocab_size,
        "max_model_len": facts.max_model_len,
        "eos_token_ids": facts.eos_token_ids,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "watermark": 0.0,
        "check_invariants": True,
    }
    poison(runner)
    config = EngineConfig(**(values | overrides))
    return Engine(config.with_states(facts.states), runner)


def generate(
    runner: ModelRunner, *waves: Sequence[Request], max_steps: int = 2000, **overrides
) -> Generated:
    """Run waves of requests through one engine, each wave when the one before has ended."""
    engine = engine_over(runner, **overrides)
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[Logprobs]] = {}
    prompt_logprobs: dict[str, tuple[Logprobs, ...]] = {}
    now = 0.0
    for wave in waves:
        for request in wave:
            engine.add_request(request)
        for _ in range(max_steps):
            if not engine.has_work():
                break
            now += 1.0
            for output in engine.step(functools.partial(float, now)):
                assert output.error is None, output.error
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                logprobs.setdefault(output.request_id, []).extend(output.logprobs)
                if output.prompt_logprobs:
                    assert output.request_id not in prompt_logprobs
                    prompt_logprobs[output.request_id] = output.prompt_logprobs
        assert not engine.has_work(), engine.snapshot()
    return Generated(tokens, engine.snapshot(), logprobs, prompt_logprobs)


def requests_of(
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    published: Mapping[str, Sequence[int]] | None = None,
    **sampling,
) -> list[Request]:
    """A request for each prompt, named by its number; each goes on behind what is published."""
    outputs = published or {}
    return [
        make_request(
            str(index),
            prompt,
            output=outputs.get(str(index), ()),
            **({"max_tokens": NUM_TOKENS} | sampling),
        )
        for index, prompt in enumerate(prompts)
    ]


def check_generated(
    runner: ModelRunner,
    expected: Mapping[str, Sequence[int]],
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> None:
    """In chunks, preempted in both ways and resumed, each prompt gets its expected tokens."""
    assert generate(runner, requests_of(prompts), max_num_batched_tokens=7).tokens == expected
    for mode in ("recompute", "swap"):
        preempted = generate(runner, requests_of(prompts), preemption_mode=mode, **SCARCE)
        assert getattr(preempted.snapshot, f"preemptions_{mode}") > 0
        assert preempted.tokens == expected
    published = {name: tokens[:5] for name, tokens in expected.items()}
    resumed = generate(runner, requests_of(prompts, published=published)).tokens
    assert resumed == {name: tokens[5:] for name, tokens in expected.items()}


class Seer(PromptLookup):
    """Guesses what came in another run, and something else at the places `wrong`."""

    def __init__(self, prompt: Sequence[int], tokens: Sequence[int], *, wrong: Set[int]) -> None:
        super().__init__()
        self._first = len(prompt)
        self._guesses = [
            (token + (place in wrong)) % VOCAB_SIZE for place, token in enumerate(tokens)
        ]

    def guess(self, *, most: int) -> list[int]:
        known = self.num_known - self._first
        return self._guesses[known : known + most]


def with_seers(requests: Sequence[Request], plain: Generated, wrong: Set[int]) -> Sequence[Request]:
    """The same requests, for which what came without guesses is guessed, but for some tokens."""
    for request in requests:
        tokens = plain.tokens[request.request_id]
        request.lookup = Seer(request.prompt_token_ids, tokens, wrong=wrong)
    return requests


class Oracle:
    """transformers' own `generate` on one request alone, with the model's own attention."""

    def __init__(
        self, folder: Path, *, model_class: type[PreTrainedModel] = AutoModelForCausalLM
    ) -> None:
        self._model: PreTrainedModel = model_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self._model.generation_config.eos_token_id = None
        self.greedy = functools.cache(self._greedy)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary], of what comes after each of them."""
        logits: torch.Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return logits.float()

    def alone(self, prompts: Sequence[Sequence[int]] = PROMPTS) -> dict[str, list[int]]:
        """The continuation of each prompt; no two are alike, so that equality says something."""
        found = {
            str(index): self.greedy(tuple(prompt), NUM_TOKENS)
            for index, prompt in enumerate(prompts)
        }
        assert len({tuple(tokens) for tokens in found.values()}) == len(found)
        return found

    def _greedy(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        """The continuation; refuses to be an oracle where two tokens are nearly as likely."""
        output = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for logits in output.logits:
            first, second = logits[0].topk(2).values.tolist()
            assert first - second > 1e-4, f"a near-tie after {prompt}: choose another seed"
        return output.sequences[0, len(prompt) :].tolist()
