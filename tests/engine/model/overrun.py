"""The control of `check_native`: a step that is given too small a buffer for its logits.

The kernels write behind its end, as they would with a wrong size of their own. Run under the
sanitizers this must not return.
"""

import tempfile
from pathlib import Path

import torch

import tests.engine.model.sanitized  # noqa: F401  Compiles the kernels with the sanitizers.
from tests.engine.model.builders import make_prompt
from tests.engine.model.decoders import FAMILIES, forms_of, run_steps


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        native = forms_of(FAMILIES["llama"], Path(folder), dtype="float32").native
    native._head_outputs -= 16
    run_steps(native, [make_prompt(40)], [[40]], dtype=torch.float32)
    print("nobody noticed")


if __name__ == "__main__":
    main()
