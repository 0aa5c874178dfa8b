"""The control of `check_native` for threads: a barrier that does not order memory.

A thread that has passed it may read what another one is still writing, as with a barrier that was
forgotten. Run under the sanitizer of threads this must not return.
"""

import re
import shutil
import tempfile
from pathlib import Path

import torch

import tests.engine.model.sanitized  # noqa: F401  Compiles the kernels with the sanitizer.
from engine.model.kernels import build
from tests.engine.model.builders import make_prompt
from tests.engine.model.decoders import FAMILIES, forms_of, run_steps

ORDERS = re.compile(r"memory_order_(?:acquire|release|acq_rel)")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(shutil.copytree(build.SOURCES, Path(folder) / "kernels"))
        text, count = ORDERS.subn("memory_order_relaxed", (sources / "team.h").read_text())
        assert count > 3
        (sources / "team.h").write_text(text)
        build.SOURCES = sources
        torch.set_num_threads(3)
        native = forms_of(FAMILIES["llama"], Path(folder) / "model", dtype="float32").native
        run_steps(native, [make_prompt(200)], [[150], [50]], dtype=torch.float32)
    print("nobody noticed")


if __name__ == "__main__":
    main()
