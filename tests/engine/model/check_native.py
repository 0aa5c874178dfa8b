"""Checks the kernels as C++: warnings, memory, undefined behaviour, races, and that each is caught.

    python -m tests.engine.model.check_native [PART ...]

The parts, which take minutes each; without any, all of them that this processor can run:

- warnings: every variant is compiled with all warnings as errors.
- the name of a variant: the tests of the kernels and of the decoder run with kernels of this
  variant alone, under the sanitizers of addresses and of undefined behaviour.
- threads: the tests with several threads run with the best variant under the sanitizer of threads.

Before a sanitizer is believed, it has to report a deliberate fault: a write out of bounds, or a
barrier that does not order memory. Otherwise the silence of the tests would mean nothing.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.model.kernels import build

ROOT = Path(__file__).resolve().parents[3]
#: Sanitized libraries are kept apart from those that serve.
LIBRARIES = ROOT / "build" / "sanitized"
WARNED, THREADS = "warnings", "threads"
WARNINGS = ("-Wall", "-Wextra", "-Werror")
#: The tests that run the kernels; the others are about building and choosing them.
TESTS = (
    "tests/engine/model/decoder/test_kernels.py",
    "tests/engine/model/checks/test_choosing.py",
    "tests/engine/model/decoder/test_decoder.py",
    "tests/engine/model/test_drawn_decoders.py",
    "tests/engine/model/test_quantized_cache.py",
    "tests/engine/model/load/test_adapted_kernels.py",
    "tests/engine/model/decoder/test_quantized.py",
    "tests/engine/model/wide/test_hybrids.py",
    "tests/engine/model/kernels",
)
OF_MEMORY = (
    "bit_for_bit or block_size or long_contexts or every_variant or every_form or no_form"
    " or however_the_engine or preempted_and_resumed or any_company"
    " or test_multiply or test_panels or test_plan or test_recurrent or test_team or test_vector"
)
#: Each kind of layer, of cache and of step with more than one thread.
OF_THREADS = (
    "alone_batched_and_chunked_bit_for_bit or of_many_decodes or test_team or test_recurrent"
    " or first_of_the_largest"
)


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """What a run under sanitizers needs.

    Args:
        runtimes: the libraries that are loaded first.
        options: the variables that configure them.
        control: the module whose fault must be reported.
        report: what the report of that fault says.
        tests: the expression that selects tests.
    """

    name: str
    runtimes: tuple[str, ...]
    options: dict[str, str]
    control: str
    report: str
    tests: str


#: Python's own leaks are none of our business, and neither are the threads of torch.
MEMORY = Sanitizer(
    "address,undefined",
    ("libasan.so", "libubsan.so"),
    {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    "tests.engine.model.overrun",
    "AddressSanitizer: heap-buffer-overflow",
    OF_MEMORY,
)
RACES = Sanitizer(
    "thread",
    ("libtsan.so",),
    {"TSAN_OPTIONS": "halt_on_error=1 ignore_noninstrumented_modules=1"},
    "tests.engine.model.racing",
    "ThreadSanitizer: data race",
    OF_THREADS,
)


def main() -> int:
    compiler = build._compiler()
    if compiler is None:
        print("check-native: there is no C++ compiler (g++) on this machine: nothing was checked")
        return 1
    parts = _parts(sys.argv[1:])
    for part in parts:
        if part == WARNED:
            check_warnings(compiler)
        elif (code := _run_under(RACES if part == THREADS else MEMORY, part, compiler)) != 0:
            return code
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"check-native: {part}: {used.ru_utime + used.ru_stime:.0f} s of CPU time in all")
    return 0


def _parts(chosen: Sequence[str]) -> list[str]:
    features = build._processor_features()
    runnable = [variant.name for variant in build.VARIANTS if variant.features <= features]
    known = [WARNED, *runnable, THREADS]
    parser = argparse.ArgumentParser(prog="check_native", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(known))
    parts: list[str] = parser.parse_args(chosen).parts
    if unknown := set(parts) - set(known):
        parser.error(f"there is no part {min(unknown)} on this machine; there are {known}")
    for variant in build.VARIANTS:
        if variant.name not in runnable:
            print(f"check-native: this processor cannot run {variant.name}: only its warnings")
    return parts or known


def check_warnings(compiler: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for variant in build.VARIANTS:
            flags = [*build._FLAGS, *variant.options, *WARNINGS]
            print(f"check-native: {variant.name}: {Path(compiler).name} {' '.join(flags)}")
            output = str(Path(folder) / f"{variant.name}.so")
            subprocess.run([compiler, *flags, *build.units(), "-o", output], check=True)


def _run_under(sanitizer: Sanitizer, part: str, compiler: str) -> int:
    """The exit code of the tests, after the control."""
    variant = build.best_variant().name if part == THREADS else part
    environment = sanitized_environment(sanitizer, variant, compiler)
    check_control(sanitizer, environment)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.engine.model.sanitized"]
    # Reports are written to the process's own output, before it ends at once.
    command += [*TESTS, "-k", sanitizer.tests, "--timeout", "600", "--capture", "sys"]
    print(f"check-native: {part}: {' '.join(command[1:])}", flush=True)
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def sanitized_environment(sanitizer: Sanitizer, variant: str, compiler: str) -> dict[str, str]:
    """Of a process that loads sanitized libraries of one variant."""
    runtimes = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in sanitizer.runtimes
    ]
    return os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        "QUIRE_KERNEL_CACHE": str(LIBRARIES),
        "QUIRE_TEST_SANITIZER": sanitizer.name,
        "QUIRE_TEST_VARIANT": variant,
        **sanitizer.options,
    }


def check_control(sanitizer: Sanitizer, environment: dict[str, str]) -> None:
    """A deliberate fault is reported.

    Raises:
        SystemExit: it is not, so the sanitizer does not work here.
    """
    command = [sys.executable, "-m", sanitizer.control]
    print(f"check-native: control: {' '.join(command[1:])}", flush=True)
    control = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if control.returncode == 0 or sanitizer.report not in control.stderr:
        sys.exit(f"check-native: the control was not caught: {control.stdout}{control.stderr}")
    print(f"check-native: control: caught, {sanitizer.report}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
