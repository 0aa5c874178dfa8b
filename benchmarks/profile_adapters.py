"""The time of one step with and without adapters, alternating in one process.

    python -m benchmarks.profile_adapters [--models SMALL] [--dtype bfloat16] [--ranks 8,64]
        [--shapes 1x1,16x1,64x1,1x256] [--most 64] [--context 256] [--rounds 15]

A shape is rows x tokens, as in `profile_step`. `none` is a model without adapters. The others are a
model with adapters: `idle` has steps that use none, `one` the same adapter for all rows, and `many`
a different one for each row, up to `--most`. Medians in milliseconds are printed, and their ratios
to `none`. The adapters change each linear layer except the head. Before any timing, the logits are
compared with those of the wide path.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.common.arguments import names_of, numbers, step_shapes
from benchmarks.common.figures import machine
from benchmarks.common.models import SHAPES, model_folder
from benchmarks.profile_step import BLOCK_SIZE, WARM_UP_ROUNDS, compute, make_pool, make_rows
from engine.batch import BatchRow
from engine.model.adapters import Adapter, LowRank
from engine.model.checks.probe import probe
from engine.model.decoder.decoder_adapters import map_adapter
from engine.model.decoder.decoder_weights import read_weights
from engine.model.decoder.native_decoder import NativeDecoder
from engine.model.decoder.read_config import read_config
from engine.model.kernels.build import best_variant
from engine.model.load.fast_path import check_against
from engine.model.wide.loader import load_model
from quire.cli.usage import positive


def random_adapters(model: torch.nn.Module, *, rank: int, count: int) -> list[Adapter]:
    """Random adapters of all linear layers except the head."""
    generator = torch.Generator().manual_seed(rank)

    def part(linear: torch.nn.Linear) -> LowRank:
        sizes = ((rank, linear.in_features), (linear.out_features, rank))
        down, up = (torch.randn(size, generator=generator) * size[1] ** -0.5 for size in sizes)
        return LowRank(down.to(linear.weight), up.to(linear.weight), 0.5)

    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    return [
        Adapter(f"a{number}", "", {name: part(linear) for name, linear in linears.items()})
        for number in range(count)
    ]


def make_forms(model: str, *, dtype: str, rank: int, count: int) -> dict[str, NativeDecoder]:
    """The compiled decoder without adapters and with them, by the name of the measurement."""
    loaded = load_model(model_folder(model), dtype=dtype)
    wide = probe(loaded.model, max_model_len=loaded.max_model_len)
    config = read_config(wide)
    weights = read_weights(config, loaded.model.state_dict())
    adapters = random_adapters(loaded.model, rank=rank, count=count)
    wide.add_adapters(adapters)
    placed = [map_adapter(config, adapter) for adapter in adapters]
    adapted = NativeDecoder(config, weights, placed, variant=best_variant())
    check_against(wide, adapted, block_size=BLOCK_SIZE, adapters=["a0"])
    plain = NativeDecoder(config, weights, variant=best_variant())
    return {"none": plain, "idle": adapted, "one": adapted, "many": adapted}


@torch.inference_mode()
def measure(
    forms: dict[str, NativeDecoder],
    rows: Sequence[BatchRow],
    *,
    dtype: torch.dtype,
    rounds: int,
    most: int,
) -> dict[str, float]:
    """Median milliseconds of one step, by form."""
    pool = make_pool(forms["none"], rows, dtype=dtype)
    rows_of = {
        "none": rows,
        "idle": rows,
        "one": [row._replace(adapter="a0") for row in rows],
        "many": [row._replace(adapter=f"a{place % most}") for place, row in enumerate(rows)],
    }
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(WARM_UP_ROUNDS + rounds):
        for name, form in forms.items():
            started = time.perf_counter()
            compute(form, rows_of[name], pool)
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(each[WARM_UP_ROUNDS:]) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names_of("model", SHAPES), default="SMALL")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--ranks", type=numbers, default="8,64")
    parser.add_argument("--shapes", type=step_shapes, default="1x1,16x1,64x1,1x256")
    parser.add_argument("--most", type=positive, default=64)
    parser.add_argument("--context", type=positive, default=256)
    parser.add_argument("--rounds", type=positive, default=15)
    arguments = parser.parse_args()
    print(machine())
    for model in arguments.models:
        for rank in arguments.ranks:
            forms = make_forms(model, dtype=arguments.dtype, rank=rank, count=arguments.most)
            print(f"\n{model} {arguments.dtype}, rank {rank}, context {arguments.context}")
            print(f"{'rows x tokens':16}" + "".join(f"{name:>10}" for name in forms) + "   ratios")
            for shape in arguments.shapes:
                num_rows, num_tokens = map(int, shape.split("x"))
                medians = measure(
                    forms,
                    make_rows(num_rows, num_tokens, context=arguments.context),
                    dtype=getattr(torch, arguments.dtype),
                    rounds=arguments.rounds,
                    most=arguments.most,
                )
                ratios = " ".join(f"{each / medians['none']:.3f}" for each in medians.values())
                times = "".join(f"{each:>10.2f}" for each in medians.values())
                print(f"{shape:16}{times}   {ratios}", flush=True)


if __name__ == "__main__":
    main()
