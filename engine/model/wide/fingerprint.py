"""Identifies what a model computes: its files, its type, and what computes with them.

Knows no request. Two workers with equal fingerprints continue each other's outputs.
"""

import hashlib
from importlib import metadata
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

#: Files other than weights that change prompt or output tokens; each may be missing.
DECIDING_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
#: Files that change what a model reads in a picture; each may be missing.
PICTURE_FILES = ("preprocessor_config.json", "processor_config.json")
#: The libraries that decode and resize pictures, and make the arguments of an encoder of them.
PICTURE_LIBRARIES = ("pillow", "transformers")
#: The fingerprint of a weight file covers NUM_SAMPLES samples of SAMPLE_BYTES, evenly spread:
#: training changes nearly all of them, and reading the whole file would take as long as loading it.
NUM_SAMPLES, SAMPLE_BYTES = 256, 4096


def content_of_folder(folder: Path, *, pictures: bool = False) -> "hashlib._Hash":
    """A hash of what a folder contains: all deciding files, and samples of the weights.

    With `pictures`, also what decides what a model sees in them.
    """
    digest = hashlib.sha256()
    if pictures:
        digest.update(" ".join(map(_version_of, PICTURE_LIBRARIES)).encode())
    for name in (*DECIDING_FILES, *(PICTURE_FILES if pictures else ())):
        if (folder / name).is_file():
            digest.update(name.encode() + hashlib.sha256((folder / name).read_bytes()).digest())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for sample in range(NUM_SAMPLES):
                stream.seek(size * sample // NUM_SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest


def _version_of(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


def fingerprint_of(content: "hashlib._Hash", model: PreTrainedModel) -> str:
    """Identifies the weights of a model, its type, and what computes with them."""
    digest = content.copy()
    versions = f"{model.dtype} {torch.__version__} {transformers.__version__}"
    digest.update(f"{versions} {_processor(model.device)}".encode())
    return digest.hexdigest()[:32]


def _processor(device: torch.device) -> str:
    """The type of processor by which torch selects kernels; another type may round differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type
