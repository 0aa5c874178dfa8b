"""The C++ form of the fast path: a step is one call for all layers. Knows no model family.

Weights are packed at load (see `engine.model.kernels.packing`). The residual stream is float32, and
no row's result depends on other rows: a request computed alone, in a batch or in chunks has the
same logits, bit for bit.
"""

import ctypes
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from engine.model.causal_model import Chooser, StepInputs
from engine.model.decoder.decoder_adapters import DecoderAdapter
from engine.model.decoder.decoder_config import Activation, DecoderConfig, Experts, NotSupported
from engine.model.decoder.decoder_weights import DecoderWeights, ExpertWeights, LayerWeights
from engine.model.decoder.native_adapters import PackedAdapters
from engine.model.decoder.native_mixers import recurrent_mixer, taps_of
from engine.model.decoder.native_weights import FLOAT32_DIGITS, PackedWeights
from engine.model.decoder.projections import projections_of
from engine.model.device.kv_pool import KVPool
from engine.model.device.slabs import ALIGNMENT
from engine.model.device.weight_files import WeightFiles
from engine.model.kernels.build import Variant
from engine.model.kernels.library import (
    ExpertsStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    RotaryStruct,
    StepStruct,
    build_of,
    load_library,
)
from engine.model.kernels.packing import LANES, PER_WORD

#: The least digits of the inputs of a mixer's output layer, if its weights are quantized. That of
#: an attention is a tenth of a model's products, and with one digit a fifth of the error of all.
OUTPUT_DIGITS = 2
#: MAX_HEAD_DIM in kernels/cache.h.
MAX_HEAD_DIM = 512
#: Smaller results use torch's allocator: it does not return blocks of their size to the system.
REUSED_BYTES = 1 << 24
#: The factors `linear` and `cubic` of each activation; Gate in kernels/layers.h.
GATES: Mapping[Activation, tuple[float, float]] = {
    "silu": (1.0, 0.0),
    "gelu_tanh": (2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715),
}
NO_EXPERTS = Experts(num_experts=0, num_chosen=0, size=0, normalizes=False)

_Pointers = ctypes.Array[ctypes.c_void_p]


