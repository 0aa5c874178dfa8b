"""Runs batches over HTTP and reports the most memory that each process had.

Each batch has processes and a Redis of its own, so that a peak belongs to it. The model is that of
`run`, and transformers says which texts are right.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quire import LocalRedis
from tests.pictures.run import CHATS, chat_of, expected_texts
from tests.service.batcher.builders import ENDED, BatcherProcess, peak_bytes
from tests.service.builders import Queue, eventually
from tests.service.gateway.builders import GatewayProcess
from tests.service.picture_models import MODELS
from tests.service.processes import REAL_WORKER, WorkerProcess

#: Different pictures, which the lines have by turns, and their side in pixels: 250 kB of noise.
NUM_PICTURES, SIDE = 20, 288
#: The lines of the batch that the longest one is compared with.
NUM_LINES = 100
#: The most bytes by which a longer batch may raise a peak: less than a tenth of its pictures.
MOST_GROWTH = 16 << 20
#: The most time of a batch, in seconds.
PATIENCE_SECONDS = 900.0


@dataclass
class Peaks:
    """The most memory at once of each part of one batch, in bytes, and how many lines are right."""

    lines: int
    has_pictures: bool
    num_bytes: int = 0
    right: int = 0
    pictures_in_redis: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    fault: str = ""


@dataclass
class BatchScore:
    """A batch of texts, and two with pictures of which the last one is longer."""

    text: Peaks
    short: Peaks
    long: Peaks

    @property
    def growth(self) -> dict[str, int]:
        """By how much the longer batch raises each peak, in bytes."""
        return {name: most - self.short.peaks[name] for name, most in self.long.peaks.items()}

    @property
    def is_good(self) -> bool:
        return (
            all(one.right == one.lines > 0 for one in (self.text, self.short, self.long))
            and self.short.pictures_in_redis == self.long.pictures_in_redis > 0
            and max(self.growth.values()) < MOST_GROWTH
        )


def score_of_batches(name: str, num_lines: int) -> BatchScore:
    """Three batches with a model of the family `name`; the last has `num_lines`."""
    pictures = [_noise(index) for index in range(NUM_PICTURES)]
    with tempfile.TemporaryDirectory() as made:
        folder = MODELS[name].save(Path(made) / name)
        texts = [*expected_texts(name, folder, pictures), *expected_texts(name, folder, [None])]
        return BatchScore(
            _peaks_of(folder, num_lines, [None], texts[-1:]),
            _peaks_of(folder, NUM_LINES, pictures, texts[:-1]),
            _peaks_of(folder, num_lines, pictures, texts[:-1]),
        )


def _peaks_of(
    folder: Path, num_lines: int, pictures: Sequence[bytes | None], texts: Sequence[str]
) -> Peaks:
    """One batch, whose lines have these pictures by turns."""
    found = Peaks(num_lines, pictures[0] is not None)
    model = ("--model", str(folder), "--pictures", "--dtype", "float32", "--device", "cpu")
    with LocalRedis.start() as redis, tempfile.TemporaryDirectory() as files:
        queue = Queue.at(redis.url)
        with (
            WorkerProcess(queue, *model, module=REAL_WORKER) as worker,
            BatcherProcess(queue, Path(files)) as batcher,
            GatewayProcess(queue, "--files-folder", files) as gateway,
        ):
            worker.wait_until_ready()
            body = _form(_lines(folder.name, num_lines, pictures))
            kind = "multipart/form-data; boundary=b"
            file = gateway.ask("POST", "/v1/files", body, Content_Type=kind).body
            found.num_bytes = file["bytes"]
            given = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h"}
            batch = _ended(gateway, gateway.ask("POST", "/v1/batches", given).body)
            _judge(gateway, batch, texts, found)
            for process, name in ((gateway, "gateway"), (batcher, "batcher"), (worker, "worker")):
                found.peaks[name] = peak_bytes(process.process.pid)
            found.peaks["redis"] = queue.connection.info("memory")["used_memory_peak"]
            found.pictures_in_redis = len(queue.connection.keys("*:p:*"))
    return found


def _ended(gateway: GatewayProcess, batch: dict[str, Any]) -> dict[str, Any]:
    def look() -> Any:
        now = gateway.get(f"/v1/batches/{batch['id']}").body
        return now if now["status"] in ENDED else None

    ended: dict[str, Any] = eventually(look, "the end of the batch", seconds=PATIENCE_SECONDS)
    return ended


def _judge(
    gateway: GatewayProcess, batch: dict[str, Any], texts: Sequence[str], found: Peaks
) -> None:
    content = gateway.get(f"/v1/files/{batch['output_file_id']}/content").text
    lines = [json.loads(line) for line in content.splitlines()]
    answers = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }
    if len(lines) != len(answers):
        found.fault = "a line has two results"
        return
    for number in range(found.lines):
        text, expected = answers.get(str(number)), texts[number % len(texts)]
        found.right += text == expected
        if text != expected and not found.fault:
            found.fault = f"line {number}: {text!r}, expected {expected!r}; {batch}"


def _lines(name: str, num_lines: int, pictures: Sequence[bytes | None]) -> Iterator[bytes]:
    for number in range(num_lines):
        index = number % len(pictures)
        body = {"model": name, **chat_of(index, pictures[index])}
        line = {"custom_id": str(number), "method": "POST", "url": CHATS, "body": body}
        yield json.dumps(line).encode() + b"\n"


def _form(lines: Iterator[bytes]) -> Iterator[bytes]:
    """The form of an upload, in parts."""
    yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    yield from lines
    yield b"\r\n--b--\r\n"


def _noise(seed: int) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()
