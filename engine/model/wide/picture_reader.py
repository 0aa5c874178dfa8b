"""Computes with a model's pictures: encodes each once, and puts the outputs into the steps.

Knows the names of the types that were compared with transformers, and little of architectures: the
model's own `get_image_features` encodes a picture. A picture is always encoded alone, so its
outputs do not depend on other requests, nor on the chunks in which the prompt is computed.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from engine.model.causal_model import PicturedRow, StepInputs
from engine.model.wide.rotary_axes import Grid, rotary_positions
from engine.picture import Picture

#: The types whose pictures are read. Each has a test that compares its tokens with transformers'.
READERS = frozenset(
    {
        "idefics3",
        "llava",
        "llava_onevision",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
    }
)
#: The most bytes of outputs that are kept for later chunks and requests; one picture is always
#: kept, however large it is.
MAX_KEPT_BYTES = 1 << 28


def may_read_pictures(config: PreTrainedConfig) -> bool:
    """Whether a model of this config can be loaded with its encoder of pictures."""
    return config.model_type in READERS


class _Part(NamedTuple):
    """Outputs of the encoder [count, outputs] that the tokens [count] of a step stand for."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    outputs: torch.Tensor


class PictureReader:
    """The encoder of a model, and its last outputs.

    The outputs for a token are its embedding, followed by what some models add to the states behind
    their first layers.

    Args:
        model: a model with the modules of its encoder.
        max_kept_bytes: as `MAX_KEPT_BYTES`.
    """

    def __init__(self, model: Any, *, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._model: Any = model
        self._placeholder = int(model.config.image_token_id)
        self._hidden_size = int(model.config.get_text_config().hidden_size)
        self._has_axes = hasattr(model.base_model, "get_rope_index")
        self.max_kept_bytes = max_kept_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._num_kept_bytes = 0
        #: What the forward pass that is about to begin adds to its states, for the hook.
        self._added: dict[str, Any] = {}
        text: Any = self._model.get_decoder()
        text.register_forward_pre_hook(self._pass_added, with_kwargs=True)
        self._on_layer: Callable[[], None] = lambda: None
        for layer in _layers_outside_of(text, self._model):
            layer.register_forward_hook(lambda *_: self._on_layer())

    def follow(self, on_layer: Callable[[], None]) -> None:
        """Call this after each layer of the encoder, which may take a picture for minutes."""
        self._on_layer = on_layer

    @torch.inference_mode()
    def encode(self, pixels: Mapping[str, Any]) -> torch.Tensor:
        """The outputs for a picture that nobody has sent, [placeholders, outputs]."""
        return self._encode(pixels)

    def arguments(self, inputs: StepInputs) -> dict[str, torch.Tensor]:
        """The tokens of a step, or embeddings in their place, and their positions.

        Raises:
            ValueError: a picture has another number of placeholders than outputs.
        """
        self._added = {}
        found = {"input_ids": inputs.token_ids[None], "position_ids": inputs.positions[None]}
        if self._has_axes and inputs.pictured:
            found["position_ids"] = self._positions(inputs)[:, None]
        parts = [part for row in inputs.pictured for part in self._parts(row)]
        if parts:
            del found["input_ids"]
            found["inputs_embeds"] = self._embeddings(inputs.token_ids, parts)[None]
        return found

    def _embeddings(self, token_ids: torch.Tensor, parts: Sequence[_Part]) -> torch.Tensor:
        embeddings: torch.Tensor = self._model.get_input_embeddings()(token_ids)
        places = torch.from_numpy(np.concatenate([part.tokens for part in parts]))
        places = places.to(embeddings.device)
        outputs = torch.cat([part.outputs for part in parts]).to(embeddings.dtype)
        first, *added = torch.split(outputs, self._hidden_size, dim=-1)
        if added:
            mask = torch.zeros(1, len(token_ids), dtype=torch.bool, device=embeddings.device)
            mask[0, places] = True
            self._added = {"visual_pos_masks": mask, "deepstack_visual_embeds": added}
        return embeddings.index_copy(0, places, first)

    def _positions(self, inputs: StepInputs) -> torch.Tensor:
        """The rotary positions, [3, tokens]."""
        positions = inputs.positions.expand(3, -1).clone()
        for row in inputs.pictured:
            grids = [self._grid_of(picture) for picture in row.pictures]
            found = torch.from_numpy(rotary_positions(grids, row.start, row.end))
            positions[:, row.first : row.first + row.end - row.start] = found
        return positions

    def _grid_of(self, picture: Picture) -> Grid:
        merged = self._model.config.vision_config.spatial_merge_size
        time, height, width = map(int, picture.pixels["image_grid_thw"][0])
        return Grid(picture.start, time, height // merged, width // merged)

    def _pass_added(self, _: Any, args: Any, options: dict[str, Any]) -> Any:
        """A hook before the text model, as a model passes on only what it has encoded itself."""
        added, self._added = self._added, {}
        return (args, options | added) if added else None

    def _parts(self, row: PicturedRow) -> Iterator[_Part]:
        for picture in row.pictures:
            start, end = max(row.start, picture.start), min(row.end, picture.end)
            if start >= end:
                continue
            span = np.array(row.prompt_token_ids[picture.start : picture.end])
            places = picture.start + np.flatnonzero(span == self._placeholder)
            first, last = np.searchsorted(places, (start, end))
            if first < last:
                outputs = self._outputs(picture)
                if len(outputs) != len(places):
                    message = f"{len(places)} placeholders stand for {len(outputs)} outputs"
                    raise ValueError(f"the picture at {picture.start}: {message}")
                yield _Part(places[first:last] - row.start + row.first, outputs[first:last])

    def _outputs(self, picture: Picture) -> torch.Tensor:
        """The encoder's outputs for a picture, [placeholders, outputs]."""
        outputs = self._kept.get(picture.key)
        if outputs is not None:
            self._kept.move_to_end(picture.key)
            return outputs
        outputs = self._encode(picture.pixels)
        self._kept[picture.key] = outputs
        self._num_kept_bytes += outputs.nbytes
        while self._num_kept_bytes > self.max_kept_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_bytes -= oldest.nbytes
        return outputs

    def _encode(self, pixels: Mapping[str, Any]) -> torch.Tensor:
        device = self._model.device
        given = {name: torch.as_tensor(values, device=device) for name, values in pixels.items()}
        encoded = self._model.get_image_features(**given, return_dict=True)
        added = getattr(encoded, "deepstack_features", None) or ()
        layers = [torch.cat(list(outputs)) for outputs in (encoded.pooler_output, *added)]
        return torch.cat(layers, dim=-1)


def _layers_outside_of(text: nn.Module, model: nn.Module) -> Iterator[nn.Module]:
    """The modules of all lists in the model but those of its text model: layers of the encoder."""
    known = set(text.modules())
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in known:
            yield from module
