"""Executes Batches: block copies, tensors, forward pass, sampler. Knows only rows, no requests.

On CUDA a launch does not wait: its work is queued on the stream, and its tokens stay on the device
as input of the step that is launched next.
"""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import torch

from engine.batch import Batch, BatchRow, ComputedStep, LaunchedStep, StepResult
from engine.config import MAX_SCORED_TOKENS, StateCapacity
from engine.constraint import why_no_token
from engine.errors import DeviceFailed
from engine.logprobs import Logprobs
from engine.model.attention.interface import AttentionBackend
from engine.model.causal_model import BROKEN, CausalModel, Chooser
from engine.model.device.device_errors import is_device_failure
from engine.model.device.kv_pool import KVPool
from engine.model.device.step_threads import StepThreads
from engine.model.device.transfer import ToHost
from engine.model.run.graphs import DecodeGraphs
from engine.model.sampling.fused_draw import fused_draw
from engine.model.sampling.likelihoods import PromptLikelihoods
from engine.model.sampling.sampler import Drawn, Draws, Sampler, take_argmax
from engine.model.step import Fed, HostStep, choose_tokens, compute_logits, feed_of, lay_out


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFacts:
    """The values of an EngineConfig that the model and its device determine.

    Args:
        fingerprint: identifies weights, precision, libraries and code path. Under another
            fingerprint, a resumed generation may continue differently, since nearly equal logits
            may change their order.
        tokenizer_source: the folder with the tokenizer files, or the GGUF file.
        bytes_per_block: of one block, all layers.
        block_copy_seconds: measured, to copy one block to the host and back.
        states: None for a model without recurrent states.
        max_num_seqs, max_num_batched_tokens: as configured, or the default of the device.
        dtype, device: the resolved values of "auto".
        adapters: the fingerprints of the adapters that requests may use, by name.
        reads_pictures: whether requests may have pictures.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    num_blocks: int
    num_host_blocks: int
    block_size: int
    bytes_per_block: int
    block_copy_seconds: float
    max_num_seqs: int
    max_num_batched_tokens: int
    fingerprint: str
    tokenizer_source: Path
    dtype: str
    device: str
    adapters: Mapping[str, str] = field(default_factory=dict)
    reads_pictures: bool = False
    states: StateCapacity | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on one step, as in the EngineConfig."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int = 0
    max_speculative_step_tokens: int = 0
    max_scored_tokens: int = MAX_SCORED_TOKENS

    @property
    def max_num_due(self) -> int:
        """The most tokens that a step can sample: one per row and one per drafted token."""
        with_drafts = min(
            self.max_num_seqs * (1 + self.num_speculative_tokens),
            self.max_speculative_step_tokens,
            self.max_num_batched_tokens,
        )
        return max(self.max_num_seqs, with_drafts)

    @property
    def max_num_scored(self) -> int:
        """The most tokens of prompts whose log-probabilities a step computes."""
        return min(self.max_scored_tokens, self.max_num_batched_tokens)


class ModelRunner:
    """One model, its KV pool, an attention backend and a sampler.

    Not thread-safe: one thread at a time may use it. A process may have several runners.

    Args:
        limits: the limits of the engine's EngineConfig.
        multiple: numbers of tokens and logits are padded to multiples of it, see `compute_logits`.
        graphs: captured steps of this model over this pool.
        runs_ahead: whether `launch` returns while the step is in flight, so that the next step can
            be launched.
        threads: adjusts the number of threads after each step on a CPU. None keeps the number; the
            attribute may also be set later.
    """

    def __init__(
        self,
        model: CausalModel,
        kv_pool: KVPool,
        *,
        backend: AttentionBackend,
        facts: ConfigFacts,
        device: torch.device,
        limits: Limits,
        multiple: int = 1,
        graphs: DecodeGraphs | None = None,
        runs_ahead: bool = False,
        threads: StepThreads | None = None,
    ) -> None:
        self.config_facts = facts
        self.kv_pool = kv_pool
        self.model = model
        self._backend = backend
        self._device = device
        fused = fused_draw(device, model.vocab_size)
        self._sampler = Sampler(facts.eos_token_ids, fused=fused)
        self._limits = limits
        self._multiple = multiple
        self._graphs = graphs
        self._runs_ahead = runs_ahead
        self.threads = threads

    def launch(self, batch: Batch, *, after: LaunchedStep | None = None) -> LaunchedStep:
        """Compute a batch, or queue it on a device that runs ahead.

        Raises:
            DeviceFailed: a sticky device error, or block copies failed part-way.
            Exception: the rows failed. The block copies are done and must not be repeated.
        """
        assert batch.num_rows <= self._limits.max_num_seqs
        assert batch.num_tokens <= self._limits.max_num_batched_tokens
        self._move_blocks(batch)
        if not batch.num_rows:
            return ComputedStep(StepResult())
        assert after is None or isinstance(after, StepInFlight)
        if self._runs_ahead:
            return StepInFlight(self, batch, after)
        try:
            due = batch.due
            draws = self.draw(batch, due, None)
            chosen: list[int] = draws.tokens.tolist()
            draws.settle(chosen)
            logprobs = draws.logprobs(chosen)
            result = result_of(batch, due, chosen, logprobs, draws.prompts)
        except Exception as error:
            raise_if_device_failed(error, batch)
            raise
        if self.threads is not None:
            self.threads.adjust()
        return ComputedStep(result)

    @torch.inference_mode()
    def hidden(self, batch: Batch) -> torch.Tensor:
        """What the head makes of the rows that sample, [rows, outputs of the head].

        For a model whose head makes no logits; see `engine.model.pooling`. Waits for the device.

        Raises:
            DeviceFailed, Exception: as for `launch`.
        """
        self._move_blocks(batch)
        try:
            found = self._logits(self._lay_out(batch, None), batch)
        except Exception as error:
            raise_if_device_failed(error, batch)
            raise
        if self.threads is not None:
            self.threads.adjust()
        return found

    def run(self, batch: Batch) -> dict[str, int]:
        """Launch a step, wait for it, and return its tokens by request id.

        Raises:
            ArithmeticError: a row has no finite logit.
            DeviceFailed, Exception: as for `launch`.
        """
        result = self.launch(batch).result()
        if result.failures:
            raise ArithmeticError(f"{result.failures}")
        decodes = (request.request_id for request in batch.decodes.requests)
        return dict(zip(decodes, result.decoded, strict=True)) | dict(result.token_ids)

    def device_memory(self) -> dict[str, int]:
        """Bytes of device memory by kind: allocated, reserved, total; empty on a CPU."""
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        return {"allocated": allocated, "reserved": total - free, "total": total}

    def num_threads(self) -> int:
        """Number of threads for the next step on a CPU; 0 if the number is not adjusted."""
        return 0 if self.threads is None else self.threads.count

    @torch.inference_mode()
    def draw(self, batch: Batch, due: Sequence[Drawn], fed: Fed | None) -> Draws:
        """Run the forward pass and sample one token for each of `due`, after the block copies."""
        step = self._lay_out(batch, fed)
        model = self.model
        may_choose = self._multiple == 1 and not step.num_scored
        if may_choose and isinstance(model, Chooser) and take_argmax(due):
            tokens = choose_tokens(step, model=model, kv_pool=self.kv_pool, backend=self._backend)
            self._keep_snapshots(batch)
            return Draws(tokens, due)
        logits = self._logits(step, batch)
        if not step.num_scored:
            return self._sampler.draw(logits, due)
        prompts = PromptLikelihoods(logits[len(due) :], batch.catch_up_rows)
        draws = self._sampler.draw(logits[: len(due)], due)
        draws.prompts = prompts
        return draws

    def _lay_out(self, batch: Batch, fed: Fed | None) -> HostStep:
        return lay_out(
            batch.catch_up_rows,
            decodes=batch.decodes,
            block_size=self.kv_pool.block_size,
            device=self._device,
            fed=fed,
        )

    def _logits(self, step: HostStep, batch: Batch) -> torch.Tensor:
        """Compute a step and take its snapshots."""
        logits = compute_logits(
            step,
            model=self.model,
            kv_pool=self.kv_pool,
            backend=self._backend,
            multiple=self._multiple,
            graphs=self._graphs,
        )
        self._keep_snapshots(batch)
        # Logits may be wider than the vocabulary: drop the padding.
        return logits[:, : self.model.vocab_size]

    def _keep_snapshots(self, batch: Batch) -> None:
        if self.kv_pool.states is not None:
            self.kv_pool.states.keep(batch.snapshots)

    def _move_blocks(self, batch: Batch) -> None:
        try:
            self.kv_pool.swap_out(batch.swap_out)
            self.kv_pool.swap_in(batch.swap_in)
            if self.kv_pool.states is not None:
                self.kv_pool.states.swap_out(batch.state_out)
                self.kv_pool.states.swap_in(batch.state_in)
                self.kv_pool.states.restore(batch.state_restored)
        except (RuntimeError, IndexError) as error:
            raise DeviceFailed(f"block copies of step {batch.step} failed: {error}") from error


class StepInFlight:
    """A launched step, whose tokens are being copied from the device to the host.

    Args:
        after: the step launched before, which samples the unknown input tokens of this step.

    Raises:
        DeviceFailed, Exception: as for `ModelRunner.launch`.
    """

    is_in_flight = True

    def __init__(self, runner: ModelRunner, batch: Batch, after: "StepInFlight | None") -> None:
        self._runner = runner
        self._batch = batch
        self._due: Sequence[Drawn] = batch.due
        self._after = after
        self._next: StepInFlight | None = None
        self._result: StepResult | None = None
        self._draws: Draws | None = None
        self._tokens: torch.Tensor
        self._compute()
        if after is not None:
            after._next = self

    def result(self) -> StepResult:
        """Wait for the device; later calls return the same result.

        Draws that the candidates could not decide (see `sampler`) are settled now. In that case the
        step launched next has a placeholder as input token, and is computed again over the same
        slots.
        """
        if self._result is None:
            assert self._draws is not None
            try:
                chosen = self._arriving.wait()
                if self._draws.settle(chosen) and self._next is not None:
                    self._next._compute()
                logprobs, prompts = self._draws.logprobs(chosen), self._draws.prompts
                self._result = result_of(self._batch, self._due, chosen, logprobs, prompts)
            except Exception as error:
                # The next step may already be in flight, so this one cannot be repeated.
                raise_if_device_failed(error, self._batch)
                raise DeviceFailed(f"step {self._batch.step} did not complete: {error}") from error
            # The next step refers to this one until it completes, but needs only the tokens.
            self._draws = self._after = self._next = None
        return self._result

    def _compute(self) -> None:
        fed = None
        if self._after is not None:
            due = [one.request_id for one in self._after._due]
            fed = feed_of(self._batch.decodes, due, self._after._tokens)
        # Free the memory of an earlier draw before the next one needs it.
        self._draws = None
        try:
            self._draws = self._runner.draw(self._batch, self._due, fed)
            self._tokens = self._draws.tokens
            self._arriving = ToHost(self._tokens)
        except Exception as error:
            raise_if_device_failed(error, self._batch)
            raise


def result_of(
    batch: Batch,
    due: Sequence[Drawn],
    chosen: Sequence[int],
    logprobs: Mapping[int, Logprobs],
    prompts: PromptLikelihoods | None = None,
) -> StepResult:
    """The step's result, from the tokens `chosen` for `due`, which is `batch.due`.

    Waits for the log-probabilities of prompts.
    """
    scores, failures = ({}, {}) if prompts is None else prompts.wait()
    num_decodes = len(batch.decodes)
    others = zip(due[num_decodes:], chosen[num_decodes:], strict=True)
    decoded, token_ids = chosen[:num_decodes], {one.request_id: token for one, token in others}
    logprobs_of: dict[str, list[Logprobs]] = {}
    for index, one in logprobs.items():
        logprobs_of.setdefault(due[index].request_id, []).append(one)
    drafted = batch.drafted_rows
    if not drafted and BROKEN not in chosen:
        return StepResult(decoded, token_ids, failures, logprobs_of, prompt_logprobs=scores)
    runs = runs_of(drafted, due, chosen)
    # A row with a draft has several entries; it has failed if the first one has no token.
    pairs = list(zip(due, chosen, strict=True))
    first = {one.request_id: (one, token) for one, token in reversed(pairs)}
    failures |= {
        request_id: why_no_token(one.constraint)
        for request_id, (one, token) in first.items()
        if token == BROKEN
    }
    for request_id in token_ids.keys() & {*failures, *runs}:
        del token_ids[request_id]
    runs = {request_id: run for request_id, run in runs.items() if run}
    return StepResult(decoded, token_ids, failures, logprobs_of, runs, prompt_logprobs=scores)


def runs_of(
    drafted: Sequence[BatchRow], due: Sequence[Drawn], chosen: Sequence[int]
) -> dict[str, Sequence[int]]:
    """The accepted tokens of rows with a draft, by request id.

    An entry without a token ends the run before it. The row samples for it again in the next step,
    as its first entry.
    """
    rows = {row.request_id: row for row in drafted}
    found: dict[str, list[int]] = {request_id: [] for request_id in rows}
    for one, token in zip(due, chosen, strict=True):
        if one.request_id in rows:
            found[one.request_id].append(token)
    return {
        request_id: rows[request_id].run_of(list(takewhile(lambda token: token != BROKEN, tokens)))
        for request_id, tokens in found.items()
    }


def raise_if_device_failed(error: Exception, batch: Batch) -> None:
    """Raise DeviceFailed if the device has failed, and not only the rows of the batch."""
    if is_device_failure(error):
        raise DeviceFailed(f"the device failed in step {batch.step}: {error}") from error
    # The error's frames would keep the step's tensors alive, and after running out of memory the
    # retry of the rows needs their memory.
    traceback.clear_frames(error.__traceback__)