class NativeDecoder(Chooser):
    """The common decoder on a CPU.

    Inside a block, keys and values have the kernels' own layout, so only the kernels can read them.
    Copies and swaps move whole blocks.
    """

    #: The kernels never read unwritten slots: these may contain anything, NaN included.
    reads_unwritten_slots = False

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        adapters: Sequence[DecoderAdapter] = (),
        *,
        variant: Variant,
        weight_files: WeightFiles | None = None,
    ) -> None:
        """Pack the weights, and share them with other processes if there are `weight_files`.

        Raises:
            NotSupported: the kernels do not support a size or the type.
            KernelsUnavailable: the kernels cannot be built or loaded.
        """
        _check(config, weights)
        self.vocab_size = config.vocab_size
        #: The number of experts that each token uses; the check at load lets it use all.
        self.num_chosen = (config.experts or NO_EXPERTS).num_chosen
        self.layer_shapes, self.state_shapes = config.layer_shapes, config.state_shapes
        self._library = load_library(variant)
        #: Part of the engine's fingerprint.
        self.build = build_of(self._library)
        self._packed = PackedWeights(variant, weights.embedding.dtype, weight_files)
        self._structs: list[ctypes.Structure] = []
        self._pool: weakref.ref[KVPool] | None = None
        self._places = config.places
        self._head_outputs = weights.head.weight.shape[0]
        self._logits = ReusedBuffer()
        self._layers = (LayerStruct * config.num_layers)(
            *(self._layer(config, index, layer) for index, layer in enumerate(weights.layers))
        )
        self._rotaries = (RotaryStruct * len(config.rotaries))(
            *(
                RotaryStruct(self._packed.floats(rotary.inverse_frequencies), rotary.scaling)
                for rotary in config.rotaries
            )
        )
        self._adapters = PackedAdapters(weights, adapters, self._packed.keep)
        #: None if it is packed; a token's embedding is then read from its panel, or from the strips
        #: of the head, if that has the same weights.
        self.embedding, embedding = self._packed.embedding(weights)
        self._model = self._model_of(config, weights, embedding)
        self._packed.close()
        self.name = f"decoder-{variant.name}{self._packed.form}"
        #: Whether it multiplies weights that are quantized.
        self.is_quantized = bool(self._packed.form)
        self._handle = self._create()
        weakref.finalize(self, self._library.quire_destroy, self._handle)

    def forward(self, inputs: StepInputs, kv_pool: KVPool) -> torch.Tensor:
        """Also raises NotSupported: see `_caches`."""
        logits = self._logits.borrow(len(inputs.logit_rows), self._head_outputs)
        self._step(inputs, kv_pool, logits=logits.data_ptr())
        return logits

    @contextmanager
    def precise_inputs(self) -> Iterator[None]:
        """Give inputs of quantized weights the precision of float32; for the check at load."""
        linears, served = self._linears(), self._handle
        digits = [linear.digits for linear in linears]
        try:
            for linear in linears:
                linear.digits = FLOAT32_DIGITS
            self._handle = self._create()
            yield
        finally:
            for linear, own in zip(linears, digits, strict=True):
                linear.digits = own
            if self._handle is not served:
                self._library.quire_destroy(self._handle)
            self._handle = served

    def free_logits(self) -> None:
        """Free the buffer of the logits, which checks need larger than serving."""
        self._logits = ReusedBuffer()

    def choose(self, inputs: StepInputs, kv_pool: KVPool) -> torch.Tensor:
        tokens = torch.empty(len(inputs.logit_rows), dtype=torch.int64)
        self._step(inputs, kv_pool, argmax=tokens.data_ptr())
        return tokens

    def _step(self, inputs: StepInputs, kv_pool: KVPool, **results: int) -> None:
        metadata = inputs.metadata
        host = [
            torch.from_numpy(array)
            for array in (metadata.query_lens, metadata.context_lens, metadata.block_tables)
        ]
        adapters = self._adapters.numbers_of_tokens(inputs)
        keys, values, states = self._caches(kv_pool)
        assert (inputs.recurrent is not None) == bool(self.state_shapes), "it would read no memory"
        if inputs.recurrent is not None:
            turn = inputs.recurrent.turn
            # They must outlive the step.
            host += [torch.from_numpy(array) for array in (turn.reads, turn.writes)]
            results |= {
                "states": ctypes.addressof(states),
                "state_reads": _integers(host[3]),
                "state_writes": _integers(host[4]),
            }
        step = StepStruct(
            num_tokens=len(inputs.token_ids),
            num_rows=metadata.num_rows,
            num_logit_rows=len(inputs.logit_rows),
            table_stride=host[2].stride(0),
            block_size=kv_pool.block_size,
            num_threads=torch.get_num_threads(),
            num_chosen=self.num_chosen,
            quantizes_cache=kv_pool.is_quantized,
            token_ids=_integers(inputs.token_ids),
            positions=_integers(inputs.positions),
            slot_blocks=_integers(inputs.slots.blocks),
            slot_offsets=_integers(inputs.slots.offsets),
            query_lens=_integers(host[0]),
            context_lens=_integers(host[1]),
            tables=_integers(host[2]),
            logit_rows=_integers(inputs.logit_rows),
            adapters=None if adapters is None else _integers(adapters),
            key_caches=ctypes.addressof(keys),
            value_caches=ctypes.addressof(values),
            **results,
        )
        if self._library.quire_step(self._handle, step) != 0:
            raise MemoryError("not enough memory for the activations of a step")

    def _caches(self, kv_pool: KVPool) -> tuple[_Pointers, _Pointers, _Pointers]:
        """The addresses of the pool's keys, values and states; they never move.

        Raises:
            NotSupported: the kernels do not support a quantized cache of this shape.
        """
        if self._pool is None or self._pool() is not kv_pool:
            sizes = kv_pool.block_size, self.layer_shapes[0].key_dim
            if kv_pool.is_quantized and any(size % LANES for size in sizes):
                raise NotSupported(
                    "for an 8-bit KV cache, the kernels need blocks and heads of multiples of "
                    f"{LANES}: {sizes}"
                )
            layers = range(len(self.layer_shapes))
            caches = [kv_pool.key_cache(layer) for layer in layers]
            caches += [kv_pool.value_cache(layer) for layer in layers]
            for cache in caches:
                self._library.quire_advise_huge_pages(cache.data_ptr(), cache.nbytes)
            addresses = [cache.data_ptr() for cache in caches]
            array = ctypes.c_void_p * len(layers)
            states = [
                part.data_ptr()
                for place in range(len(self.state_shapes))
                for part in (kv_pool.states.layer(place) if kv_pool.states is not None else ())
            ]
            self._pointers = (
                array(*addresses[: len(layers)]),
                array(*addresses[len(layers) :]),
                (ctypes.c_void_p * len(states))(*states),
            )
            self._pool = weakref.ref(kv_pool)
        return self._pointers

    def _create(self) -> ctypes.c_void_p:
        """A decoder of the library. MemoryError."""
        handle = self._library.quire_create(self._model)
        if handle is None:
            raise MemoryError("not enough memory for a decoder")
        return ctypes.c_void_p(handle)

    def _linears(self) -> list[LinearStruct]:
        """The layers whose weights may be quantized; experts' are not."""
        linears = [self._model.head]
        for layer in self._layers:
            linears += [layer.projection, layer.output, layer.gate_up, layer.down]
            linears += [layer.experts.contents.router] if layer.experts else []
        return linears

    def _model_of(
        self, config: DecoderConfig, weights: DecoderWeights, embedding: LinearStruct
    ) -> ModelStruct:
        linear, cubic = GATES[config.activation]
        limit, offset = math.inf, 0.0
        if config.swiglu is not None:
            (linear, limit), cubic, offset = config.swiglu, 0.0, 1.0
        experts = config.experts or NO_EXPERTS
        return ModelStruct(
            is_bfloat16=weights.embedding.dtype == torch.bfloat16,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rotary_dim,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            num_rotaries=len(config.rotaries),
            num_experts=experts.num_experts,
            expert_size=experts.size,
            normalizes_chosen=experts.normalizes,
            norms_whole_projections=config.family.norms_whole_projections,
            gates_attention=config.family.gates_attention,
            epsilon=config.epsilon,
            scaling=config.scaling,
            softcap=config.softcap or 0.0,
            gate_linear=linear,
            gate_cubic=cubic,
            gate_limit=limit,
            up_offset=offset,
            embedding_multiplier=config.embedding_multiplier,
            residual_multiplier=config.residual_multiplier,
            logits_divisor=config.logits_divisor,
            logits_softcap=config.logits_softcap or 0.0,
            embedding=embedding,
            rotaries=self._rotaries,
            final_norm=self._packed.floats(weights.final_norm),
            head=self._packed.linear(weights.head),
            layers=self._layers,
            num_adapters=len(self._adapters),
            additions=self._adapters.table,
        )

    def _layer(self, config: DecoderConfig, index: int, layer: LayerWeights) -> LayerStruct:
        place, attends = self._places[index], config.mixers[index] == "attention"
        return LayerStruct(
            attention_norm=self._packed.floats(layer.attention_norm),
            sinks=self._packed.floats(layer.sinks),
            query_norm=self._packed.floats(layer.query_norm),
            key_norm=self._packed.floats(layer.key_norm),
            attention_post_norm=self._packed.floats(layer.attention_post_norm),
            mlp_norm=self._packed.floats(layer.mlp_norm),
            mlp_post_norm=self._packed.floats(layer.mlp_post_norm),
            projection=self._packed.linear(layer.projection),
            **self._recurrent(config, layer),
            place=place if attends else place * len(self.state_shapes[place]),
            output=self._packed.linear(layer.output, least_digits=OUTPUT_DIGITS),
            gate_up=self._packed.gate_up(layer.gate_up),
            down=LinearStruct() if layer.down is None else self._packed.linear(layer.down),
            experts=None if layer.experts is None else self._experts(layer.experts),
            window=config.windows[index] or 0,
            rotary=-1 if (rotary := config.rotary_of[index]) is None else rotary,
        )

    def _recurrent(self, config: DecoderConfig, layer: LayerWeights) -> dict[str, Any]:
        """The field of the mixer that a layer has instead of attention, if it has one."""
        if layer.convolution is not None:
            return {"convolution": self._pointer(taps_of(layer.convolution, self._packed))}
        if layer.recurrence is None or config.recurrence is None:
            return {}
        struct = recurrent_mixer(config.recurrence, layer.recurrence, self._packed)
        return {"recurrence": self._pointer(struct)}

    def _experts(self, experts: ExpertWeights) -> Any:
        array = LinearStruct * len(experts.down)
        gate_up, down = array(), array()
        for expert in range(len(experts.down)):
            first, second = experts.of(expert)
            gate_up[expert], down[expert] = self._packed.gate_up(first), self._packed.linear(second)
        router = self._packed.linear(experts.router)
        return self._pointer(ExpertsStruct(router=router, gate_up=gate_up, down=down))

    def _pointer(self, struct: ctypes.Structure) -> Any:
        """A pointer to a struct, which lives as long as the decoder."""
        self._structs.append(struct)
        return ctypes.pointer(struct)


