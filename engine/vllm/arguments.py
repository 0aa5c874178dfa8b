"""vLLM's arguments: those that Quire sets, those that a worker may set, and their checks.

vLLM's own command line reads and checks the values, so every argument that it knows can be set, in
the form in which vLLM documents it.
"""

import argparse
import dataclasses
import difflib
import json
from collections.abc import Mapping
from typing import Any

from engine.errors import ModelRefused

#: Arguments that a worker may not set, and why.
_RESERVED = {
    "model": "the setting `model` names it",
    "tokenizer": "the tokens of a worker come from the tokenizer of its model",
    "dtype": "set `dtype`",
    "served_model_name": "set `served_model_name`",
    "max_num_seqs": "set `max_num_seqs`",
    "max_num_batched_tokens": "set `max_num_batched_tokens`",
    "long_prefill_token_threshold": "set `long_prefill_token_threshold`",
    "enable_prefix_caching": "set `enable_prefix_caching`",
    "kv_cache_memory_bytes": "set `kv_cache_memory_bytes`",
    "num_gpu_blocks_override": "set `num_blocks`",
    "enable_lora": "set `adapters`",
    "max_cpu_loras": "all `adapters` are kept",
    "max_lora_rank": "the largest rank of `adapters` decides it",
    "scheduling_policy": "set `policy`",
    "seed": "the seed of a request decides its noise",
    "skip_tokenizer_init": "vLLM gets and returns token ids",
    "logits_processors": "the sampler is Quire's",
    "logprobs_mode": "log-probabilities are Quire's, of the raw logits",
    "max_logprobs": "log-probabilities are Quire's, and the protocol bounds them",
    "generation_config": "only a request sets sampling parameters",
    "override_generation_config": "only a request sets sampling parameters",
    "scheduler_cls": "Quire follows vLLM's own scheduler",
    "worker_cls": "the ranks carry Quire's sampler",
    "additional_config": "Quire passes its own",
    "disable_log_stats": "the metrics are Quire's",
    "async_scheduling": "set `async_scheduling`",
    "enable_batch_sharded_sampling": "each rank that samples chooses all tokens",
    "speculative_config": "vLLM applies no sampler of others to drafts",
    "trust_remote_code": "code of a model is never run",
    "load_format": "weights are read from safetensors only",
    "data_parallel_size": "start one worker per replica",
    "kv_transfer_config": "prefixes are computed by each worker",
    "mm_processor_cache_gb": "pictures come prepared",
    "stream_interval": "each token is published",
}
_TRUE, _FALSE = ("true", "on", "yes", "1"), ("false", "off", "no", "0")


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print."""

    def error(self, message: str) -> Any:
        raise ModelRefused(f"vllm: {message}")


def engine_args(given: Mapping[str, Any], ours: Mapping[str, Any]) -> Any:
    """The EngineArgs of vLLM, from a worker's table `vllm` and Quire's own arguments.

    Raises:
        ModelRefused: an argument is unknown, is not for a worker to set, or has a wrong value.
    """
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in given:
        if name in _RESERVED:
            raise ModelRefused(f"vllm: {name} cannot be set: {_RESERVED[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ModelRefused(f"vllm: vLLM has no argument {name!r}{hint}")
    parser = EngineArgs.add_cli_args(_Parser(allow_abbrev=False, add_help=False))
    actions = {action.dest: action for action in parser._actions}
    # Without it vLLM would look for its default model.
    words = ["--model", str(ours["model"])]
    words += [word for name, value in given.items() for word in _words(name, value, actions)]
    try:
        arguments = EngineArgs.from_cli_args(parser.parse_args(words))
        return dataclasses.replace(arguments, **ours)
    except (ValueError, TypeError) as error:
        raise ModelRefused(f"vllm: {str(error).splitlines()[0]}") from error


def _words(name: str, value: Any, actions: Mapping[str, argparse.Action]) -> list[str]:
    """The words of vLLM's command line for one argument."""
    flag, action = "--" + name.replace("_", "-"), actions.get(name)
    if action is None:
        raise ModelRefused(f"vllm: {name} cannot be set on vLLM's command line")
    if isinstance(action, argparse.BooleanOptionalAction):
        text = str(value).lower()
        if text not in _TRUE + _FALSE:
            raise ModelRefused(f"vllm: {name} must be true or false")
        return [flag if text in _TRUE else f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, list) and action.nargs in ("+", "*"):
        return [flag, *map(str, value)]
    return [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
