"""Sends pictures through the client, the gateway and a batch file, and kills workers half-way.

The model is tiny and random; transformers' own `generate`, in float32 and with transformers' own
processor, says which tokens are right.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
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
from tests.pictures.addresses import Sites
from tests.pictures.hostile import Hostile, hostile_chats, odd_files, part_of
from tests.service.builders import CHECKOUT, Queue
from tests.service.gateway.builders import GatewayProcess
from tests.service.picture_models import MODELS, library_processor, tokenizer
from tests.service.processes import HELD_WORKER, REAL_WORKER, WorkerProcess, killed_in_the_middle

NUM_TOKENS = 20
#: The tokens that each killed worker says.
HELD_AT = 6
CHATS = "/v1/chat/completions"
SAMPLING: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
#: What a worker of each engine is told.
ENGINES = {
    "native": ("--device", "cpu"),
    "vllm": (
        *("--engine", "vllm", "--vllm", "enforce_eager=true", "--max-model-len", "2048"),
        *("--kv-cache-memory-bytes", str(64 << 20)),
    ),
}
#: The engines of the workers that are killed, one after the other, in the first answer, which the
#: worker of the run ends. So vLLM goes on with what the native engine has begun, and with its own.
KILLED = {"native": ("native",), "vllm": ("native", "vllm")}
#: The CPU time of the worker for the pictures of a request, far above what good ones take.
BOUNDS = ("--picture-decode-seconds", "1")
#: The most that a refusal may take by the clock, on a busy machine.
MOST_SECONDS = 30.0
#: Modes of Pillow's and formats, which come by turns.
KINDS = (
    *(("RGB", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("L", "PNG"), ("RGB", "JPEG")),
    *(("L", "JPEG"), ("RGB", "WEBP"), ("RGBA", "WEBP"), ("P", "GIF")),
)
#: Heights and widths, which come by turns: tiny, wide, high and larger than the model's own size.
SIZES = ((1, 1), (16, 16), (40, 70), (100, 30), (7, 300), (333, 222), (500, 900))


@dataclass
class Score:
    """What came of the run with a worker of `engine`.

    `resumed` are the answers in which a worker was killed, `changed_engine` those that vLLM ended
    and the native engine began. `fault` is the first difference. Hostile pictures that are
    `refused` are those with a field and the right reason; all others count as accepted.
    `asked_inside` are the requests that came to an address which must not be asked,
    `slowest_seconds` is the time of the slowest refusal.
    """

    engine: str = "native"
    pictures: int = 0
    equal: int = 0
    resumed: int = 0
    changed_engine: int = 0
    odd: int = 0
    odd_equal: int = 0
    refused: int = 0
    accepted_hostile: int = 0
    asked_inside: int = 0
    slowest_seconds: float = 0.0
    fault: str = ""

    @property
    def is_good(self) -> bool:
        return (
            self.equal == self.pictures > 0
            and self.resumed > 0
            and (self.changed_engine > 0) == (self.engine == "vllm")
            and self.odd_equal == self.odd > 0
            and self.refused > 0 == self.accepted_hostile
            and self.asked_inside == 0
            and self.slowest_seconds < MOST_SECONDS
        )


def score_of(name: str, count: int, *, redis_url: str, engine: str = "native") -> Score:
    """Runs `count` pictures with a model of the family `name`."""
    score = Score(engine, pictures=count)
    queue = Queue.at(redis_url)
    files = [file_of(index) for index in range(count)]
    with tempfile.TemporaryDirectory() as made:
        folder = MODELS[name].save(Path(made) / name)
        model = ("--model", str(folder), "--pictures", "--dtype", "float32")
        texts = expected_texts(name, folder, files)
        with Client(queue.url, queue=queue.name) as client:
            first = client.submit(messages=[message_of(0, files[0])], sampling=SAMPLING)
            for killed in KILLED[engine]:
                killed_in_the_middle(
                    queue,
                    first.request_id,
                    *model,
                    *ENGINES[killed],
                    tokens=HELD_AT,
                    module=HELD_WORKER,
                    is_fresh=killed == "vllm",
                )
            flags, is_fresh = (*model, *ENGINES[engine], *BOUNDS), engine == "vllm"
            with (
                WorkerProcess(queue, *flags, module=REAL_WORKER, is_fresh=is_fresh) as worker,
                Sites() as sites,
                GatewayProcess(queue, *sites.flags) as gateway,
            ):
                worker.wait_until_ready()
                own = [first]
                own += [
                    client.submit(messages=[message_of(index, files[index])], sampling=SAMPLING)
                    for index in range(3, count, 3)
                ]
                found = {3 * number: each.result(timeout=120) for number, each in enumerate(own)}
                score.resumed = sum(result.resumes > 0 for result in found.values())
                score.changed_engine = sum(
                    result.resumed_fingerprint_changed for result in found.values()
                )
                answers = {index: result.text for index, result in found.items()}
                for index in range(1, count, 3):
                    reply = gateway.ask("POST", CHATS, chat_of(index, files[index]))
                    answers[index] = reply.text_of_choice if reply.status == 200 else reply.text
                answers |= batch_of(name, queue, Path(made), files, range(2, count, 3))
                judge_odd(gateway, sites, score)
                for hostile in itertools.chain(hostile_chats(), sites.hostile()):
                    judge_refusal(gateway, hostile, score)
                score.asked_inside = sites.num_inside
    for index, text in enumerate(texts):
        score.equal += answers.get(index) == text
        if answers.get(index) != text:
            score.fault = score.fault or f"{index}: {answers.get(index)!r}, expected {text!r}"
    return score


def judge_odd(gateway: GatewayProcess, sites: Sites, score: Score) -> None:
    """Files that only look dangerous, and a picture at an address, are answered as plain ones."""
    pairs = [(odd.name, part_of(odd.data), part_of(odd.plain)) for odd in odd_files()]
    pairs.append(("address", sites.good_part, part_of(sites.good)))
    for name, *parts in pairs:
        replies = [
            gateway.ask("POST", CHATS, {"messages": [{"role": "user", "content": [p]}], **SAMPLING})
            for p in parts
        ]
        texts = [reply.text_of_choice if reply.status == 200 else "" for reply in replies]
        is_equal = bool(texts[0]) and texts[0] == texts[1]
        score.odd += 1
        score.odd_equal += is_equal
        if not is_equal:
            score.fault = score.fault or f"{name}: {[reply.text for reply in replies]}"


def judge_refusal(gateway: GatewayProcess, hostile: Hostile, score: Score) -> None:
    """It must be refused by a field, for its own reason."""
    began = time.monotonic()
    reply = gateway.ask("POST", CHATS, {"messages": hostile.messages, **SAMPLING})
    score.slowest_seconds = max(score.slowest_seconds, round(time.monotonic() - began, 1))
    is_refused = (
        400 <= reply.status < 500
        and reply.error["param"]
        and re.search(hostile.reason, reply.error["message"])
    )
    score.refused += bool(is_refused)
    score.accepted_hostile += not is_refused
    if not is_refused:
        score.fault = score.fault or f"{hostile.name}: {reply.status} {reply.text}"


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


def chat_of(index: int, data: bytes | None) -> dict[str, Any]:
    """As OpenAI's API takes it; without a picture if there is no data."""
    parts = [{"type": "text", "text": text_of(index)}]
    parts += [] if data is None else [part_of(data)]
    return {"messages": [{"role": "user", "content": parts}], **SAMPLING}


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
def expected_texts(name: str, folder: Path, files: Sequence[bytes | None]) -> list[str]:
    """What transformers generates for each picture, or for no picture, with its own processor."""
    kind = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(MODELS[name].config)]
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    processor = library_processor(name, folder)
    texts = []
    for index, data in enumerate(files):
        parts = [{"type": "text", "text": text_of(index)}]
        parts += [] if data is None else [{"type": "image"}]
        prompt = (
            MODELS[name]
            .wrapped()
            .apply_chat_template(
                [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
            )
        )
        given: dict[str, Any] = {}
        if data is not None:
            rgb = np.asarray(_as_rgb(Image.open(BytesIO(data))))
            given = {"images": [[rgb]], "input_data_format": "channels_last"}
        inputs = processor(text=[prompt], return_tensors="pt", **given)
        output = model.generate(
            **inputs, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
        )
        new = output[0, inputs["input_ids"].shape[1] :].tolist()
        texts.append(tokenizer().decode(new, skip_special_tokens=True))
    return texts
