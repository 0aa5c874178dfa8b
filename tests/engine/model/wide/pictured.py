"""Tiny models that read pictures, pictures of noise, and what transformers makes of both."""

import copy
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from engine.model.run.model_runner import ModelRunner
from engine.model.wide.loader import load_model
from engine.picture import Picture
from engine.request import Request
from tests.engine.model.builders import (
    INITIALIZER_RANGE,
    NUM_TOKENS,
    make_prompt,
    make_request,
    make_runner,
)
from tests.engine.model.wide.wrappers import WRAPPERS

#: The placeholder of all configs.
PLACEHOLDER = 10

Pixels = dict[str, np.ndarray]
#: Text, as its number of tokens, and pictures, as numbers of which the noise is made.
Prompt = Sequence[int | str]

#: None, one in the middle, the same one behind another text, two with a token between them, and one
#: before the last token: transformers takes what comes right behind a picture for a part of it.
PROMPTS: Sequence[Prompt] = (
    (7,),
    (5, "a", 9),
    (3, "a", 4),
    (2, "b", 1, "c", 11),
    (6, "d", 1),
)


def noise(name: str, *shape: int) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _tiles(name: str, _: int) -> Pixels:
    """As many tiles as the place of the name in the alphabet, in which the last is padded."""
    count = 1 + ord(name) % 3
    mask = np.ones((1, count, 16, 16), dtype=np.int64)
    mask[:, -1, :, 8:] = 0
    return {"pixel_values": noise(name, 1, count, 3, 16, 16), "pixel_attention_mask": mask}


def _square(name: str, _: int) -> Pixels:
    return {"pixel_values": noise(name, 1, 3, 16, 16)}


def _patches(name: str, num_pictures: int) -> Pixels:
    """A picture of 20 x 30 pixels: as a whole and, if it is alone, in two parts."""
    pixels = noise(name, 1, 3 if num_pictures == 1 else 1, 3, 16, 16)
    return {
        "pixel_values": pixels,
        "image_sizes": np.array([[20, 30]]),
        "batch_num_images": np.array([num_pictures]),
    }


def _grid(name: str, _: int) -> Pixels:
    """Patches in a grid, of which four are a token; wide and high ones."""
    height, width = ((2, 6), (8, 2), (4, 4))[ord(name) % 3]
    grid = np.array([[1, height, width]])
    return {"pixel_values": noise(name, height * width, 3 * 2 * 14 * 14), "image_grid_thw": grid}


def _small_grid(name: str, num_pictures: int) -> Pixels:
    """The same, with patches of 16 pixels."""
    pixels = _grid(name, num_pictures)
    count = len(pixels["pixel_values"])
    return pixels | {"pixel_values": noise(name, count, 3 * 2 * 16 * 16)}


def _joined(axis: int) -> Callable[[Sequence[Pixels]], Pixels]:
    return lambda pictures: {
        name: pictures[0][name]
        if name == "batch_num_images"
        else np.concatenate([one[name] for one in pictures], axis)
        for name in pictures[0]
    }


@dataclass(frozen=True)
class Family:
    """How the pictures of a type are told to its encoder: alone, and several of one prompt.

    `pixels` are those of a name, in a prompt with so many pictures.
    """

    pixels: Callable[[str, int], Pixels]
    together: Callable[[Sequence[Pixels]], Pixels]
    seed: int = 0


FAMILIES = {
    "idefics3": Family(_tiles, _joined(1)),
    "llava": Family(_square, _joined(0)),
    "llava_onevision": Family(_patches, _joined(0)),
    "qwen2_5_vl": Family(_grid, _joined(0)),
    "qwen2_vl": Family(_grid, _joined(0)),
    "qwen3_vl": Family(_small_grid, _joined(0)),
    "qwen3_vl_moe": Family(_small_grid, _joined(0), seed=1),
    "smolvlm": Family(_tiles, _joined(1)),
}


def config_of(name: str) -> transformers.PreTrainedConfig:
    """That of the text, with pictures of a few patches, of outputs as large as embeddings."""
    config = copy.deepcopy(WRAPPERS[name])
    config.vision_config.initializer_range = INITIALIZER_RANGE
    if name == "llava_onevision":
        config.image_grid_pinpoints = [[16, 16], [16, 32], [32, 16]]
    return config


def whole_class(name: str) -> Any:
    return transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(WRAPPERS[name])]


def runner_of(folder: Path, **overrides) -> ModelRunner:
    return make_runner(folder, load=functools.partial(load_model, pictures=True), **overrides)


class Stage:
    """One family: its model, and prompts with pictures for it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.family = FAMILIES[name]
        self.runner = runner_of(folder)
        self._model = whole_class(name).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self._model.generation_config.eos_token_id = None

    @functools.cache  # noqa: B019 - a stage lives as long as its module.
    def num_placeholders(self, name: str, num_pictures: int) -> int:
        pixels = tensors(self.family.pixels(name, num_pictures))
        with torch.inference_mode():
            found = self._model.get_image_features(**pixels, return_dict=True).pooler_output
        return sum(map(len, found))

    def request(self, index: int, prompt: Prompt, *, output: Sequence[int] = ()) -> Request:
        """The request of a prompt; its text differs from that of every other index."""
        text = iter(make_prompt(64, salt=index))
        token_ids: list[int] = []
        pictures = []
        num_pictures = sum(isinstance(part, str) for part in prompt)
        for part in prompt:
            if isinstance(part, int):
                token_ids += itertools.islice(text, part)
                continue
            digest = hashlib.sha256(part.encode()).digest()
            length = self.num_placeholders(part, num_pictures)
            pixels = self.family.pixels(part, num_pictures)
            pictures.append(Picture(digest, len(token_ids), length, pixels))
            token_ids += [PLACEHOLDER] * length
        request = make_request(str(index), token_ids, output=output, max_tokens=NUM_TOKENS)
        request.pictures = tuple(pictures)
        return request

    def requests(self, outputs: dict[str, Sequence[int]] | None = None) -> list[Request]:
        """One request for each of PROMPTS, named by its number, behind what is published."""
        return [
            self.request(index, prompt, output=(outputs or {}).get(str(index), ()))
            for index, prompt in enumerate(PROMPTS)
        ]

    @functools.cached_property
    def expected(self) -> dict[str, list[int]]:
        """What transformers itself generates for each of PROMPTS, alone."""
        return {request.request_id: self._generate(request) for request in self.requests()}

    @torch.inference_mode()
    def _generate(self, request: Request) -> list[int]:
        """Refuses to be an oracle where two tokens are nearly as likely."""
        token_ids = torch.tensor([request.prompt_token_ids])
        given = {}
        if request.pictures:
            given = tensors(self.family.together([dict(p.pixels) for p in request.pictures]))
            given["mm_token_type_ids"] = (token_ids == PLACEHOLDER).long()
        if not hasattr(self._model.model, "get_rope_index"):
            given.pop("mm_token_type_ids", None)
        output = self._model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **given,
        )
        for logits in output.logits:
            first, second = logits[0].topk(2).values.tolist()
            assert first - second > 1e-4, f"a near-tie in {request.request_id}: change the seed"
        return output.sequences[0, token_ids.shape[1] :].tolist()


def tensors(pixels: Pixels) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in pixels.items()}
