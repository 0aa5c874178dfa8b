"""`python -m service --model <file>.gguf`: a real worker answers chats, whoever is killed."""

from pathlib import Path

import pytest

from models.fetch import MODELS
from quire.client.client import Client
from tests.engine.model.gguf_files import tiny_model, write_gguf
from tests.service.builders import Queue
from tests.service.processes import HELD_WORKER, REAL_WORKER, WorkerProcess, killed_in_the_middle

pytestmark = pytest.mark.processes

CHAT = [{"role": "user", "content": "Tell me how a lighthouse works, in five sentences."}]
SMOLLM2 = MODELS["smollm2"]
FILE = SMOLLM2.at_hand()


def flags_with(file: Path) -> tuple[str, ...]:
    return ("--model", str(file), "--dtype", "float32", "--device", "cpu")


def gguf_worker(queue: Queue, file: Path) -> WorkerProcess:
    return WorkerProcess(queue, *flags_with(file), module=REAL_WORKER)


def test_a_worker_serves_a_chat_from_a_file(queue: Queue, tmp_path):
    file = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    sampling = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    with Client(queue.url, queue=queue.name) as client, gguf_worker(queue, file):
        answer = client.submit(messages=CHAT, sampling=sampling).result(timeout=60)
        again = client.submit(messages=CHAT, sampling=sampling).result(timeout=60)
    assert len(answer.token_ids) == 20
    assert answer.token_ids == again.token_ids
    assert answer.model == "tiny.gguf"


@pytest.mark.skipif(
    FILE is None,
    reason=f"SmolLM2 is not at hand: run `make fetch-model`, or set {SMOLLM2.variable}",
)
@pytest.mark.timeout(600)
def test_a_worker_killed_in_mid_sentence_leaves_the_same_answer(queue: Queue):
    sampling = {"max_tokens": 40, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    with Client(queue.url, queue=queue.name) as client:
        handle = client.submit(messages=CHAT, sampling=sampling)
        told = killed_in_the_middle(
            queue, handle.request_id, *flags_with(FILE), tokens=10, module=HELD_WORKER
        )
        assert 10 <= told < 40
        with gguf_worker(queue, FILE):
            interrupted = handle.result(timeout=300)
            undisturbed = client.submit(messages=CHAT, sampling=sampling).result(timeout=300)
    assert (interrupted.resumes, undisturbed.resumes) == (1, 0)
    assert interrupted.token_ids == undisturbed.token_ids
    assert interrupted.text == undisturbed.text
    assert not interrupted.resumed_fingerprint_changed
    print(f"\nresumed answer, {len(interrupted.token_ids)} tokens: {interrupted.text!r}")
