"""Computes with a model's pictures: encodes each once, and puts the outputs into the steps.

Knows the names of the types that were compared with transformers, and no architecture: the model's
own `get_image_features` encodes a picture. A picture is always encoded alone, so its outputs do not
depend on other requests, nor on the chunks in which the prompt is computed.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.model.causal_model import PicturedRow, StepInputs
from engine.picture import Picture

#: The types whose pictures are read. Each has a test that compares its tokens with transformers'.
READERS = frozenset({"idefics3", "llava", "smolvlm"})
#: The most bytes of outputs that are kept for later chunks and requests; one picture is always
#: kept, however large it is.
MAX_KEPT_BYTES = 1 << 28


def may_read_pictures(config: PreTrainedConfig) -> bool:
    """Whether a model of this config can be loaded with its encoder of pictures."""
    return config.model_type in READERS


class _Part(NamedTuple):
    """Outputs of the encoder [count, hidden] that the tokens [count] of a step stand for."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    outputs: torch.Tensor


class PictureReader:
    """The encoder of a model, and its last outputs.

    Args:
        model: a model with the modules of its encoder.
        max_kept_bytes: as `MAX_KEPT_BYTES`.
    """

    def __init__(self, model: PreTrainedModel, *, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._model: Any = model
        self._placeholder = int(model.config.image_token_id)
        self._max_kept_bytes = max_kept_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._num_kept_bytes = 0

    def embeddings(self, inputs: StepInputs) -> torch.Tensor | None:
        """The input embeddings of a step, [tokens, hidden]; None if it has no part of a picture.

        Raises:
            ValueError: a picture has another number of placeholders than outputs.
        """
        parts = [part for row in inputs.pictured for part in self._parts(row)]
        if not parts:
            return None
        embeddings: torch.Tensor = self._model.get_input_embeddings()(inputs.token_ids)
        tokens = torch.from_numpy(np.concatenate([part.tokens for part in parts]))
        outputs = torch.cat([part.outputs for part in parts]).to(embeddings.dtype)
        return embeddings.index_copy(0, tokens.to(embeddings.device), outputs)

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
        """The encoder's outputs for a picture, [placeholders, hidden]."""
        outputs = self._kept.get(picture.key)
        if outputs is not None:
            self._kept.move_to_end(picture.key)
            return outputs
        outputs = self._encode(picture)
        self._kept[picture.key] = outputs
        self._num_kept_bytes += outputs.nbytes
        while self._num_kept_bytes > self._max_kept_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_bytes -= oldest.nbytes
        return outputs

    def _encode(self, picture: Picture) -> torch.Tensor:
        device = self._model.device
        pixels = {
            name: torch.as_tensor(values, device=device) for name, values in picture.pixels.items()
        }
        encoded = self._model.get_image_features(**pixels, return_dict=True)
        return torch.cat(list(encoded.pooler_output))
