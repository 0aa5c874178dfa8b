"""Cuts the append-only file of a dead Redis, as a crash does that loses what was not on disk."""

from pathlib import Path


def log_file(folder: Path) -> Path:
    """The file a server with its data in `folder` appends to."""
    # Redis 6 keeps one file; later ones a folder with a base and what was added to it.
    (found,) = [*folder.glob("appendonlydir/*.incr.aof"), *folder.glob("appendonly.aof")]
    return found


def cut(log: Path, size: int) -> None:
    """Cut an append-only file to `size` bytes, and then back to the last whole transaction.

    A server that loads a file which ends inside of a transaction leaves the beginning of it in the
    file, and the load after the next crash runs that half as a part of the next transaction. Such a
    server has not lost its tail, it has made one up; no client can mend that.
    """
    data = log.read_bytes()[:size]
    end = whole = 0
    is_open = False
    while (command := read_command(data, end)) is not None:
        name, end = command
        is_open = (is_open or name == b"MULTI") and name != b"EXEC"
        whole = whole if is_open else end
    with log.open("r+b") as file:
        file.truncate(whole)


def read_command(data: bytes, start: int) -> tuple[bytes, int] | None:
    """(name, end) of the command at `start` of an append-only file; None if it is not whole."""
    line_end = data.find(b"\r\n", start)
    if line_end < 0 or data[start : start + 1] not in (b"*", b"#"):
        return None
    if data[start : start + 1] == b"#":
        return b"", line_end + 2
    name, end = b"", line_end + 2
    for _ in range(int(data[start + 1 : line_end])):
        line_end = data.find(b"\r\n", end)
        if line_end < 0:
            return None
        begin = line_end + 2
        end = begin + int(data[end + 1 : line_end]) + 2
        if end > len(data):
            return None
        name = name or data[begin : end - 2].upper()
    return name, end
