"""Compiles the kernels once per machine, compiler and source. Does not know what they compute.

The library is kept in the folder QUIRE_KERNEL_CACHE, or in the user's cache folder. An image that
is built on one machine and runs on others must contain every variant: `python -m
engine.model.kernels.build` builds them.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import itertools
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
#: Timeout of the compiler, in seconds; it needs about ten.
COMPILE_TIMEOUT_SECONDS = 300
#: Mode bits that let the group or everyone write.
OTHERS_WRITE = 0o022
CPUINFO = Path("/proc/cpuinfo")
#: Cache levels to prefetch into: 2 if the first-level cache has at most SMALL_CACHE_KIB, otherwise
#: 1.
FETCH_LEVELS = (1, 2)
SMALL_CACHE_KIB = 32
#: Linux's description of a core's caches, one folder for each.
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: The system call of x86-64 that requests permission to use the AMX tile registers: its number, the
#: request and the feature.
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18

# FMA contraction is allowed, reassociation is not: with -ffast-math the compiler could change the
# order of sums, and a row could then depend on its neighbours. Without -fno-gnu-unique, static
# tables of templates are shared by the whole process, and a second variant would use the
# micro-kernels of the first one.
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-Wno-psabi"),
    "-fno-gnu-unique",
)

logger = logging.getLogger(__name__)


class KernelsUnavailable(Exception):
    """The kernels cannot be used; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """An instruction set to compile for.

    Args:
        features: the features that a processor must have, as named in /proc/cpuinfo.
        flags: the compiler's flags for these instructions.
        fetch_level: the cache level to prefetch into. It changes speed, never results.
    """

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]
    fetch_level: int = 1

    @property
    def options(self) -> tuple[str, ...]:
        """All flags of the compiler that depend on the variant."""
        return (*self.flags, f"-DQUIRE_FETCH_LEVEL={self.fetch_level}")


_AVX2 = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
#: Of bfloat16, and of integers. Every processor with the former has the latter.
_DOT_PRODUCTS = frozenset({"avx512_bf16", "avx512_vnni"})
_DOT_PRODUCT_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
_AMX = frozenset({"amx_tile", "amx_bf16"})

#: Fastest first; the last one needs no feature.
VARIANTS = (
    Variant(
        "amx_bf16",
        _AVX512 | _AMX | _DOT_PRODUCTS,
        (*_DOT_PRODUCT_FLAGS, "-mamx-tile", "-mamx-bf16"),
    ),
    Variant("avx512_bf16", _AVX512 | _DOT_PRODUCTS, _DOT_PRODUCT_FLAGS),
    Variant("avx512", _AVX512, ("-march=x86-64-v4",)),
    Variant("avx2", _AVX2, ("-march=x86-64-v3",)),
    Variant("portable", frozenset(), ()),
)


def best_variant() -> Variant:
    """The fastest variant that this processor can run, with the fetch level for its caches."""
    features = _processor_features()
    runnable = next(variant for variant in VARIANTS if variant.features <= features)
    return replace(runnable, fetch_level=_fetch_level())


def library_path(variant: Variant, *, instead_of: Path | None = None) -> Path:
    """The path of a variant's library; compile it if the cache has none other than `instead_of`.

    Several processes may call this at once: one compiles, and the others wait for its library.

    Raises:
        KernelsUnavailable: there is no compiler, it failed, or the library cannot be stored.
    """
    if platform.system() != "Linux":
        raise KernelsUnavailable(f"the kernels are not built on {platform.system()}")
    try:
        folder = cache_folder()
        name = f"quire-{variant.name}.{variant.fetch_level}-{_digest_of_sources(variant)}"
        compiler = _compiler()
        if compiler is None:
            return _built_elsewhere(folder, name)
        target = folder / f"{name}-{_digest(_run(compiler, '--version').encode())}.so"
        if target == instead_of or not target.exists():
            with _alone_in(folder):
                if target == instead_of or not target.exists():
                    _compile(compiler, variant, target)
    except OSError as error:
        raise KernelsUnavailable(f"the kernels cannot be stored: {error}") from error
    return target


def _built_elsewhere(folder: Path, name: str) -> Path:
    """The library that an image contains, built in a stage with a compiler."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        return path
    raise KernelsUnavailable("there is no C++ compiler (g++) on this machine")


def _fetch_level() -> int:
    """2 if the first-level data cache is small, 1 if it is large or its size is unknown."""
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
    """Request permission for AMX: Linux saves its large registers only for processes that ask."""
    request = ctypes.CDLL(None).syscall
    request.restype = ctypes.c_long
    arguments = ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    refused: int = request(*map(ctypes.c_long, arguments))
    return refused == 0


def _compiler() -> str | None:
    """GNU C++: it uses the OpenMP runtime of torch; two runtimes in one process would conflict."""
    names = filter(None, (os.environ.get("CXX"), "g++"))
    return next(filter(None, map(shutil.which, names)), None)


def cache_folder() -> Path:
    """The folder of compiled kernels, to which no other user can write. KernelsUnavailable."""
    chosen = os.environ.get("QUIRE_KERNEL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(chosen) if chosen else Path(base or Path.home() / ".cache") / "quire"
    except RuntimeError as error:
        raise KernelsUnavailable(f"name a folder in QUIRE_KERNEL_CACHE: {error}") from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Libraries in this folder are loaded and run, so no other user may be able to write to it.
    status = folder.stat()
    if status.st_uid not in (0, os.getuid()) or status.st_mode & OTHERS_WRITE:
        raise KernelsUnavailable(
            f"other users can write to {folder}, so no library is loaded from it"
        )
    return folder


def units() -> list[str]:
    """The paths of the translation units; a library has all of them."""
    return sorted(map(str, SOURCES.glob("*.cpp")))


def _digest_of_sources(variant: Variant) -> str:
    parts = [" ".join((*_FLAGS, *variant.flags, torch.__version__)).encode()]
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        parts += [source.name.encode(), source.read_bytes()]
    return _digest(*parts)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes out of this block; without effect where the file system has no locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        # The lock ends with the handle, however the process ends.
        os.close(handle)


def _compile(compiler: str, variant: Variant, target: Path) -> None:
    logger.warning(
        "compiling the %s kernels; this is done once and takes about ten seconds", variant.name
    )
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        _run(compiler, *_FLAGS, *variant.options, *units(), "-o", name)
        with Path(name).open("rb") as written:
            os.fsync(written)
        # Atomic: another process sees the whole library or none.
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
        # The driver's line (collect2) only says that the linker failed; the linker's own line says
        # why.
        lines.sort(key=lambda line: line.startswith("collect2"))
        raise KernelsUnavailable(f"the compiler failed: {next(iter(lines), 'no reason given')}")
    return finished.stdout


if __name__ == "__main__":
    for each, level in itertools.product(VARIANTS, FETCH_LEVELS):
        if platform.machine() == "x86_64" or not each.features:
            library_path(replace(each, fetch_level=level))
