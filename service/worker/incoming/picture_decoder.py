"""Decodes pictures in a separate process, which dies in the worker's place. Knows no requests.

A file of some kilobytes may become gigabytes, and decoders of pictures have had faults that let a
file run code. The process has a CPU timer and a memory limit, and no setting of the worker. It is
started for the first picture, and again after each death.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from quire.errors import InvalidRequest
from quire.wire.pictures import MAX_PIXELS, must_not_be_much
from service.worker.bounded.process import (
    START_SECONDS,
    WALL_FACTOR,
    BoundedProcess,
    ProcessFailed,
    why_ended,
)

#: The module that the process runs.
PROCESS = "service.worker.incoming.picture_process"
#: Attempts for one picture if the process dies for another reason than its bounds.
TRIES = 2

#: The least CPU time for a picture, in seconds, if those before it took all of it.
LEAST_SECONDS = 0.01
#: The longest line of an answer.
MAX_LINE_BYTES = 1 << 12

_log = structlog.get_logger("service.worker.incoming.picture_decoder")


@dataclass(frozen=True, slots=True)
class Decoded:
    """The pixels of a picture: `height` rows of `width` pixels, each of a byte of R, G and B."""

    width: int
    height: int
    rgb: bytes


@dataclass(frozen=True, slots=True)
class _Head:
    """The line of an answer. Nobody knows what a file has made of the process: it is checked."""

    refusal: str
    width: int
    height: int
    cpu_seconds: float
    must_restart: bool

    @property
    def num_bytes(self) -> int:
        return 3 * self.width * self.height

    @property
    def is_possible(self) -> bool:
        """Whether it is a refusal without pixels, or a picture with some, within the limit."""
        sides = (self.width, self.height)
        if not all(isinstance(side, int) for side in sides) or not isinstance(self.refusal, str):
            return False
        if not isinstance(self.cpu_seconds, int | float) or not self.cpu_seconds >= 0:
            return False
        has_pixels = min(sides) > 0 and self.num_bytes <= 3 * MAX_PIXELS
        return sides == (0, 0) if self.refusal else has_pixels


class PictureDecoder:
    """Decodes pictures, one after the other.

    Only `interrupt` may be called from any thread; all other methods belong to one thread.

    Args:
        cpu_seconds: the most CPU time for all pictures of a request.
        memory_bytes: the most memory that decoding one may allocate.
        on_poll: called every POLL_SECONDS while this waits for the process.
    """

    def __init__(
        self,
        *,
        cpu_seconds: float,
        memory_bytes: int,
        on_poll: Callable[[], None] = lambda: None,
    ) -> None:
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self._process = BoundedProcess(PROCESS, on_poll=on_poll)

    def decode_all(
        self, files: Sequence[tuple[str, bytes]], *, factor: float = 1.0
    ) -> list[Decoded]:
        """The pixels of the first frame of each file, upright, on white where it is transparent.

        `files` are pairs of a field and the bytes; together they get `factor` times the CPU time.
        InvalidRequest names the field of a file that cannot be decoded within the bounds, those of
        a request included: not every request has come through a door of this version.
        ProcessFailed if nothing is known of it.
        """
        made: list[Decoded] = []
        left = self._cpu_seconds * factor
        num_bytes = num_pixels = 0
        for field, data in files:
            num_bytes += len(data)
            must_not_be_much(num_bytes, num_pixels, field)
            found, used = self._decode(
                field, data, cpu_seconds=max(left, LEAST_SECONDS), is_rest=bool(made)
            )
            num_pixels += found.width * found.height
            must_not_be_much(num_bytes, num_pixels, field)
            made.append(found)
            left -= used
        return made

    def _decode(
        self, field: str, data: bytes, *, cpu_seconds: float, is_rest: bool
    ) -> tuple[Decoded, float]:
        """One picture, and the CPU time that it took.

        `is_rest` says that `cpu_seconds` are what other pictures have left.
        """
        job = {
            "num_bytes": len(data),
            "max_pixels": MAX_PIXELS,
            "cpu_seconds": cpu_seconds,
            "memory_bytes": self._memory_bytes,
        }
        question = json.dumps(job).encode() + b"\n" + data
        failure = "was ended from outside, or did not answer"
        for _ in range(TRIES):
            try:
                is_new = self._process.start()
            except ProcessFailed as error:
                failure = str(error)
                continue
            wall_seconds = cpu_seconds * WALL_FACTOR + START_SECONDS * is_new
            try:
                answer = self._process.ask(question, is_whole=_is_whole, seconds=wall_seconds)
                if answer is not None:
                    return self._read(answer, field)
            except ProcessFailed:
                # Nobody knows what has become of it, or what else it will answer.
                self._process.end()
                raise
            code = self._process.end()
            if self._process.is_closed:
                break
            _log.warning("picture ended its process", field=field, exit_code=code)
            refusal = why_ended(
                code,
                cpu_seconds=round(cpu_seconds, 2),
                memory_bytes=self._memory_bytes,
                doing="decode after those before it" if is_rest else "decode",
            )
            if refusal:
                raise InvalidRequest(field, refusal)
        raise ProcessFailed(f"the process that decodes pictures {failure}")

    def interrupt(self) -> None:
        """Kill the process and start no other one; thread-safe. A waiting `decode` raises."""
        self._process.interrupt()

    def close(self) -> None:
        """Kill the process, start no other one, and wait until the killed one has ended."""
        self._process.close()

    @property
    def is_closed(self) -> bool:
        """Whether nothing is decoded any more."""
        return self._process.is_closed

    @property
    def process_id(self) -> int | None:
        """The id of the process; None if there is none."""
        return self._process.process_id

    def _read(self, answer: bytearray, field: str) -> tuple[Decoded, float]:
        told, begin = _head_of(answer)
        if len(answer) != begin + told.num_bytes:
            raise ProcessFailed("answers more bytes than pixels")
        if told.must_restart:
            self._process.end()
        if told.refusal:
            raise InvalidRequest(field, told.refusal)
        pixels = bytes(memoryview(answer)[begin:])
        return Decoded(told.width, told.height, pixels), told.cpu_seconds


def _is_whole(answer: bytearray) -> bool:
    """Whether the line is there, and as many pixels as it says."""
    if b"\n" not in answer[:MAX_LINE_BYTES]:
        return len(answer) >= MAX_LINE_BYTES
    told, begin = _head_of(answer)
    return len(answer) >= begin + told.num_bytes


def _head_of(answer: bytearray) -> tuple[_Head, int]:
    """The line of an answer, and where the pixels begin. ProcessFailed if it is not ours."""
    end = answer.find(b"\n", 0, MAX_LINE_BYTES) + 1
    try:
        told = _Head(**json.loads(answer[:end]))
    except (TypeError, ValueError) as error:
        raise ProcessFailed(f"answers something else: {error}") from error
    if not told.is_possible:
        raise ProcessFailed("answers something that was not asked for")
    return told, end
