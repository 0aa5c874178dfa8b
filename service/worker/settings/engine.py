"""The settings of a worker's engine: model, KV cache, scheduler and constraints."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from engine.config import (
    NUM_CLASSES,
    NUM_SEQS,
    BatchMode,
    KVCacheDtype,
    PolicyName,
    PreemptionMode,
)
from service.shared.settings.fields import SPLIT, Count
from service.shared.settings.reading import Section

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class ModelSettings(Section):
    """What model the engine loads, and how it computes."""

    section: ClassVar[str] = "Model"

    engine: Literal["native", "vllm"] = "native"
    """What computes the tokens: Quire's own engine, or vLLM (0.32, installed by you). Both continue
    each other's requests.
    """
    vllm: dict[str, Any] = Field(default={})
    """Arguments of vLLM's own (`EngineArgs`), for `engine` vllm: the table `[worker.vllm]`, `--vllm
    NAME=VALUE` once for each, or `QUIRE_VLLM_<NAME>`. vLLM checks them at load; a name that it does
    not know is refused.
    """
    model: str | None = Field(default=None, min_length=1)
    """Folder, `.gguf` file or Hugging Face name; unset: abacus, which comes with Quire. A name is
    only looked up as a folder if it begins with `.`, `/` or `~`, has two slashes, or if its first
    part is an existing folder.
    """
    served_model_name: str | None = Field(default=None, min_length=1)
    """Name in metrics, logs and completions; a request that names another model is rejected. Unset:
    the last part of `model`.
    """
    adapters: Path | None = None
    """Folder of adapters (LoRA, in PEFT's format) that requests may name: each subfolder with an
    `adapter_config.json` is an adapter with the subfolder's name. If one cannot be served
    correctly, the worker does not start. Unset or empty: none.
    """
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights, and of the KV cache unless `kv_cache_dtype` names another."""
    quantization: Literal["int8", "int4"] | None = None
    """Quantize the weights of a model that is not quantized when it is loaded, in groups of 32, for
    the compiled form of the fast path on a CPU. `int8` takes 8.5 bits for a weight, `int4` 5, but
    8.5 in the embedding and the output layer. It changes the tokens. Unset: as they are stored.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    pictures: bool = False
    """Read the pictures of chats: also loads the model's encoder of pictures. The native engine
    then computes with the model's own code (`model_path` wide). Needs Pillow (the extra
    `pictures`), and a model of a type whose pictures are read.
    """
    task: Literal["auto", "generate", "embed", "classify"] = "auto"
    """What the model makes: `generate` text, `embed` texts as vectors, or `classify` with a
    sequence-classification head. `auto` embeds with a folder in the layout of
    sentence-transformers, and classifies with such a head. A worker serves one of them.
    """
    pooling: Literal["auto", "cls", "mean", "max", "lasttoken"] = "auto"
    """Which token's state is the vector, or what is made of all of them. `auto`: what the folder
    says, otherwise the last token of a decoder and the mean of an encoder.
    """
    model_path: Literal["auto", "fast", "wide"] = "auto"
    """`fast` is the common decoder in one call, `wide` the model's own code; `auto` uses the fast
    one if its logits agree with those of the wide one.
    """
    attention_backend: Literal[
        "auto", "reference", "single-token", "cpu", "cuda", "cuda-gathered"
    ] = "auto"
    """Implementation of paged attention. `auto` uses another one on CUDA for requests that compute
    one token in a step; a named one computes everything outside captured steps.
    """
    deterministic: bool = False
    """A token's logits do not depend on the other requests in the batch; they are equal bit by bit.
    Checked at start with the model's own shapes; if the check fails, the worker does not start.
    With `engine` vllm it is vLLM's batch-invariant mode, on GPUs only.
    """
    async_scheduling: bool = True
    """On CUDA the next step is planned and launched while one is in flight, so that the device does
    not wait for the host. If off, each step waits for the tokens of the previous one. With
    `engine` vllm it is vLLM's own asynchronous scheduling.
    """
    shared_weights: Path | None = None
    """Folder for weights in the layout of the CPU kernels. The native workers of one user on one
    machine map its files instead of having copies; it takes as much disk as the weights have bytes.
    Unset: no file is written, and each worker has its own copy.
    """
    shared_weights_bytes: int = Field(default=1 << 36, ge=0)
    """The most bytes in that folder. The files that were taken up longest ago are removed, but none
    that a worker uses; what has no room is private.
    """
    remember_checks: bool = True
    """Leave out the comparison of a quantized model's logits with those of transformers if it has
    been made before, with the same files, code, libraries and type of processor. If off, each
    start makes it.
    """
    max_model_len: Count | None = None
    """Longest prompt plus output in tokens; unset: the model's."""

    @field_validator("adapters", mode="before")
    @classmethod
    def _empty_means_unset(cls, value: object) -> object:
        # Compose passes a variable to a container as an empty text if it is not set.
        return value or None


class CacheSettings(Section):
    """How much memory the engine takes for keys and values."""

    section: ClassVar[str] = "KV cache"

    block_size: Count = 16
    """Tokens per block."""
    num_blocks: Count | None = None
    """Blocks on the device; unset: as many as the memory holds."""
    kv_cache_memory_bytes: Count | None = None
    """Memory for blocks on the device; unset: what is free after loading the weights."""
    num_host_blocks: int | None = Field(default=None, ge=0)
    """Blocks in host memory for requests preempted by swap; with 0, nothing is swapped. Unset: as
    many as on the device, in at most a quarter of the free memory of the host; none where all
    running requests fit on the device at full length.
    """
    kv_cache_dtype: KVCacheDtype = "auto"
    """Data type of keys and values. `auto`: that of the weights. `int8`: 8-bit integers with a
    scale for each token and head, so that nearly twice the requests fit into the same memory; on
    CPUs only. Logits change a little, but are the same alone, batched and after a takeover by a
    worker with the same setting.
    """
    enable_prefix_caching: bool = True
    """Share the blocks of equal prompt prefixes within a tenant."""
    num_state_snapshots: int | None = Field(default=None, ge=0)
    """Snapshots of a model's recurrent state on the device; an equal prompt prefix is shared up to
    the last one. The least recently used one is replaced. With 0, such a model has no prefix cache.
    Unset: as many as `max_num_seqs`, in at most a tenth of the free memory,
    without blocks that `num_blocks` or `kv_cache_memory_bytes` reserves.
    """
    state_snapshot_blocks: int = Field(default=0, ge=0)
    """Also take a snapshot after each such number of blocks of a prompt; 0: only near its end, and
    where it leaves a cached prompt. Each one divides the computation of the prompt there.
    """


def _one_for_each_class(shares: tuple[float, ...]) -> tuple[float, ...]:
    if len(shares) not in (0, NUM_CLASSES):
        raise ValueError(f"needs {NUM_CLASSES} numbers: low, normal, high, critical")
    if sum(shares) > 1.0 + 1e-9:
        raise ValueError("add up to more than 1")
    return shares


class SchedulerSettings(Section):
    """Which requests a step computes, and how many tokens of each."""

    section: ClassVar[str] = "Scheduler"

    max_num_seqs: Count | None = Field(
        default=None,
        description="Requests running at once. Unset: {cpu} on a CPU, {cuda} on a GPU.".format(
            **NUM_SEQS
        ),
    )
    max_num_batched_tokens: Count | None = None
    """Most tokens computed per step, prefill and decode together. A larger value serves long
    prompts sooner, and other requests wait longer for each token. Unset: 256 on a CPU, 2048 on a
    GPU, or twice `max_num_seqs` if that is more.
    """
    long_prefill_token_threshold: int = Field(default=0, ge=0)
    """Most tokens of one request per step; 0: only the budget."""
    max_prefill_tokens: int = Field(default=0, ge=0)
    """Most tokens of prompts computed per step, of all requests together; 0: only the budget."""
    batch_mode: BatchMode = "mixed"
    """Steps while some requests decode and others have prompts to compute. `mixed`: a token for
    each decode, prompts with the rest of the budget. `prefer-decode`: decodes alone for up to eight
    steps, then a mixed one; first tokens come later. `prefer-prefill`: prompts alone while there
    are any; first tokens come sooner, and running requests wait.
    """
    dynamic_batching: bool = True
    """Admit a request as soon as there is room. Off, a batch is filled once, and the next one when
    all its requests have ended: a baseline for measurements.
    """
    num_speculative_tokens: int = Field(default=0, ge=0)
    """Tokens of one request that are guessed and checked in one step. Guesses are taken from its
    prompt and output, or follow from its constraint; 0: none. Changes no output. On CUDA a step
    that may have guesses is launched only after the previous one has ended.
    """
    max_speculative_step_tokens: int = Field(default=32, ge=0)
    """Guesses fill a step only up to this number of tokens."""
    policy: PolicyName = "priority"
    """Which request runs first, in the queue and in the engine; set the same for all workers of a
    queue. `priority`: the higher class, and within a class the earlier request. `adaptive`: like
    `priority`, and it prefers smaller jobs and nearer deadlines. Both preempt lower classes for
    higher ones. `fcfs`: the earlier request, whatever its class. `sjf`: the smaller job.
    """
    aging_seconds: float = Field(default=30.0, gt=0.0)
    """A request that has waited for this many seconds counts like one of the next higher class;
    under `sjf` this is the largest advantage of a small job. Age counts for waiting requests only;
    it does not protect a running one from preemption.
    """
    class_shares: Annotated[tuple[Share, ...], SPLIT, AfterValidator(_one_for_each_class)] = ()
    """The least share of each class in the tokens and slots of a step, for low, normal, high and
    critical, as in `0.05,0.3,0.4,0.25`. It counts among the requests that this worker has claimed,
    while a class has some that wait; what a class does not use goes to the others. A class at its
    minimum of slots loses none to a more urgent class. Unset: the more urgent class takes all it
    can use.
    """
    preemption_mode: PreemptionMode = "auto"
    """What happens to the KV of a preempted request. `recompute` drops it. `swap` copies it to host
    memory if it fits there (needs `num_host_blocks`). `auto` does what takes less time, as measured
    on this machine.
    """
    watermark: float = Field(default=0.01, ge=0.0, lt=1.0)
    """Share of the blocks kept free at admission, so that running requests can grow."""
    check_invariants: bool = False
    """Check the engine's laws after every step; idle engines always do."""


class ConstraintSettings(Section):
    """What compiling a constraint may cost."""

    section: ClassVar[str] = "Constraints"

    constraint_compile_seconds: float = Field(default=1.0, ge=0.05, le=60.0)
    """CPU time that compiling one constraint (a schema, a pattern, a grammar) may take, in a
    separate process; one that takes more is refused. Use the same value for all workers of a queue,
    so that all refuse the same constraints.
    """
    constraint_compile_bytes: int = Field(default=1 << 26, ge=1 << 23)
    """Memory that compiling one constraint may take, in bytes; one that takes more is refused."""


class DecodingSettings(Section):
    """What decoding and encoding pictures may cost."""

    section: ClassVar[str] = "Pictures"

    picture_decode_seconds: float = Field(default=20.0, ge=0.05, le=600.0)
    """CPU time that decoding all pictures of a request may take, in a separate process; one that
    takes more is refused. Use the same value for all workers of a queue.
    """
    picture_decode_bytes: int = Field(default=1 << 30, ge=1 << 26)
    """Memory that decoding one picture may take, in bytes; one that takes more is refused."""
    max_picture_pixels: int | None = Field(default=None, ge=1 << 16)
    """A picture with more pixels is scaled down to so many for the encoder, or to the least that
    its type can have. Use the same value for all workers of a queue. Unset: 200,704 on a CPU,
    otherwise as the model's files say.
    """


# Pydantic collects the fields of the last class first.
class EngineSettings(
    DecodingSettings, ConstraintSettings, SchedulerSettings, CacheSettings, ModelSettings
):
    """All settings of a worker's engine."""
