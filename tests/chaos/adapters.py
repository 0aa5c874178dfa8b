"""The adapters of a stage: folders in PEFT's format, which every worker of it is given.

A fake model asks no more of an adapter than its name; a real one gets random weights, always the
same ones, so that what one worker has begun every other may go on with.
"""

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

#: What there is for requests to name, and the rank of each.
RANKS = {"first": 4, "second": 8}
NAMES = tuple(RANKS)
#: Of both; so large that an output is another one within a few tokens.
SCALE = 3.0


def lay_out(folder: Path, *, model: Path | None) -> None:
    """Makes the folder, and an adapter of each name in it; of a fake model for None."""
    for name, rank in RANKS.items():
        (folder / name).mkdir(parents=True)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank}
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
        if model is not None:
            weights = _random_weights(model, rank, seed=rank)
            save_file(weights, folder / name / "adapter_model.safetensors")


def _random_weights(folder: Path, rank: int, *, seed: int) -> dict[str, np.ndarray]:
    """For every linear layer in the layers of the model in this folder."""
    random_ = np.random.default_rng(seed)
    tensors = {}
    with safe_open(folder / "model.safetensors", "np") as model:
        for name in model.keys():  # noqa: SIM118 (it is no map)
            shape = model.get_slice(name).get_shape()
            if ".layers." not in name or len(shape) != 2:
                continue
            outputs, inputs = shape
            for side, form in {"A": (rank, inputs), "B": (outputs, rank)}.items():
                values = random_.standard_normal(form) / 2 / form[1] ** 0.5
                module = name.removesuffix(".weight")
                key = f"base_model.model.{module}.lora_{side}.weight"
                tensors[key] = values.astype(np.float32)
    return tensors
