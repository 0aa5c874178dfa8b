"""Checks the kernels as C++: warnings, memory and undefined behaviour, and that errors are caught.

    python -m tests.engine.model.check_native

Every variant is compiled with all warnings as errors. Then the tests of the kernels and of the
decoder run with the kernels under the address and undefined behaviour sanitizers, in every variant
that this processor has. Before that a deliberate write out of bounds has to be reported: otherwise
the silence of the tests would mean nothing.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from engine.model.kernels import build

ROOT = Path(__file__).resolve().parents[3]
#: Sanitized libraries are kept apart from those that serve.
LIBRARIES = ROOT / "build" / "sanitized"
WARNINGS = ("-Wall", "-Wextra", "-Werror")
REPORT = "AddressSanitizer: heap-buffer-overflow"
#: The tests that run the kernels; the others are about building and choosing them.
TESTS = (
    "tests/engine/model/decoder/test_kernels.py",
    "tests/engine/model/checks/test_choosing.py",
    "tests/engine/model/decoder/test_decoder.py",
    "tests/engine/model/test_drawn_decoders.py",
    "tests/engine/model/test_quantized_cache.py",
    "tests/engine/model/load/test_adapted_kernels.py",
    "tests/engine/model/decoder/test_quantized.py",
    "tests/engine/model/kernels/test_multiply.py",
    "tests/engine/model/kernels/test_panels.py",
    "tests/engine/model/kernels/test_recurrent.py",
    "tests/engine/model/kernels/test_vector.py",
)
SELECTED = (
    "bit_for_bit or block_size or long_contexts or every_variant or every_form or no_form"
    " or test_multiply or test_panels or test_recurrent or test_vector"
)


def main() -> int:
    compiler = build._compiler()
    if compiler is None:
        print("check-native: there is no C++ compiler (g++) on this machine: nothing was checked")
        return 1
    check_warnings(compiler)
    environment = sanitized_environment(compiler)
    check_control(environment)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.engine.model.sanitized"]
    command += [*TESTS, "-k", SELECTED, "--timeout", "600"]
    print(f"check-native: {' '.join(command[1:])}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def check_warnings(compiler: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for variant in build.VARIANTS:
            flags = [*build._FLAGS, *variant.options, *WARNINGS]
            print(f"check-native: {variant.name}: {Path(compiler).name} {' '.join(flags)}")
            output = str(Path(folder) / f"{variant.name}.so")
            subprocess.run([compiler, *flags, *build.units(), "-o", output], check=True)


def sanitized_environment(compiler: str) -> dict[str, str]:
    """Of a process that loads sanitized libraries; Python's own leaks are none of our business."""
    runtimes = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "QUIRE_KERNEL_CACHE": str(LIBRARIES),
    }


def check_control(environment: dict[str, str]) -> None:
    """A write out of bounds is reported.

    Raises:
        SystemExit: it is not, so the sanitizers do not work here.
    """
    command = [sys.executable, "-m", "tests.engine.model.overrun"]
    print(f"check-native: control: {' '.join(command[1:])}", flush=True)
    control = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if control.returncode == 0 or REPORT not in control.stderr:
        sys.exit(f"check-native: the control was not caught: {control.stdout}{control.stderr}")
    print(f"check-native: control: caught, {REPORT}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
