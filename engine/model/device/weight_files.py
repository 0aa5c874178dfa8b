"""Keeps weights in files that all processes of a machine map. Does not know what the bytes mean.

A file is named by the hash of its bytes. It is compared with the bytes that a process already has
before it replaces them, so a damaged or incomplete file is written again, and no result can depend
on what is in the folder.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.errors import ModelRefused

#: Memory is aligned to huge pages of x86-64, so that a mapped file can be in them too.
HUGE_PAGE_BYTES = 1 << 21
#: Linux's MAP_FIXED, which the module mmap does not name: replace what is mapped at the address.
MAP_FIXED = 0x10
#: Linux's MADV_POPULATE_READ: map all pages now. A file that cannot be read gives an error here,
#: and not a signal at the first use.
MADV_POPULATE_READ = 22
#: Mode bits that let the group or everyone write.
OTHERS_WRITE = 0o022
SUFFIX, PART_SUFFIX = ".weights", ".part"

logger = logging.getLogger(__name__)


class Region:
    """Private memory, aligned to huge pages; a file with the same bytes can take its place.

    Args:
        size: bytes; only those that are written take memory.
    """

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=flags)
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._start = -whole.data_ptr() % HUGE_PAGE_BYTES
        self.bytes = whole[self._start : self._start + size]
        self._advise(mmap.MADV_HUGEPAGE, size)

    def map_file(self, handle: int, size: int) -> None:
        """Replace the first `size` bytes by those of a file, read-only.

        Raises:
            OSError: the file cannot be mapped or read.
        """
        protection, flags = mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED
        address = self.bytes.data_ptr()
        if _system_mmap()(address, size, protection, flags, handle, 0) != address:
            raise OSError(ctypes.get_errno(), "a file cannot be mapped")
        self._advise(mmap.MADV_HUGEPAGE, size)
        self._advise(MADV_POPULATE_READ, size)

    def _advise(self, advice: int, size: int) -> None:
        try:
            self._mapping.madvise(advice, self._start, size)
        except OSError as error:
            # An older system does not know the advice: pages are mapped at their first use.
            if error.errno != errno.EINVAL:
                raise


class WeightFiles:
    """A folder of weights, at most `max_bytes` of them, for the processes of one user.

    Each process locks the files that it maps. To make room, the file that was taken up longest ago
    is removed, but none that a process maps.

    Raises:
        ModelRefused: the folder cannot be used, or other users can write to it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        except OSError as error:
            raise ModelRefused(f"shared_weights cannot be used: {error}") from error
        if status.st_uid not in (0, os.getuid()) or status.st_mode & OTHERS_WRITE:
            raise ModelRefused(f"shared_weights: other users can write to {folder}")

    def share(self, region: Region, size: int) -> bool:
        """Let a file take the place of the first `size` bytes of a region. False if none can.

        Raises:
            MemoryError: the file disappeared while it was mapped; the bytes are lost.
        """
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = region.bytes[:pages]
        name = hashlib.sha256(memory.numpy().data).hexdigest() + SUFFIX
        try:
            handle = self._found(name, memory) or self._written(name, memory)
        except OSError as error:
            logger.warning("weights stay private: %s", error)
            return False
        if handle is None:
            logger.warning(
                "weights stay private: the files in use leave no room in %s", self._folder
            )
            return False
        # The lock ends with the handle, which lives as long as the mapping.
        weakref.finalize(region, os.close, handle)
        try:
            region.map_file(handle, pages)
        except OSError as error:
            raise MemoryError(f"weights cannot be mapped: {error}") from error
        return True

    def _found(self, name: str, memory: torch.Tensor) -> int | None:
        """A locked handle of the file, if it has exactly these bytes."""
        try:
            handle = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            status = os.fstat(handle)
            # A file without a name has just been removed to make room.
            if status.st_nlink and status.st_size == len(memory) and _is_equal(handle, memory):
                with contextlib.suppress(PermissionError):
                    os.utime(handle)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        return None

    def _written(self, name: str, memory: torch.Tensor) -> int | None:
        """A locked handle of a new file; None if there is no room."""
        with self._alone():
            # Another process may have written it in the meantime.
            if (handle := self._found(name, memory)) is not None:
                return handle
            (self._folder / name).unlink(missing_ok=True)
            if not self._makes_room(len(memory)):
                return None
            part, path = tempfile.mkstemp(dir=self._folder, suffix=PART_SUFFIX)
            try:
                with os.fdopen(part, "wb") as stream:
                    stream.write(memory.numpy().data)
                    stream.flush()
                    os.fsync(stream.fileno())
                # Atomic: another process sees the whole file or none.
                Path(path).replace(self._folder / name)
            finally:
                Path(path).unlink(missing_ok=True)
            return self._found(name, memory)

    def _makes_room(self, size: int) -> bool:
        for part in self._folder.glob(f"*{PART_SUFFIX}"):
            # Whoever wrote it has died: this process is alone.
            part.unlink(missing_ok=True)
        files = [(path.stat(), path) for path in self._folder.glob(f"*{SUFFIX}")]
        total = sum(status.st_size for status, _ in files)
        for status, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
            if total + size <= self._max_bytes or size > self._max_bytes:
                break
            if _removed(path):
                total -= status.st_size
        return total + size <= self._max_bytes

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other writers out; OSError where the file system has no locks."""
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def weight_files_in(folder: Path | None, max_bytes: int) -> WeightFiles | None:
    """The files of a folder, which may be none. ModelRefused."""
    return None if folder is None else WeightFiles(folder, max_bytes)


def _is_equal(handle: int, memory: torch.Tensor) -> bool:
    candidate = Region(len(memory))
    candidate.map_file(handle, len(memory))
    return torch.equal(candidate.bytes, memory)


def _removed(path: Path) -> bool:
    """Remove a file that no process maps."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def _system_mmap() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    integers = ctypes.c_int, ctypes.c_int, ctypes.c_int
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, *integers, ctypes.c_int64
    return function
