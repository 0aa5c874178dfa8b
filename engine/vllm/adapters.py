"""LoRA adapters for vLLM: checked as the native engine checks them, and loaded by vLLM.

So both engines serve and refuse the same adapters, and know their revisions by the same
fingerprints. Two limits are vLLM's: the rank, and the layers that it can adapt.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from engine.errors import ModelRefused

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: The fields of an adapter's config that change its layers; all others were checked.
_DECIDING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
#: In place of a name: an adapter that adds nothing, for requests without one; see `for_none`.
NO_ADAPTER = ""
#: The values of vLLM's `max_lora_rank`.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True)
class CheckedAdapters:
    """Adapters that can be served.

    Args:
        folders: of each adapter, by name.
        fingerprints: of each adapter, by name; see `engine.model.adapters.Adapter`.
        max_rank: the largest rank of any layer.
        layer: name, inputs and outputs of one adapted layer.
        for_none: whether requests without an adapter need one that adds nothing. On a CPU, vLLM
            0.32 computes them with the adapter in its last slot.
    """

    folders: Mapping[str, Path]
    fingerprints: Mapping[str, str]
    max_rank: int
    layer: tuple[str, int, int] = ("", 0, 0)
    for_none: bool = False

    def arguments(self, *, max_num_seqs: int) -> dict[str, Any]:
        """The arguments of vLLM. Each adapter has a slot, so no request waits for one."""
        if not self.folders:
            return {}
        number = len(self.folders) + self.for_none
        return {
            "enable_lora": True,
            "max_lora_rank": min(rank for rank in RANKS if rank >= self.max_rank),
            "max_loras": min(number, max_num_seqs + self.for_none),
            "max_cpu_loras": number,
        }

    @contextmanager
    def plain_folders(self) -> Iterator[Mapping[str, Path]]:
        """Folders for vLLM to read now, by name: the weights, and a config of what matters.

        vLLM insists on fields that it does not need, such as `target_modules`: the layers are those
        of the weights.
        """
        from engine.model.adapters import CONFIG_NAME, WEIGHTS_NAME

        with TemporaryDirectory(prefix="quire-adapters-") as plain:
            for name, folder in self.folders.items():
                (target := Path(plain) / name).mkdir()
                known = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
                config = {field: known[field] for field in _DECIDING if field in known}
                config |= {"peft_type": "LORA", "target_modules": []}
                (target / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
                (target / WEIGHTS_NAME).symlink_to((folder / WEIGHTS_NAME).resolve())
            made = {name: Path(plain) / name for name in self.folders}
            if self.for_none and made:
                made[NO_ADAPTER] = self._write_nothing(Path(plain) / "no adapter")
            yield made

    def _write_nothing(self, folder: Path) -> Path:
        """Write an adapter whose one layer adds zeros."""
        import torch
        from safetensors.torch import save_file

        from engine.model.adapters import CONFIG_NAME, PREFIX, WEIGHTS_NAME

        folder.mkdir()
        config = {"peft_type": "LORA", "target_modules": [], "r": 1, "lora_alpha": 1}
        (folder / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
        name, inputs, outputs = self.layer
        sides = {"A": torch.zeros(1, inputs), "B": torch.zeros(outputs, 1)}
        tensors = {f"{PREFIX}{name}.lora_{side}.weight": each for side, each in sides.items()}
        save_file(tensors, folder / WEIGHTS_NAME)
        return folder


def check_adapters(
    model: Path, folders: Mapping[str, Path], *, for_none: bool = False
) -> CheckedAdapters:
    """Check the adapters of a model folder; for `for_none` see CheckedAdapters.

    Raises:
        ModelRefused: an adapter cannot be served; the message is one sentence.
    """
    if not folders:
        return CheckedAdapters({}, {}, 0)
    from engine.model.adapters import read_adapters

    read = read_adapters(_skeleton(model), folders, device="cpu")
    for adapter in read:
        if adapter.max_rank > RANKS[-1]:
            raise ModelRefused(
                f"the adapter in {folders[adapter.name]} cannot be served by engine vllm: it has "
                f"rank {adapter.max_rank}, and the limit is {RANKS[-1]}"
            )
    layer, part = next(iter(read[0].layers.items()))
    return CheckedAdapters(
        folders=folders,
        fingerprints={adapter.name: adapter.fingerprint for adapter in read},
        max_rank=max(adapter.max_rank for adapter in read),
        layer=(layer, part.down.shape[1], part.up.shape[0]),
        for_none=for_none,
    )


def _skeleton(folder: Path) -> "PreTrainedModel":
    """The model as transformers builds it, with names and shapes of its layers, without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(str(folder))
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ModelRefused(
            f"engine vllm serves no adapters of {folder}: its layers are not known here"
        ) from error
    return model
