"""Decoders with another head than that of the vocabulary, behind the interface of a causal model.

The head of an embedding model is the identity: what the model returns for a token is its last
hidden state, and the paths of causal models, their checks and kernels serve it unchanged.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.errors import ModelRefused
from engine.model.pooling.encoder import num_embeddings
from engine.model.wide.loader import LoadedModel, load_model

#: Fields of a config by which logits are divided or capped: hidden states are not.
LOGITS_ONLY: dict[str, Any] = {"final_logit_softcapping": None, "logits_scaling": 1.0}


def load_headless(
    path: str | Path, *, dtype: str = "auto", device: torch.device | str = "cpu"
) -> LoadedModel:
    """Load a causal model with the identity in place of its head.

    Raises:
        ModelRefused: as `load_model`; or a vector would have more numbers than there are tokens.
    """
    loaded = load_model(path, dtype=dtype, device=device)
    model = loaded.model
    width = int(model.config.get_text_config().hidden_size)
    if width > num_embeddings(model):
        raise ModelRefused(f"{path} has more hidden numbers ({width}) than tokens")
    head = nn.Linear(width, width, bias=False, dtype=loaded.dtype, device=device)
    head.requires_grad_(requires_grad=False)
    head.weight.copy_(torch.eye(width))
    model.set_output_embeddings(head)  # type: ignore[no-untyped-call]
    config = model.config.get_text_config()
    config.tie_word_embeddings = model.config.tie_word_embeddings = False
    for name, value in LOGITS_ONLY.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return loaded
