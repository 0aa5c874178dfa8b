"""A worker's model with a recurrent state: what is switched off, its snapshots, and its tokens."""

import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from engine.request import Request
from engine.sampling_params import SamplingParams
from service.worker.model.served import ServedModel, load_model
from service.worker.settings.config import EMBEDDED_MODEL
from tests.service.builders import make_settings

pytestmark = pytest.mark.usefixtures("frozen_again")

#: Files of the tokenizer, which the model borrows.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("mamba")
    vocab_size = transformers.AutoConfig.from_pretrained(EMBEDDED_MODEL).vocab_size
    config = transformers.MambaConfig(
        vocab_size=vocab_size, hidden_size=32, num_hidden_layers=2, state_size=4,
        initializer_range=0.3, eos_token_id=1, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(EMBEDDED_MODEL / name, folder / name)
    return folder


def load(folder: Path, **overrides) -> ServedModel:
    settings = {"model": str(folder), "device": "cpu", "max_num_seqs": 4}
    return load_model(make_settings("redis://nowhere", "queue", **(settings | overrides)))


def tokens(served: ServedModel, *, published: list[int]) -> list[int]:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    served.engine.add_request(Request("r", PROMPT, sampling, 0.0, output_token_ids=published))
    found = []
    while served.engine.has_work():
        for output in served.engine.step(lambda: 0.0):
            assert output.error is None
            found += output.token_ids
    return found


def test_a_worker_serves_it_without_drafts_and_another_goes_on(folder):
    with capture_logs():
        served = load(folder, num_speculative_tokens=3)
    config = served.engine.config
    assert (config.num_speculative_tokens, config.num_state_slots) == (0, 4)
    whole = tokens(served, published=[])
    assert len(set(whole)) > 3
    other = load(folder, max_num_batched_tokens=7)
    assert tokens(other, published=whole[:5]) == whole[5:]


@pytest.mark.parametrize(
    ("settings", "num_snapshots"),
    [
        ({}, 4),
        ({"num_state_snapshots": 9, "state_snapshot_blocks": 1}, 9),
        ({"num_state_snapshots": 0}, 0),
        ({"enable_prefix_caching": False, "num_state_snapshots": 9}, 0),
    ],
)
def test_an_equal_prompt_is_found_in_the_cache_if_snapshots_are_kept(
    folder, settings, num_snapshots
):
    served = load(folder, **settings)
    config = served.engine.config
    assert (config.num_state_snapshots, config.enable_prefix_caching) == (
        num_snapshots,
        num_snapshots > 0,
    )
    first = tokens(served, published=[])
    assert tokens(served, published=[]) == first
    assert served.engine.snapshot().cached_prompt_tokens == (16 if num_snapshots else 0)


def test_blocks_of_a_model_that_attends_nowhere_take_no_memory_and_are_enough(folder):
    served = load(folder)
    config = served.engine.config
    assert served.cache_bytes == {"block": 0, "device": 0, "host": 0}
    assert config.max_request_tokens == config.max_model_len == 1 << 16
