"""The settings of a worker's engine: model, KV cache, scheduler and constraints."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from engine.config import NUM_CLASSES, NUM_SEQS, BatchMode, PolicyName, PreemptionMode
from service.shared.settings.fields import setting, split_list
from service.shared.settings.reading import ProcessSettings

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class EngineSettings(ProcessSettings):
    """What model the engine loads, how much memory it takes, and how it schedules."""

    engine: Literal["native", "vllm"] = setting(
        "Model",
        "What computes the tokens: Quire's own engine, or vLLM (0.32, installed by you). Both "
        "continue each other's requests.",
        default="native",
    )
    vllm: dict[str, Any] = setting(
        "Model",
        "Arguments of vLLM's own (`EngineArgs`), for `engine` vllm: the table `[worker.vllm]`, "
        "`--vllm NAME=VALUE` once for each, or `QUIRE_VLLM_<NAME>`. vLLM checks them at load; a "
        "name that it does not know is refused.",
        default={},
    )
    model: str | None = setting(
        "Model",
        "Folder, `.gguf` file (needs the extra `gguf`) or Hugging Face name; unset: the checkout's "
        "`models/abacus`. A name is only looked up as a folder if it begins with `.`, `/` or `~`, "
        "has two slashes, or if its first part is an existing folder.",
        default=None,
        min_length=1,
    )
    served_model_name: str | None = setting(
        "Model",
        "Name in metrics, logs and completions; a request that names another model is rejected. "
        "Unset: the last part of `model`.",
        default=None,
        min_length=1,
    )
    adapters: Path | None = setting(
        "Model",
        "Folder of adapters (LoRA, in PEFT's format) that requests may name: each subfolder with "
        "an `adapter_config.json` is an adapter with the subfolder's name. If one cannot be "
        "served correctly, the worker does not start. Unset or empty: none.",
        default=None,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "Model", "Data type of weights and KV cache.", default="auto"
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "Model", "Where the model runs.", default="auto"
    )
    task: Literal["auto", "generate", "embed", "classify"] = setting(
        "Model",
        "What the model makes: `generate` text, `embed` texts as vectors, or `classify` with a "
        "sequence-classification head. `auto` embeds with a folder in the layout of "
        "sentence-transformers, and classifies with such a head. A worker serves one of them.",
        default="auto",
    )
    pooling: Literal["auto", "cls", "mean", "max", "lasttoken"] = setting(
        "Model",
        "Which token's state is the vector, or what is made of all of them. `auto`: what the "
        "folder says, otherwise the last token of a decoder and the mean of an encoder.",
        default="auto",
    )
    model_path: Literal["auto", "fast", "wide"] = setting(
        "Model",
        "`fast` is the common decoder in one call, `wide` the model's own code; `auto` uses the "
        "fast one if its logits agree with those of the wide one.",
        default="auto",
    )
    attention_backend: Literal[
        "auto", "reference", "single-token", "cpu", "cuda", "cuda-gathered"
    ] = setting(
        "Model",
        "Implementation of paged attention. `auto` uses another one on CUDA for requests that "
        "compute one token in a step; a named one computes everything outside captured steps.",
        default="auto",
    )
    deterministic: bool = setting(
        "Model",
        "A token's logits do not depend on the other requests in the batch; they are equal bit by "
        "bit. Checked at start with the model's own shapes; if the check fails, the worker does "
        "not start. With `engine` vllm it is vLLM's batch-invariant mode, on GPUs only.",
        default=False,
    )
    async_scheduling: bool = setting(
        "Model",
        "On CUDA the next step is planned and launched while one is in flight, so that the device "
        "does not wait for the host. If off, each step waits for the tokens of the previous one.",
        default=True,
    )
    shared_weights: Path | None = setting(
        "Model",
        "Folder for weights in the layout of the CPU kernels. The native workers of one user on "
        "one machine map its files instead of having copies; it takes as much disk as the weights "
        "have bytes. Unset: no file is written, and each worker has its own copy.",
        default=None,
    )
    shared_weights_bytes: int = setting(
        "Model",
        "The most bytes in that folder. The files that were taken up longest ago are removed, but "
        "none that a worker uses; what has no room is private.",
        default=1 << 36,
        ge=0,
    )
    max_model_len: int | None = setting(
        "Model", "Longest prompt plus output in tokens; unset: the model's.", default=None, ge=1
    )

    block_size: int = setting("KV cache", "Tokens per block.", default=16, ge=1)
    num_blocks: int | None = setting(
        "KV cache", "Blocks on the device; unset: as many as the memory holds.", default=None, ge=1
    )
    kv_cache_memory_bytes: int | None = setting(
        "KV cache",
        "Memory for blocks on the device; unset: what is free after loading the weights.",
        default=None,
        ge=1,
    )
    num_host_blocks: int | None = setting(
        "KV cache",
        "Blocks in host memory for requests preempted by swap; with 0, nothing is swapped. Unset: "
        "as many as on the device, in at most a quarter of the free memory of the host; none where "
        "all running requests fit on the device at full length.",
        default=None,
        ge=0,
    )
    enable_prefix_caching: bool = setting(
        "KV cache", "Share the blocks of equal prompt prefixes within a tenant.", default=True
    )

    max_num_seqs: int | None = setting(
        "Scheduler",
        "Requests running at once. Unset: {cpu} on a CPU, {cuda} on a GPU.".format(**NUM_SEQS),
        default=None,
        ge=1,
    )
    max_num_batched_tokens: int | None = setting(
        "Scheduler",
        "Most tokens computed per step, prefill and decode together. A larger value serves long "
        "prompts sooner, and other requests wait longer for each token. Unset: 256 on a CPU, 2048 "
        "on a GPU, or twice `max_num_seqs` if that is more.",
        default=None,
        ge=1,
    )
    long_prefill_token_threshold: int = setting(
        "Scheduler", "Most tokens of one request per step; 0: only the budget.", default=0, ge=0
    )
    max_prefill_tokens: int = setting(
        "Scheduler",
        "Most tokens of prompts computed per step, of all requests together; 0: only the budget.",
        default=0,
        ge=0,
    )
    batch_mode: BatchMode = setting(
        "Scheduler",
        "Steps while some requests decode and others have prompts to compute. `mixed`: a token for "
        "each decode, prompts with the rest of the budget. `prefer-decode`: decodes alone for up "
        "to eight steps, then a mixed one; first tokens come later. `prefer-prefill`: prompts "
        "alone while there are any; first tokens come sooner, and running requests wait.",
        default="mixed",
    )
    dynamic_batching: bool = setting(
        "Scheduler",
        "Admit a request as soon as there is room. Off, a batch is filled once, and the next one "
        "when all its requests have ended: a baseline for measurements.",
        default=True,
    )
    num_speculative_tokens: int = setting(
        "Scheduler",
        "Tokens of one request that are guessed and checked in one step. Guesses are taken from "
        "its prompt and output, or follow from its constraint; 0: none. Changes no output. On "
        "CUDA a step that may have guesses is launched only after the previous one has ended.",
        default=0,
        ge=0,
    )
    max_speculative_step_tokens: int = setting(
        "Scheduler", "Guesses fill a step only up to this number of tokens.", default=32, ge=0
    )
    policy: PolicyName = setting(
        "Scheduler",
        "Which request runs first, in the queue and in the engine; set the same for all workers "
        "of a queue. `priority`: the higher class, and within a class the earlier request. "
        "`adaptive`: like `priority`, and it prefers smaller jobs and nearer deadlines. Both "
        "preempt lower classes for higher ones. `fcfs`: the earlier request, whatever its class. "
        "`sjf`: the smaller job.",
        default="priority",
    )
    aging_seconds: float = setting(
        "Scheduler",
        "A request that has waited for this many seconds counts like one of the next higher "
        "class; under `sjf` this is the largest advantage of a small job. Age counts for waiting "
        "requests only; it does not protect a running one from preemption.",
        default=30.0,
        gt=0.0,
    )
    class_shares: Annotated[tuple[Share, ...], BeforeValidator(split_list)] = setting(
        "Scheduler",
        "The least share of each class in the tokens and slots of a step, for low, normal, high "
        "and critical, as in `0.05,0.3,0.4,0.25`. It counts among the requests that this worker "
        "has claimed, while a class has some that wait; what a class does not use goes to the "
        "others. A class at its minimum of slots loses none to a more urgent class. Unset: the "
        "more urgent class takes all it can use.",
        default=(),
    )
    preemption_mode: PreemptionMode = setting(
        "Scheduler",
        "What happens to the KV of a preempted request. `recompute` drops it. `swap` copies it to "
        "host memory if it fits there (needs `num_host_blocks`). `auto` does what takes less time, "
        "as measured on this machine.",
        default="auto",
    )
    watermark: float = setting(
        "Scheduler",
        "Share of the blocks kept free at admission, so that running requests can grow.",
        default=0.01,
        ge=0.0,
        lt=1.0,
    )
    check_invariants: bool = setting(
        "Scheduler",
        "Check the engine's laws after every step; idle engines always do.",
        default=False,
    )

    constraint_compile_seconds: float = setting(
        "Constraints",
        "CPU time that compiling one constraint (a schema, a pattern, a grammar) may take, in a "
        "separate process; one that takes more is refused. Use the same value for all workers of "
        "a queue, so that all refuse the same constraints.",
        default=1.0,
        ge=0.05,
        le=60.0,
    )
    constraint_compile_bytes: int = setting(
        "Constraints",
        "Memory that compiling one constraint may take, in bytes; one that takes more is refused.",
        default=1 << 26,
        ge=1 << 23,
    )

    @field_validator("class_shares")
    @classmethod
    def _is_one_for_each_class(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if len(value) not in (0, NUM_CLASSES):
            raise ValueError(f"needs {NUM_CLASSES} numbers: low, normal, high, critical")
        if sum(value) > 1.0 + 1e-9:
            raise ValueError("add up to more than 1")
        return value
