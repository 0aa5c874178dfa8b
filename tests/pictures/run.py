"""Sends pictures through the client, the gateway and a batch file, and kills a worker half-way.

The model is tiny and random; transformers' own `generate`, in float32 and with transformers' own
processor, says which tokens are right.
"""

import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from quire import Client
from service.worker.incoming.picture_process import _as_rgb
from tests.quire.picture_files import END, gif_header, png, png_header
from tests.service.builders import CHECKOUT, Queue
from tests.service.gateway.builders import GatewayProcess
from tests.service.picture_models import MODELS, library_processor, tokenizer
from tests.service.processes import HELD_WORKER, REAL_WORKER, WorkerProcess, killed_in_the_middle

NUM_TOKENS = 20
#: The tokens that the killed worker says.
HELD_AT = 8
CHATS = "/v1/chat/completions"
SAMPLING: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
#: Modes of Pillow's and formats, which come by turns.
KINDS = (
    *(("RGB", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("L", "PNG"), ("RGB", "JPEG")),
    *(("L", "JPEG"), ("RGB", "WEBP"), ("RGBA", "WEBP"), ("P", "GIF")),
)
#: Heights and widths, which come by turns: tiny, wide, high and larger than the model's own size.
SIZES = ((1, 1), (16, 16), (40, 70), (100, 30), (7, 300), (333, 222), (500, 900))


@dataclass
class Score:
    """What came of the run; `fault` is the first difference."""

    pictures: int = 0
    equal: int = 0
    resumed: int = 0
    refused: int = 0
    accepted_hostile: int = 0
    fault: str = ""

    @property
    def is_good(self) -> bool:
        return (
            self.equal == self.pictures > 0
            and self.resumed > 0
            and self.refused > 0 == self.accepted_hostile
        )


def score_of(name: str, count: int, *, redis_url: str) -> Score:
    """Runs `count` pictures with a model of the family `name`."""
    score = Score(pictures=count)
    queue = Queue.at(redis_url)
    files = [file_of(index) for index in range(count)]
    with tempfile.TemporaryDirectory() as made:
        folder = MODELS[name].save(Path(made) / name)
        model = ("--model", str(folder), "--pictures", "--dtype", "float32", "--device", "cpu")
        texts = expected_texts(name, folder, files)
        with Client(queue.url, queue=queue.name) as client:
            first = client.submit(messages=[message_of(0, files[0])], sampling=SAMPLING)
            killed_in_the_middle(
                queue, first.request_id, *model, tokens=HELD_AT, module=HELD_WORKER
            )
            with WorkerProcess(queue, *model, module=REAL_WORKER), GatewayProcess(queue) as gateway:
                own = [first]
                own += [
                    client.submit(messages=[message_of(index, files[index])], sampling=SAMPLING)
                    for index in range(3, count, 3)
                ]
                found = {3 * number: each.result(timeout=120) for number, each in enumerate(own)}
                score.resumed = sum(result.resumes > 0 for result in found.values())
                answers = {index: result.text for index, result in found.items()}
                for index in range(1, count, 3):
                    reply = gateway.ask("POST", CHATS, chat_of(index, files[index]))
                    answers[index] = reply.text_of_choice if reply.status == 200 else reply.text
                answers |= batch_of(name, queue, Path(made), files, range(2, count, 3))
                for hostile in hostile_parts():
                    reply = gateway.ask("POST", CHATS, {"messages": hostile, **SAMPLING})
                    is_refused = 400 <= reply.status < 500 and reply.error["param"]
                    score.refused += bool(is_refused)
                    score.accepted_hostile += not is_refused
                    if not is_refused:
                        score.fault = score.fault or f"accepted: {reply.status} {reply.text}"
    for index, text in enumerate(texts):
        score.equal += answers.get(index) == text
        if answers.get(index) != text:
            score.fault = score.fault or f"{index}: {answers.get(index)!r}, expected {text!r}"
    return score


def file_of(index: int) -> bytes:
    """The file of a picture of noise; format, mode and size differ from file to file."""
    height, width = SIZES[index % len(SIZES)]
    noise = np.random.default_rng(index).integers(0, 255, (height, width, 4), dtype=np.uint8)
    mode, form = KINDS[index % len(KINDS)]
    file = BytesIO()
    picture = Image.fromarray(noise, "RGBA")
    (picture if mode == "RGBA" else picture.convert("RGB").convert(mode)).save(file, form)
    return file.getvalue()


def text_of(index: int) -> str:
    return f"Picture {index}: what is it? "


def message_of(index: int, data: bytes) -> dict[str, Any]:
    """As the client takes it."""
    text = {"type": "text", "text": text_of(index)}
    return {"role": "user", "content": [text, {"type": "image", "image": data}]}


def chat_of(index: int, data: bytes) -> dict[str, Any]:
    """As OpenAI's API takes it."""
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    text = {"type": "text", "text": text_of(index)}
    return {"messages": [{"role": "user", "content": [text, part]}], **SAMPLING}


def batch_of(
    name: str, queue: Queue, folder: Path, files: Sequence[bytes], indices: Sequence[int]
) -> dict[int, str]:
    """The answers of `quire run-batch`, from the model `name`."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    lines = [
        {
            "custom_id": str(index),
            "method": "POST",
            "url": CHATS,
            "body": {"model": name, **chat_of(index, files[index])},
        }
        for index in indices
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "quire.cli", "run-batch", "-i", str(source), "-o", str(target)]
    where = ["--redis-url", queue.url, "--queue", queue.name]
    subprocess.run([*command, *where], cwd=CHECKOUT, check=True, timeout=240)
    found = map(json.loads, target.read_text().splitlines())
    return {
        int(line["custom_id"]): line["response"]["body"]["choices"][0]["message"]["content"]
        for line in found
    }


@torch.inference_mode()
def expected_texts(name: str, folder: Path, files: Sequence[bytes]) -> list[str]:
    """What transformers generates for each picture, with its own processor."""
    kind = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(MODELS[name].config)]
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    processor = library_processor(name, folder)
    texts = []
    for index, data in enumerate(files):
        parts = [{"type": "text", "text": text_of(index)}, {"type": "image"}]
        prompt = (
            MODELS[name]
            .wrapped()
            .apply_chat_template(
                [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
            )
        )
        rgb = np.asarray(_as_rgb(Image.open(BytesIO(data))))
        inputs = processor(
            text=[prompt], images=[[rgb]], return_tensors="pt", input_data_format="channels_last"
        )
        output = model.generate(
            **inputs, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
        )
        new = output[0, inputs["input_ids"].shape[1] :].tolist()
        texts.append(tokenizer().decode(new, skip_special_tokens=True))
    return texts


def hostile_parts() -> list[list[dict[str, Any]]]:
    """Messages that must be refused by field, at the door or by the worker."""

    def url(data: bytes) -> str:
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"

    urls = [
        *("", "nonsense", "data:", "data:image/png;base64,", "data:image/png;base64,%%%"),
        *("data:text/html;base64,PGI+", "https://127.0.0.1/a.png", "file:///etc/passwd"),
        url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
        url(b"BM" + bytes(60)),
        url(png()[:12]),
        url(png_header(60_000, 60_000)),
        url(gif_header(65_535, 65_535)),
        # Only decoding tells: no data, data that is cut, and a picture inside of nothing.
        url(png_header(64, 64) + END),
        url(png(64, 64)[:60]),
        url(gif_header(16, 16)),
    ]
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    good = {"type": "image_url", "image_url": {"url": url(png())}}
    parts += [
        {"type": "image_url", "image_url": {"url": url(png()), "detail": "high"}},
        {"type": "image_url", "image_url": "text"},
        {"type": "image", "sha256": "0" * 64},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    ]
    found = [[{"role": "user", "content": [part]}] for part in parts]
    found.append([{"role": "user", "content": [good] * 33}])
    asked = {"role": "user", "content": "Which?"}
    found.append([asked, {"role": "assistant", "content": [good]}, asked])
    return found
