"""What the tests of batches over HTTP share: lines, their results, and batchers."""

import io
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI

from service.batcher.batcher import Batcher
from service.batcher.settings import BatcherSettings
from tests.service.builders import Queue, eventually, expected_tokens, text_of
from tests.service.processes import LoggedProcess

ENDPOINT = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
#: Short enough for quick takeovers, long enough to be renewed on a busy machine.
LEASE_SECONDS = 2.0


def line(custom_id: str, prompt: Any = (1, 2), **body: Any) -> dict[str, Any]:
    """A line of an input file."""
    body = {"prompt": list(prompt), "max_tokens": 6, "seed": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}


def lines_of_batch(num_lines: int) -> list[dict[str, Any]]:
    """Lines of different lengths."""
    return [line(f"row-{n}", max_tokens=n % 7 + 1) for n in range(num_lines)]


def wanted(num_lines: int) -> dict[str, str]:
    """What `results_of` gives for these lines."""
    return {f"row-{n}": expected_text(n % 7 + 1) for n in range(num_lines)}


def value_of(batcher: Batcher, name: str, **labels: str) -> float:
    """The value of one sample of a batcher."""
    value = batcher.metrics.registry.get_sample_value(f"quire_batcher_{name}", labels)
    assert value is not None
    return value


def expected_text(max_tokens: int = 6, prompt: tuple[int, ...] = (1, 2)) -> str:
    return text_of(expected_tokens(list(prompt), max_tokens=max_tokens))


def upload(openai: OpenAI, *lines: Any) -> str:
    """Upload these lines; returns the id of the file."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    data = "".join(f"{text}\n" for text in texts).encode()
    return openai.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch").id


def create(openai: OpenAI, *lines: Any, **others: Any) -> Any:
    """A batch of these lines."""
    fields = {"endpoint": ENDPOINT, "completion_window": "24h"} | others
    return openai.batches.create(input_file_id=upload(openai, *lines), **fields)


def ended(openai: OpenAI, batch_id: str) -> Any:
    """The batch, once it has ended."""

    def look() -> Any:
        batch = openai.batches.retrieve(batch_id)
        return batch if batch.status in ENDED else None

    return eventually(look, f"the end of {batch_id}", seconds=60)


def lines_in(openai: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a result file; none without a file."""
    if file_id is None:
        return []
    return [json.loads(text) for text in openai.files.content(file_id).text.splitlines()]


def results_of(openai: OpenAI, batch: Any) -> dict[str, Any]:
    """custom_id -> text or code of the error; fails if a line has two results."""
    outputs = lines_in(openai, batch.output_file_id)
    errors = lines_in(openai, batch.error_file_id)
    repeated = [name for name, n in names_of(outputs, errors).items() if n > 1]
    assert repeated == []
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in outputs}
    return texts | {one["custom_id"]: one["error"]["code"] for one in errors}


def names_of(*files: list[dict[str, Any]]) -> Counter[str]:
    return Counter(one["custom_id"] for file in files for one in file)


def settings_of(queue: Queue, folder: Path, **others: Any) -> BatcherSettings:
    values = {
        "redis_url": queue.url,
        "queue": queue.name,
        "files_folder": folder,
        "http_port": 0,
        "lease_seconds": LEASE_SECONDS,
        "poll_seconds": 0.05,
        "save_seconds": 0.2,
    }
    return BatcherSettings(**(values | others))


@contextmanager
def batcher_of(queue: Queue, folder: Path, **others: Any) -> Iterator[Batcher]:
    """A batcher inside the test."""
    batcher = Batcher(settings_of(queue, folder, **others))
    batcher.start()
    try:
        yield batcher
    finally:
        assert batcher.stop(), "a thread of the batcher does not end"


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had in use at once."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


class BatcherProcess(LoggedProcess):
    """`python -m service.batcher` in a process of its own, once it is ready."""

    def __init__(self, queue: Queue, folder: Path, *flags: str) -> None:
        where = ("--redis-url", queue.url, "--queue", queue.name, "--files-folder", str(folder))
        times = ("--lease-seconds", str(LEASE_SECONDS), "--poll-seconds", "0.05")
        super().__init__("service.batcher", *where, *times, "--save-seconds", "0.1", *flags)
        self.wait_for_event("batcher ready")