class ReusedBuffer:
    """A buffer for one large result, reused when no tensor refers to it any more.

    The allocator returns tens of megabytes to the system when they are freed, and the next step
    would take a page fault on every page of its logits. A result that is larger than all
    before gets its own allocation; the buffer grows only for later results. Otherwise the checks at
    start, which compute the logits of whole prompts, would leave a buffer far larger than any step
    needs.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.float32)
        self._largest_request = 0
        self._lent: weakref.ref[np.ndarray[Any, Any]] | None = None

    def borrow(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns], uninitialized. A new allocation while the buffer is still in use."""
        size, line = rows * columns, ALIGNMENT // self._memory.itemsize
        is_held = self._lent is not None and self._lent() is not None
        is_new = size > self._largest_request
        self._largest_request = max(size, self._largest_request)
        if is_held or is_new or size * self._memory.itemsize < REUSED_BYTES:
            return torch.empty(rows, columns)
        if len(self._memory) < size + line:
            self._memory = np.empty(size + line, dtype=np.float32)
        start = -self._memory.ctypes.data % ALIGNMENT // self._memory.itemsize
        array = self._memory[start : start + size]
        self._lent = weakref.ref(array)
        return torch.from_numpy(array).view(rows, columns)


def _check(config: DecoderConfig, weights: DecoderWeights) -> None:
    if weights.embedding.device.type != "cpu" or weights.embedding.dtype not in PER_WORD:
        raise NotSupported(
            f"no kernels for {weights.embedding.dtype} on {weights.embedding.device}"
        )
    sizes = (
        config.hidden_size,
        config.intermediate_size,
        config.head_dim,
        (config.experts or NO_EXPERTS).size,
        *(projections_of(config, mixer).output_size for mixer in {*config.mixers}),
    )
    if any(size % 2 for size in sizes) or config.head_dim > MAX_HEAD_DIM:
        raise NotSupported(
            f"the kernels need even sizes and heads of at most {MAX_HEAD_DIM}: {sizes}"
        )


def _integers(tensor: torch.Tensor) -> int:
    assert tensor.dtype == torch.int64 and tensor.is_contiguous()
    return tensor.data_ptr()
