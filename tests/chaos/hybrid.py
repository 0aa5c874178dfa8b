"""The hybrid model of some plays: linear attention, whose state is recurrent, and full attention.

Its weights are random, from one seed, so every stage saves the same model. Its tokenizer is that of
the embedded model.
"""

import shutil
from pathlib import Path

from service.worker.settings.config import EMBEDDED_MODEL

#: Its name, and that of the native engine with it in commands.
HYBRID = "hybrid"
#: Files of the tokenizer.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
#: Of the weights; so large that a wrong state soon shows in the tokens.
DEVIATION = 0.3


def save(parent: Path) -> Path:
    """Saves the model and its tokenizer in a new folder, which has the name of the model."""
    import torch
    import transformers

    folder = parent / HYBRID
    sizes = transformers.AutoConfig.from_pretrained(EMBEDDED_MODEL)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=sizes.vocab_size,
        bos_token_id=sizes.bos_token_id,
        eos_token_id=sizes.eos_token_id,
        pad_token_id=sizes.pad_token_id,
        max_position_embeddings=sizes.max_position_embeddings,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = transformers.Qwen3_5ForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=DEVIATION)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(EMBEDDED_MODEL / name, folder / name)
    return folder
