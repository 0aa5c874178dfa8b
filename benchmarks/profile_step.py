"""The time of one step in different forms of a model, alternating in one process.

    python -m benchmarks.profile_step [--models SMALL] [--dtype bfloat16] [--forms native,wide]
        [--shapes 1x1,8x1,64x1,1x128] [--context 256] [--rounds 9] [--cpu-time]

Forms are `native`, `torch`, `wide`, and the kernels for older processors by their names:
`avx512_bf16`, `avx512`, `avx2`, `portable`. `fetch-1` and `fetch-2` are `native` with prefetching
into the first-level or the second-level cache. `shared` is `native` with its weights in files of
the folder `--shared-weights`, `int8-cache` is `native` over an 8-bit KV cache. To let torch compute
as on an older processor, set its own variables:

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
        python -m benchmarks.profile_step --models SMALL --forms avx2,torch

A shape is rows x tokens: 64x1 decodes 64 requests, 1x128 computes 128 tokens of one prompt. Each
round runs each form once, so that a slower machine slows down all of them. Medians are printed, and
ratios to the last form. First, the logits of all forms are compared with those of the wide path.

With `--cpu-time` the clock is the CPU time of the process, and one thread computes: on a machine
with other work, that is steadier.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.common.arguments import names_of, step_shapes
from benchmarks.common.figures import machine
from benchmarks.common.models import BUILD_FOLDER, MODELS, model_folder
from engine.batch import BatchRow
from engine.model.attention.cpu import CpuAttention
from engine.model.causal_model import CausalModel, state_shapes_of
from engine.model.checks.probe import probe
from engine.model.checks.rehearsal import CACHED_STATE
from engine.model.decoder.decoder import Decoder
from engine.model.decoder.decoder_weights import read_weights
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.decoder.read_config import read_config
from engine.model.device.kv_pool import KVPool
from engine.model.device.quantized_kv import QUANTIZED
from engine.model.device.state_pool import StatePool
from engine.model.device.weight_files import WeightFiles
from engine.model.kernels.build import FETCH_LEVELS, VARIANTS, best_variant
from engine.model.load.fast_path import check_against
from engine.model.step import compute_logits, lay_out
from engine.model.wide.loader import load_model
from engine.request import NO_SLOT
from engine.sampling_params import SamplingParams
from quire.cli.usage import positive

BLOCK_SIZE = 16
#: The possible values of `--forms`.
FORMS = (
    *("native", "torch", "wide"),
    *(variant.name for variant in VARIANTS),
    *(f"fetch-{level}" for level in FETCH_LEVELS),
    *("shared", "int8-cache"),
)
#: Default of `--shared-weights`.
SHARED_WEIGHTS = BUILD_FOLDER / "shared-weights"
#: Steps of a form before the clock starts.
WARM_UP_ROUNDS = 2


def make_forms(
    model: str, names: Sequence[str], *, dtype: str, shared_weights: Path = SHARED_WEIGHTS
) -> dict[str, CausalModel]:
    """Name -> form. Raises if the logits of a form differ from those of the wide path."""
    loaded = load_model(model_folder(model), dtype=dtype)
    wide = probe(loaded.model, max_model_len=loaded.max_model_len)
    config = read_config(wide)
    weights = read_weights(config, loaded.model.state_dict())
    best = best_variant()
    variants = {"native": best} | {variant.name: variant for variant in VARIANTS}
    variants |= {f"fetch-{level}": replace(best, fetch_level=level) for level in FETCH_LEVELS}
    variants["shared"] = variants["int8-cache"] = best
    files = WeightFiles(shared_weights, 1 << 36) if "shared" in names else None
    others: dict[str, CausalModel] = {"torch": Decoder(config, weights), "wide": wide}
    forms = {
        name: others.get(name)
        or NativeDecoder(
            config,
            weights,
            variant=variants[name],
            weight_files=files if name == "shared" else None,
        )
        for name in names
    }
    for name, form in forms.items():
        cache_dtype = QUANTIZED if name == "int8-cache" else None
        check_against(wide, form, block_size=BLOCK_SIZE, cache_dtype=cache_dtype)
    return forms


def make_rows(
    num_rows: int, num_tokens: int, *, context: int, has_states: bool = False
) -> list[BatchRow]:
    """Rows whose last token is at the end of the context; no two share a block or a slot."""
    blocks_each = -(-context // BLOCK_SIZE)
    return [
        BatchRow(
            request_id=str(index),
            token_ids=[5 + index + place for place in range(num_tokens)],
            start=context - num_tokens,
            block_ids=range(index, num_rows * blocks_each, num_rows),
            samples=True,
            sampling=SamplingParams(max_tokens=1),
            prompt_token_ids=[],
            output_token_ids=[],
            state_slot=index if has_states else NO_SLOT,
        )
        for index in range(num_rows)
    ]


def make_pool(form: CausalModel, rows: Sequence[BatchRow], *, dtype: torch.dtype) -> KVPool:
    """A KV pool with the blocks of `rows`. The form computes once, then all blocks are written.

    The first computation determines how the pool is mapped. Memory that was never written would be
    read as a single page of zeros from the caches, which is too fast.
    """
    num_blocks = len(rows) * len(rows[0].block_ids)
    shapes, start = state_shapes_of(form), rows[0].start
    states = StatePool(shapes, num_slots=len(rows)) if shapes else None
    if states is not None and start:
        # What a step reads stays: each step reads the states after so many tokens again.
        states.fill(range(len(rows)), start, CACHED_STATE)
    pool = KVPool(
        form.layer_shapes,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        states=states,
    )
    compute(form, rows, pool)
    pool.touch(range(num_blocks))
    return pool


def compute(form: CausalModel, rows: Sequence[BatchRow], pool: KVPool) -> None:
    """Computes one step."""
    step = lay_out(rows, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    compute_logits(step, model=form, kv_pool=pool, backend=CpuAttention())


@torch.inference_mode()
def measure(
    forms: dict[str, CausalModel],
    rows: Sequence[BatchRow],
    *,
    dtype: torch.dtype,
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Median milliseconds of one step, by form."""
    pools = {
        name: make_pool(form, rows, dtype=QUANTIZED if name == "int8-cache" else dtype)
        for name, form in forms.items()
    }
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(WARM_UP_ROUNDS + rounds):
        for name, form in forms.items():
            started = clock()
            compute(form, rows, pools[name])
            times[name].append(1e3 * (clock() - started))
    return {name: statistics.median(each[WARM_UP_ROUNDS:]) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names_of("model", MODELS), default="TINY,SMALL")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--forms", type=names_of("form", FORMS), default="native,wide")
    parser.add_argument("--shapes", type=step_shapes, default="1x1,8x1,64x1,1x128")
    parser.add_argument("--shared-weights", type=Path, default=SHARED_WEIGHTS)
    parser.add_argument("--context", type=positive, default=256)
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    if arguments.cpu_time:
        torch.set_num_threads(1)
    print(machine())
    names = arguments.forms
    for model in arguments.models:
        forms = make_forms(
            model, names, dtype=arguments.dtype, shared_weights=arguments.shared_weights
        )
        print(f"\n{model} {arguments.dtype}, context {arguments.context}, ms a step")
        print(f"{'rows x tokens':16}" + "".join(f"{name:>10}" for name in names) + "   ratios")
        for shape in arguments.shapes:
            num_rows, num_tokens = map(int, shape.split("x"))
            rows = make_rows(
                num_rows,
                num_tokens,
                context=arguments.context,
                has_states=bool(state_shapes_of(forms[names[0]])),
            )
            medians = measure(
                forms,
                rows,
                dtype=getattr(torch, arguments.dtype),
                rounds=arguments.rounds,
                clock=clock,
            )
            last = medians[names[-1]]
            ratios = " ".join(f"{last / medians[name]:.2f}" for name in names[:-1])
            times = "".join(f"{medians[name]:>10.2f}" for name in names)
            print(f"{shape:16}{times}   {ratios}", flush=True)


if __name__ == "__main__":
    main()
