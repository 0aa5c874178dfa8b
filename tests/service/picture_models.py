"""Folders of tiny models that read pictures, as a user would have them: weights and all files."""

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

#: The side of a tile, in pixels, and that of the square patches in it.
TILE, PATCH = 16, 4
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": PATCH,
}
#: Writes parts only, as SmolVLM's template: a content that is a text is lost.
IN_PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Takes parts or texts, as the templates of Qwen's.
QWEN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% elif 'text' in part %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = (
    *("<eos>", "<|im_start|>", "<|im_end|>", "<image>"),
    *("<fake_token_around_image>", "<global-img>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<video>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)


@cache
def tokenizer() -> Tokenizer:
    """A token for each byte, and the special ones of all families."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={symbol: n for n, symbol in enumerate(symbols)}, merges=[]))
    made.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


@dataclass(frozen=True)
class PictureModel:
    """A family: its config, its image processor's, and its template."""

    config: Any
    processor: dict[str, Any]
    template: str = IN_PARTS

    def save(self, folder: Path, *, seed: int = 0) -> Path:
        """A folder with a model of random weights."""
        torch.manual_seed(seed)
        kind = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(self.config)]
        kind(self.config).save_pretrained(folder)
        self.wrapped().save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(self.processor))
        return folder

    def wrapped(self) -> Any:
        """The tokenizer as transformers has it."""
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer(), eos_token="<eos>", chat_template=self.template
        )


def _id(text: str) -> int:
    found = tokenizer().token_to_id(text)
    assert found is not None
    return found


def _text_config(kind: type, **others: Any) -> dict[str, Any]:
    """A small decoder, whose outputs wander."""
    fields: dict[str, Any] = kind(
        **others,
        vocab_size=tokenizer().get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        # Heads of 32: vLLM's attention on a CPU computes no smaller ones.
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=_id("<eos>"),
        pad_token_id=_id("<eos>"),
    ).to_dict()
    return fields


_LLAMA = _text_config(transformers.LlamaConfig)
#: Rotary frequencies that are divided among time, height and width.
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
_QWEN_TOWER = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
_QWEN_TOKENS = {
    "image_token_id": _id("<|image_pad|>"),
    "video_token_id": _id("<|video_pad|>"),
    "vision_start_token_id": _id("<|vision_start|>"),
    "vision_end_token_id": _id("<|vision_end|>"),
}
_PINPOINTS = [[TILE, TILE], [TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]
_GRID = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2} | {
    "temporal_patch_size": 2,
    "min_pixels": 4 * 28 * 28,
    "max_pixels": 32 * 28 * 28,
}
_TILES = {"size": {"longest_edge": 4 * TILE}, "max_image_size": {"longest_edge": TILE}}

MODELS: dict[str, PictureModel] = {
    "smolvlm": PictureModel(
        transformers.SmolVLMConfig(
            vision_config=_TOWER, text_config=_LLAMA, image_token_id=_id("<image>")
        ),
        {"image_processor_type": "SmolVLMImageProcessor"} | _TILES,
    ),
    "idefics3": PictureModel(
        transformers.Idefics3Config(
            vision_config=_TOWER, text_config=_LLAMA, image_token_id=_id("<image>")
        ),
        {"image_processor_type": "Idefics3ImageProcessor"} | _TILES,
    ),
    "llava": PictureModel(
        transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**_TOWER).to_dict(),
            text_config=_LLAMA,
            image_token_index=_id("<image>"),
        ),
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": TILE},
            "crop_size": {"height": TILE, "width": TILE},
        },
    ),
    "llava_onevision": PictureModel(
        transformers.LlavaOnevisionConfig(
            vision_config=transformers.SiglipVisionConfig(**_TOWER).to_dict(),
            text_config=_text_config(transformers.Qwen2Config),
            image_token_index=_id("<image>"),
            video_token_index=_id("<video>"),
            image_grid_pinpoints=_PINPOINTS,
        ),
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": TILE, "width": TILE},
            "image_grid_pinpoints": _PINPOINTS,
        },
    ),
    "qwen2_5_vl": PictureModel(
        transformers.Qwen2_5_VLConfig(
            text_config=_text_config(transformers.Qwen2Config, rope_parameters=_AXES),
            vision_config=_QWEN_TOWER | {"out_hidden_size": 64},
            **_QWEN_TOKENS,
        ),
        _GRID | {"patch_size": 14},
        QWEN,
    ),
    "qwen3_vl": PictureModel(
        transformers.Qwen3VLConfig(
            text_config=_text_config(
                transformers.Qwen3Config,
                head_dim=32,
                rope_parameters=_AXES | {"mrope_interleaved": True},
            ),
            vision_config=_QWEN_TOWER | {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]},
            **_QWEN_TOKENS,
        ),
        _GRID | {"patch_size": 16},
        QWEN,
    ),
}


def library_processor(name: str, folder: Path) -> Any:
    """transformers' own processor of a family, without its checks for libraries of videos."""
    library: Any = transformers
    kind = getattr(library, PROCESSOR_MAPPING_NAMES[MODELS[name].config.model_type])
    # Only texts for videos use it.
    sys.modules[kind.__module__].__dict__["num2words"] = str
    unchecked = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    options: dict[str, dict[str, Any]] = {
        "smolvlm": {"image_seq_len": 4, "video_processor": None},
        "idefics3": {"image_seq_len": 4},
        "llava": {
            "patch_size": PATCH,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        "llava_onevision": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    }
    return unchecked(
        image_processor=library.AutoImageProcessor.from_pretrained(folder, backend="pil"),
        tokenizer=MODELS[name].wrapped(),
        **options.get(name, {}),
    )
