"""Lightning attention, of MiniMax-Text-01: linear attention with a constant decay for each head.

Qin et al., "Lightning Attention-2", 2024, section 3. For each head, with the state S [head_dim,
head_dim] and the head's slope s:

    S = exp(-s) S + k v^T        output = S^T q

`generate` of transformers miscounts the positions of decodes if the first layer is of this kind, as
that of MiniMax-Text-01 is. Here such a model has the tokens of its forward pass over whole texts.
"""

from typing import Any

import torch

from engine.model.device.state_pool import StateShapes
from engine.model.kernels.recurrent import MatrixInputs
from engine.model.wide.mixers.functions import activation_of, sigmoid
from engine.model.wide.mixers.layer_state import LayerState


class LightningAttention:
    """State: a matrix for each head."""

    classes = frozenset({"MiniMaxLightningAttention"})
    has_kernels = True

    def shapes(self, module: Any) -> StateShapes:
        return ((module.num_attention_heads, module.head_dim, module.head_dim),)

    def step(
        self, module: Any, hidden: torch.Tensor, state: LayerState
    ) -> tuple[torch.Tensor, None]:
        projected = activation_of(module.act_fn)(module.qkv_proj(hidden).float())
        heads = projected.to(hidden.dtype).float().view(len(hidden), module.num_attention_heads, -1)
        decay = torch.exp(-module.slope_rate.float()).view(1, -1, 1)
        query, key, value = heads.chunk(3, dim=-1)
        outputs = state.recur(0, MatrixInputs(query, key, value, decay))
        normed = module.norm(outputs.to(hidden.dtype).flatten(1))
        gate = sigmoid(module.output_gate(hidden).float()).to(hidden.dtype)
        return module.out_proj(gate * normed), None
