"""Runs a model for the checks at start: prompts, divided into steps, over a small pool.

Knows no requests and decides nothing: the checks compare the logits of several rehearsals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from engine.batch import BatchRow
from engine.model.attention.interface import AttentionBackend
from engine.model.attention.quantized import over_cache
from engine.model.attention.reference import ReferenceAttention
from engine.model.causal_model import CausalModel, state_shapes_of
from engine.model.device.kv_pool import KVPool
from engine.model.device.quantized_kv import integers_of, scales_of
from engine.model.device.state_pool import StatePool
from engine.model.step import compute_logits, lay_out, reads_unwritten_slots, with_all_logits
from engine.request import NO_SLOT
from engine.sampling_params import SamplingParams

#: A step: the number of tokens that it computes of each prompt, possibly 0.
Step = Sequence[int]
#: The scale of noise in a quantized cache.
NOISE_SCALE = 0.01
#: The number that recurrent states are made of after cached tokens.
CACHED_STATE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The settings with which a model is run for a check; a ModelRunner has the same ones.

    Args:
        dtype: of the cache.
        device: of the model and its cache.
        backend: reads a cache of that type.
        multiple: as in `compute_logits`.
        num_cached: number of cached tokens before each prompt, in whole blocks that all prompts
            share; their keys and values are noise.
    """

    dtype: torch.dtype
    device: torch.device
    block_size: int
    backend: AttentionBackend
    multiple: int = 1
    num_cached: int = 0

    @torch.inference_mode()
    def logits(
        self,
        model: CausalModel,
        prompts: Sequence[Sequence[int]],
        steps: Sequence[Step],
        *,
        adapters: Sequence[str | None] = (None,),
    ) -> list[torch.Tensor]:
        """The logits of every token of each prompt, [tokens, vocabulary] in float32.

        The prompts use the `adapters` in rotation.
        """
        assert [sum(lengths) for lengths in zip(*steps, strict=True)] == list(map(len, prompts))
        pool = self._pool(model, prompts)
        shared = range(self.num_cached // self.block_size)
        starts = [0] * len(prompts)
        logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        for lengths in steps:
            members = [index for index, length in enumerate(lengths) if length]
            rows = [
                _row(
                    prompts[index][starts[index] : starts[index] + lengths[index]],
                    start=self.num_cached + starts[index],
                    # Scattered and not ascending, as in a pool that has served for some time.
                    block_ids=[
                        *reversed(shared),
                        *range(pool.num_blocks - 1 - index, len(shared) - 1, -len(prompts)),
                    ],
                    adapter=adapters[index % len(adapters)],
                    state_slot=index if pool.states else NO_SLOT,
                )
                for index in members
            ]
            step = lay_out(rows, block_size=self.block_size, device=self.device)
            found = compute_logits(
                with_all_logits(step),
                model=model,
                kv_pool=pool,
                backend=self.backend,
                multiple=self.multiple,
            )
            sizes = [lengths[index] for index in members]
            parts = torch.split(found.float()[:, : model.vocab_size], sizes)
            for index, part in zip(members, parts, strict=True):
                logits[index].append(part)
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        return [torch.cat(parts) for parts in logits]

    def _pool(self, model: CausalModel, prompts: Sequence[Sequence[int]]) -> KVPool:
        """A pool filled with NaN, so that reading an unwritten slot changes the logits."""
        num_shared = self.num_cached // self.block_size
        pool = KVPool(
            model.layer_shapes,
            num_blocks=num_shared + len(prompts) * _blocks_each(prompts, self.block_size),
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
            has_spare_block=self.multiple > 1,
            states=self._states(model, len(prompts)),
        )
        pool.spoil()
        # Cached by shape: layers have few different shapes, and the noise may take gigabytes.
        noise = cache(partial(_noise, dtype=self.dtype, device=self.device))
        for layer in range(len(model.layer_shapes)):
            for values in (pool.key_cache(layer), pool.value_cache(layer)):
                numbers = values
                if pool.is_quantized:
                    scales_of(values, self.block_size)[:num_shared] = NOISE_SCALE
                    numbers = integers_of(values, self.block_size)
                numbers[:num_shared] = noise(numbers[:num_shared].shape)
        if self.multiple > 1 and reads_unwritten_slots(model, self.backend):
            pool.clear(torch.tensor([pool.spare_block], device=self.device))
        return pool

    def _states(self, model: CausalModel, num_slots: int) -> StatePool | None:
        """A slot for each prompt, with a state after the cached tokens; the others have NaN."""
        shapes = state_shapes_of(model)
        if not shapes:
            return None
        states = StatePool(shapes, num_slots=num_slots, device=self.device)
        states.poison()
        if self.num_cached:
            states.fill(range(num_slots), self.num_cached, CACHED_STATE)
        return states


def reference_rehearsal(*, dtype: torch.dtype, device: torch.device, block_size: int) -> Rehearsal:
    """A rehearsal with the reference attention, independent of the backend that will serve."""
    return Rehearsal(
        dtype=dtype,
        device=device,
        block_size=block_size,
        backend=over_cache(ReferenceAttention(), dtype),
    )


def prompt_of(length: int, vocab_size: int) -> list[int]:
    """A prompt of `length` ids spread over the vocabulary; deterministic."""
    return [(7919 * index + length) % vocab_size for index in range(length)]


def _noise(shape: torch.Size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Deterministic values between -1 and 1; as integers, between -100 and 100."""
    indices = torch.arange(shape.numel(), device=device)
    largest = 1.0 if dtype.is_floating_point else 1.0 / NOISE_SCALE
    return ((7919 * indices % 2003 - 1001) / 1001.0 * largest).to(dtype).reshape(shape)


def _blocks_each(prompts: Sequence[Sequence[int]], block_size: int) -> int:
    return -(-max(map(len, prompts)) // block_size)


def _row(
    token_ids: Sequence[int],
    *,
    start: int,
    block_ids: Sequence[int],
    adapter: str | None,
    state_slot: int,
) -> BatchRow:
    return BatchRow(
        request_id="",
        token_ids=token_ids,
        start=start,
        block_ids=block_ids,
        samples=True,
        sampling=SamplingParams(max_tokens=1),
        prompt_token_ids=[],
        output_token_ids=[],
        adapter=adapter,
        state_slot=state_slot,
    )
