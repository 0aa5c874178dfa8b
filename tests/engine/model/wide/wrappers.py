"""A tiny config of every multimodal wrapper whose text model is served."""

import transformers
from transformers import PreTrainedConfig

from tests.engine.model.builders import _GROUPED, CONFIGS, VOCAB_SIZE

_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_TOWER = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
_CLIP = transformers.CLIPVisionConfig(**_TOWER).to_dict()
_SIGLIP = transformers.SiglipVisionConfig(**_TOWER).to_dict()
_LLAMA, _MISTRAL = CONFIGS["llama"].to_dict(), CONFIGS["mistral"].to_dict()
_QWEN2 = transformers.Qwen2Config(**_GROUPED).to_dict()
_COHERE2 = transformers.Cohere2Config(**_GROUPED, sliding_window=13).to_dict()
#: Rotary frequencies that are divided among time, height and width.
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_QWEN = _GROUPED | {"rope_parameters": _MROPE}
_QWEN3 = _QWEN | {"head_dim": 16, "rope_parameters": _MROPE | {"mrope_interleaved": True}}
_VISUAL_TOKENS = {
    "image_token_id": 10,
    "video_token_id": 11,
    "vision_start_token_id": 12,
    "vision_end_token_id": 13,
}
_QWEN3_TOWER = _QWEN_TOWER | {"depth": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]}

WRAPPERS: dict[str, PreTrainedConfig] = {
    "aya_vision": transformers.AyaVisionConfig(
        vision_config=_SIGLIP, text_config=_COHERE2, image_token_index=10
    ),
    "cohere2_vision": transformers.Cohere2VisionConfig(
        vision_config=_SIGLIP,
        text_config=_COHERE2,
        image_token_id=10,
        alignment_intermediate_size=64,
    ),
    "gemma3": transformers.Gemma3Config(
        vision_config=_SIGLIP,
        text_config=_GROUPED
        | {
            "head_dim": 16,
            "sliding_window": 13,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        mm_tokens_per_image=4,
        image_token_index=10,
    ),
    "glm4v": transformers.Glm4vConfig(
        text_config=_QWEN | {"rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}},
        vision_config=_QWEN_TOWER | {"out_hidden_size": 64},
        image_token_id=10,
        video_token_id=11,
    ),
    "idefics3": transformers.Idefics3Config(
        vision_config=_TOWER, text_config=_LLAMA, image_token_id=10
    ),
    "internvl": transformers.InternVLConfig(
        vision_config=_TOWER | {"image_size": [16, 16], "patch_size": [8, 8]},
        text_config=_QWEN2,
        image_token_id=10,
    ),
    "llama4": transformers.Llama4Config(
        vision_config=_TOWER
        | {
            "intermediate_size": 64,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "vision_output_dim": 32,
        },
        text_config=CONFIGS["llama4"].to_dict(),
    ),
    "llava": transformers.LlavaConfig(
        vision_config=_CLIP, text_config=_LLAMA, image_token_index=10
    ),
    "llava_next": transformers.LlavaNextConfig(
        vision_config=_CLIP, text_config=_MISTRAL, image_token_index=10
    ),
    "llava_onevision": transformers.LlavaOnevisionConfig(
        vision_config=_SIGLIP, text_config=_QWEN2, image_token_index=10
    ),
    "mistral3": transformers.Mistral3Config(
        vision_config=_TOWER | {"model_type": "pixtral", "head_dim": 16},
        text_config=_MISTRAL,
        image_token_index=10,
    ),
    "ovis2": transformers.Ovis2Config(
        vision_config=_TOWER | {"vocab_size": 64},
        text_config=_QWEN2,
        image_token_id=10,
        hidden_size=64,
        vocab_size=VOCAB_SIZE,
    ),
    "qwen2_5_vl": transformers.Qwen2_5_VLConfig(
        text_config=_QWEN,
        vision_config=_QWEN_TOWER | {"out_hidden_size": 64},
        **_VISUAL_TOKENS,
    ),
    "qwen2_vl": transformers.Qwen2VLConfig(
        text_config=_QWEN,
        vision_config={
            "depth": 1,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 1,
        },
        **_VISUAL_TOKENS,
    ),
    "qwen3_vl": transformers.Qwen3VLConfig(
        text_config=_QWEN3, vision_config=_QWEN3_TOWER, **_VISUAL_TOKENS
    ),
    "qwen3_vl_moe": transformers.Qwen3VLMoeConfig(
        text_config=_QWEN3
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        vision_config=_QWEN3_TOWER,
        **_VISUAL_TOKENS,
    ),
    "smolvlm": transformers.SmolVLMConfig(
        vision_config=_TOWER, text_config=_LLAMA, image_token_id=10
    ),
}
