"""Compiles Triton kernels for chips that are not there, exactly as a launch on them would.

Triton chooses a specialisation from the arguments of a launch: their types, the alignment of
pointers, divisible integers. So the engine's own launches are taken, and end after the compiler.
"""

import contextlib
import io
import re
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_STORES = re.compile(r"\bst\.global[.\w]*")
_SIXTEEN_BYTES = (".v4.b32", ".v2.b64")


@dataclass(frozen=True)
class Chip:
    """A compute capability, and the bytes of shared memory that a program can have there."""

    capability: int
    shared_memory: int


#: A100, H100 and H200, B200, and the consumer cards of Blackwell.
CHIPS = (
    Chip(80, 163 * 1024),
    Chip(90, 227 * 1024),
    Chip(100, 227 * 1024),
    Chip(120, 99 * 1024),
)


@dataclass(frozen=True)
class Compiled:
    """A kernel in one specialisation: what the assembler says of its machine code."""

    name: str
    registers: int
    #: Bytes of local memory: spilled registers, and arrays that found no register.
    local_bytes: int
    shared_bytes: int
    #: Stores to global memory of less than sixteen bytes.
    narrow_stores: int


class NoDevice:
    """In the place of Triton's driver; each chip has a cache of its own."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._chip.capability, 32)

    def get_current_device(self) -> int:
        return self._chip.capability

    def get_current_stream(self, device: int) -> int:
        return 0


class CompilingKernels:
    """The kernels of a module. A launch compiles, and adds to `compiled` what was new."""

    def __init__(self, module: Any, chip: Chip) -> None:
        self.TritonError = module.TritonError
        self.compiled: list[Compiled] = []
        self._module = module
        self._chip = chip

    def __getattr__(self, name: str) -> "_Kernel":
        return _Kernel(name, getattr(self._module, name), self)

    def compile(self, name: str, kernel: Any, arguments: tuple[Any, ...], options: Any) -> None:
        driver.set_active(NoDevice(self._chip))
        log = io.StringIO()
        with knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            knobs.nvidia.dump_ptxas_log = True
            made = kernel.warmup(*arguments, grid=(1,), **options)
        if not log.getvalue():
            return  # Compiled by an earlier launch.
        (registers,) = _REGISTERS.findall(log.getvalue())
        stack = [max(map(int, line)) for line in _STACK.findall(log.getvalue())]
        stores = _STORES.findall(made.asm["ptx"])
        narrow = sum(not store.endswith(_SIXTEEN_BYTES) for store in stores)
        self.compiled.append(
            Compiled(name, int(registers), max(stack), made.metadata.shared, narrow)
        )


@dataclass(frozen=True)
class _Kernel:
    name: str
    kernel: Any
    kernels: CompilingKernels

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *arguments, **options: self.kernels.compile(
            self.name, self.kernel, arguments, options
        )
