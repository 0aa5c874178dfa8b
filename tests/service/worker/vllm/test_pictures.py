"""vLLM reads pictures as transformers does: whole, in chunks, resumed, and from its caches."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import ModelRefused
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.vllm.config import READERS, VllmLimits, configure
from engine.vllm.load import _fingerprint
from service.worker.model.pictures import DecodedPicture
from service.worker.model.served import ServedModel, load_model
from service.worker.settings.config import Settings
from tests.service.worker.vllm.builders import generate

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` has it")

import transformers
from safetensors.torch import load_file, save_file

from tests.service.picture_models import MODELS, library_processor, tokenizer

#: Loading takes longer than most tests.
pytestmark = pytest.mark.timeout(900)

NUM_TOKENS, PUBLISHED = 12, 5
#: Heights and widths of the pictures of each prompt: wide, high, and two.
PROMPTS = (((40, 70),), ((100, 30),), ((16, 16), (50, 50)))
#: These import torchvision in vLLM.
WITH_TORCHVISION = ("llava", "llava_onevision", "qwen2_5_vl", "qwen3_vl")
NAMES = ("smolvlm", "idefics3", *WITH_TORCHVISION)


def settings_of(folder: Path) -> Settings:
    """A step of 48 tokens divides the prompts, and pictures in them."""
    return Settings(
        model=str(folder),
        engine="vllm",
        dtype="float32",
        pictures=True,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        check_invariants=True,
        kv_cache_memory_bytes=64 << 20,
        vllm={"enforce_eager": True, "max_model_len": 2048},
    )


class Compared:
    """A model in vLLM, prompts with pictures, and what transformers generates for them."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self.served: ServedModel = load_model(settings_of(folder))
        self.prompts = [self._prompt_of(sizes) for sizes in PROMPTS]
        self.expected = [self._expected(*prompt) for prompt in self.prompts]

    def _prompt_of(self, sizes: Sequence[tuple[int, int]]) -> tuple[str, list[DecodedPicture]]:
        """The text, and pictures of noise."""
        parts = [{"type": "text", "text": "What is it? "}, *[{"type": "image"} for _ in sizes]]
        text = (
            MODELS[self._name]
            .wrapped()
            .apply_chat_template(
                [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
            )
        )
        pictures = [
            DecodedPicture(
                bytes([height, width] * 16),
                np.random.default_rng(height).integers(0, 255, (height, width, 3), dtype=np.uint8),
                "body",
            )
            for height, width in sizes
        ]
        return text, pictures

    @torch.inference_mode()
    def _expected(self, text: str, pictures: Sequence[DecodedPicture]) -> list[int]:
        kind = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(MODELS[self._name].config)]
        model: Any = kind.from_pretrained(
            self._folder, dtype=torch.float32, attn_implementation="eager"
        )
        model.generation_config.eos_token_id = None
        inputs = library_processor(self._name, self._folder)(
            text=[text],
            images=[[one.rgb for one in pictures]],
            return_tensors="pt",
            input_data_format="channels_last",
        )
        output = model.generate(
            **inputs, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
        )
        found: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return found

    def requests(self, *, published: int = 0, **fields: Any) -> list[Request]:
        assert self.served.pictures is not None
        made = []
        for number, (text, pictures) in enumerate(self.prompts):
            token_ids = tokenizer().encode(text, add_special_tokens=False).ids
            expanded = self.served.pictures.expand(token_ids, pictures, most=2000)
            made.append(
                Request(
                    f"{number} behind {published}",
                    expanded.token_ids,
                    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
                    0.0,
                    output_token_ids=list(self.expected[number][:published]),
                    pictures=expanded.pictures,
                    **fields,
                )
            )
        return made


@pytest.fixture(scope="module", params=NAMES)
def compared(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    name: str = request.param
    if name in WITH_TORCHVISION and find_spec("torchvision") is None:
        pytest.skip(f"vLLM needs torchvision for {name}, which is not installed here")
    folder = MODELS[name].save(tmp_path_factory.mktemp("model") / name)
    if name in ("llava", "llava_onevision"):
        name_as_published(folder / "model.safetensors")
    return Compared(name, folder)


def name_as_published(file: Path) -> None:
    """Give the weights the names of published checkpoints.

    Transformers 5 saves others, which vLLM 0.32 does not know.
    """
    begin = "vision_tower."
    weights = {
        name.replace(begin, f"{begin}vision_model.", 1) if name.startswith(begin) else name: weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})


def test_tokens_are_those_of_transformers_in_a_batch_and_resumed(compared):
    engine = compared.served.engine
    whole = generate(engine, compared.requests())
    assert list(whole.values()) == compared.expected
    assert len({tuple(tokens) for tokens in compared.expected}) == len(PROMPTS)
    # Another salt, so that nothing comes from the cache.
    resumed = generate(engine, compared.requests(published=PUBLISHED, cache_salt="other"))
    assert list(resumed.values()) == compared.expected


def test_a_cached_prefix_is_that_of_its_pictures(compared):
    engine = compared.served.engine
    generate(engine, compared.requests(cache_salt="first"))
    again = compared.requests(cache_salt="first")
    assert list(generate(engine, again).values()) == compared.expected
    block = engine.config.block_size
    for request in again:
        assert request.num_cached_tokens == (request.num_prompt_tokens - 1) // block * block


def test_every_type_whose_pictures_are_read_is_tested():
    assert set(NAMES) == READERS


def test_pictures_of_a_type_that_was_not_compared_are_refused_at_the_start(tmp_path):
    folder = MODELS["smolvlm"].save(tmp_path / "smolvlm")
    config = folder / "config.json"
    config.write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, '
        '"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}'
    )
    with pytest.raises(ModelRefused, match="pictures of llama are not read with vLLM"):
        load_model(settings_of(folder))


def test_a_division_into_tiles_that_vllm_does_not_read_is_refused_at_the_start(tmp_path):
    if find_spec("torchvision") is None:
        pytest.skip("vLLM needs torchvision for llava_onevision, which is not installed here")
    folder = MODELS["llava_onevision"].save(tmp_path / "llava_onevision")
    file = folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"vision_aspect_ratio": "anyres_max_4"})
    )
    with pytest.raises(ModelRefused, match="anyres_max_9 only, and not anyres_max_4"):
        load_model(settings_of(folder))


def test_what_prepares_pictures_is_in_the_fingerprint(tmp_path):
    """Another resizing makes other pixels, although vLLM computes the same with them."""

    def fingerprint(*, pictures: bool) -> str:
        limits = VllmLimits(max_num_seqs=4, dtype="float32", pictures=pictures)
        return _fingerprint(configure(str(folder), limits, given={}, adapters={}))

    folder = MODELS["smolvlm"].save(tmp_path / "smolvlm")
    text, seen = fingerprint(pictures=False), fingerprint(pictures=True)
    (folder / "preprocessor_config.json").write_text('{"do_resize": false}')
    assert fingerprint(pictures=False) == text
    assert fingerprint(pictures=True) not in (seen, text)
