"""Compiles the kernels once per machine, compiler and source. Knows nothing of what they compute.

The library is kept under QUIRE_KERNEL_CACHE, or in the user's cache folder. An image that is built
on one machine and runs on others builds every variant: `python -m engine.model.kernels.build`.
"""

import ctypes
import hashlib
import itertools
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
#: Longest a compiler may take, in seconds; it needs about ten.
COMPILE_TIMEOUT_SECONDS = 300
#: Mode bits that let the group or everyone write.
OTHERS_WRITE = 0o022
CPUINFO = Path("/proc/cpuinfo")
#: Caches that what is needed later can be fetched into: the second where the first has no more KiB
#: than this.
FETCH_LEVELS = (1, 2)
SMALL_CACHE_KIB = 32
#: What Linux tells of the caches of a core, those for data and instructions each in a folder.
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: A system call of x86-64, a request, and what is requested: registers for matrices.
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18

# No contraction is switched off and nothing is reassociated: -ffast-math would let the compiler
# change the order of sums, and with it the promise that a row does not depend on its neighbours.
# Without the last flag, static tables of templates are one per process, and a second variant would
# compute with the first one's tiles.
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-Wno-psabi"),
    "-fno-gnu-unique",
)

logger = logging.getLogger(__name__)


class KernelsUnavailable(Exception):
    """There is no library; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One set of instructions to compile for.

    Args:
        features: what a processor must offer, as /proc/cpuinfo names it.
        flags: of the compiler, for these instructions.
        fetch_level: of the cache that what is needed later is fetched into. How fast a processor
            is depends on it, and no result does.
    """

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]
    fetch_level: int = 1

    @property
    def options(self) -> tuple[str, ...]:
        """All that the compiler is told of the variant."""
        return (*self.flags, f"-DQUIRE_FETCH_LEVEL={self.fetch_level}")


_AVX2 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AMX = frozenset({"amx_tile", "amx_bf16"})

#: Best first; the last one needs nothing.
VARIANTS = (
    Variant(
        "amx_bf16",
        _AVX512 | _AMX | {"avx512_bf16"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
    Variant("avx512_bf16", _AVX512 | {"avx512_bf16"}, ("-march=x86-64-v4", "-mavx512bf16")),
    Variant("avx512", _AVX512, ("-march=x86-64-v4",)),
    Variant("avx2", _AVX2, ("-march=x86-64-v3",)),
    Variant("portable", frozenset(), ()),
)


def best_variant() -> Variant:
    """The first variant that this processor can run, as its caches want it."""
    features = _processor_features()
    runnable = next(variant for variant in VARIANTS if variant.features <= features)
    return replace(runnable, fetch_level=_fetch_level())


def library_path(variant: Variant, *, instead_of: Path | None = None) -> Path:
    """The compiled library of a variant, compiling it if the cache has none but `instead_of`.

    Several processes may ask at once: each compiles for itself and the last one to finish stays.

    Raises:
        KernelsUnavailable: no compiler, or it failed, or there is no place to keep the result.
    """
    if platform.system() != "Linux":
        raise KernelsUnavailable(f"the kernels are not built on {platform.system()}")
    try:
        folder = _cache_folder()
        name = f"quire-{variant.name}.{variant.fetch_level}-{_digest_of_sources(variant)}"
        compiler = _compiler()
        if compiler is None:
            return _built_elsewhere(folder, name)
        target = folder / f"{name}-{_digest(_run(compiler, '--version').encode())}.so"
        if target == instead_of or not target.exists():
            _compile(compiler, variant, target)
    except OSError as error:
        raise KernelsUnavailable(f"the kernels cannot be kept: {error}") from error
    return target


def _built_elsewhere(folder: Path, name: str) -> Path:
    """What an image brings from the stage that had a compiler."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        return path
    raise KernelsUnavailable("there is no C++ compiler (g++) on this machine")


def _fetch_level() -> int:
    """The first where nobody tells how large it is."""
    for cache in CACHES.glob("index*"):
        try:
            level, kind, size = (
                (cache / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        if level == "1" and kind != "Instruction":
            kib = size.removesuffix("K")
            return 2 if kib.isdecimal() and int(kib) <= SMALL_CACHE_KIB else 1
    return 1


def _processor_features() -> frozenset[str]:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    features = frozenset(next(flags, "").split())
    return features if not features & _AMX or _may_use_matrix_unit() else features - _AMX


def _may_use_matrix_unit() -> bool:
    """Ask the system for it: its registers are large, and only who asked is given room for them."""
    request = ctypes.CDLL(None).syscall
    request.restype = ctypes.c_long
    arguments = ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    refused: int = request(*map(ctypes.c_long, arguments))
    return refused == 0


def _compiler() -> str | None:
    """GNU C++: its OpenMP runtime is the one torch brings, and two of them would fight."""
    names = filter(None, (os.environ.get("CXX"), "g++"))
    return next(filter(None, map(shutil.which, names)), None)


def _cache_folder() -> Path:
    chosen = os.environ.get("QUIRE_KERNEL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(chosen) if chosen else Path(base or Path.home() / ".cache") / "quire"
    except RuntimeError as error:
        raise KernelsUnavailable(f"name a folder in QUIRE_KERNEL_CACHE: {error}") from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # What lies here is loaded and run: nobody else may have put it there.
    status = folder.stat()
    if status.st_uid not in (0, os.getuid()) or status.st_mode & OTHERS_WRITE:
        raise KernelsUnavailable(f"others may write to {folder}, so nothing is run from there")
    return folder


def _digest_of_sources(variant: Variant) -> str:
    parts = [" ".join((*_FLAGS, *variant.flags, torch.__version__)).encode()]
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        parts += [source.name.encode(), source.read_bytes()]
    return _digest(*parts)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, variant: Variant, target: Path) -> None:
    logger.warning("compiling the %s kernels, once: some ten seconds", variant.name)
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        _run(compiler, *_FLAGS, *variant.options, str(SOURCES / "decoder.cpp"), "-o", name)
        with Path(name).open("rb") as written:
            os.fsync(written)
        # Readers see the whole library or none.
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(*command: str) -> str:
    try:
        finished = subprocess.run(  # noqa: S603  The compiler is the administrator's choice.
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMPILE_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"the compiler could not be run: {error}") from error
    if finished.returncode != 0:
        lines = [line for line in finished.stderr.splitlines() if "error" in line or "fail" in line]
        # That of the driver only says that the linker failed, which has said why before.
        lines.sort(key=lambda line: line.startswith("collect2"))
        raise KernelsUnavailable(f"the compiler failed: {next(iter(lines), 'no reason given')}")
    return finished.stdout


if __name__ == "__main__":
    for each, level in itertools.product(VARIANTS, FETCH_LEVELS):
        if platform.machine() == "x86_64" or not each.features:
            library_path(replace(each, fetch_level=level))
