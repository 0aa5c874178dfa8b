"""Named sets of settings. A flag, a variable or the file overrides what a preset sets."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

PresetName = Literal["low-latency", "high-throughput", "small-cpu"]

#: The settings of each preset. What a preset leaves out keeps its default.
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Few requests share a step, a long prompt cannot delay the tokens of others by much, and
        # every token is published at once.
        "low-latency": {
            "max_num_seqs": 16,
            "max_num_batched_tokens": 128,
            "max_prefill_tokens": 96,
            "policy": "adaptive",
            "num_speculative_tokens": 4,
            "publish_share": 1.0,
            "claim_batch": 4,
        },
        # Large steps, many requests at once, and tokens published in larger pieces.
        "high-throughput": {
            "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
            "publish_interval_seconds": 0.1,
            "claim_batch": 64,
        },
        # For a few cores and little memory: short steps, and no more requests than they can serve.
        "small-cpu": {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "max_prefill_tokens": 64,
            "num_host_blocks": 0,
            "claim_batch": 4,
        },
    }
)
