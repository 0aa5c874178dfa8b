"""A real worker with a tiny encoder and a tiny decoder: the vectors of sentence-transformers."""

import pytest
import torch

from quire import Client
from service.worker.settings.config import Settings
from tests.engine.model.pooling.vector_models import save_vector_model
from tests.service.builders import Queue, eventually
from tests.service.processes import WorkerProcess

TEXTS = [" ".join(f"w{(7 * n + 3 * k) % 200}" for k in range(1 + 5 * n % 48)) for n in range(24)]
PROMPTS = {"prompts": {"query": "w1 w2 ", "document": ""}, "default_prompt_name": "document"}


@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_vectors_equal_those_of_sentence_transformers_after_a_kill(name, queue: Queue, tmp_path):
    sentence_transformers = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed (extra `bench`)"
    )
    folder = save_vector_model(name, tmp_path / "model", **PROMPTS)
    own = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    wanted = torch.from_numpy(own.encode(TEXTS))
    queries = torch.from_numpy(own.encode(TEXTS[:4], prompt_name="query"))
    flags = ("--model", str(folder), "--dtype", "float32", "--max-num-seqs", "2")
    module = "service"
    with Client(queue.url, queue=queue.name) as client:
        handles = client.submit_many([{"prompt": None, "input": text} for text in TEXTS])
        logs = [queue.keys.output(one.request_id) for one in handles]
        with WorkerProcess(queue, *flags, module=module) as worker:
            eventually(lambda: queue.connection.exists(*logs), "a first end", seconds=120)
            worker.kill()
        queue.take_all_away()
        with WorkerProcess(queue, *flags, module=module):
            found = [one.result(timeout=120).embedding for one in handles]
            asked = client.embed(TEXTS[:4], prompt_name="query", timeout=60)
            long = client.embed("w1 " * 200, truncate_prompt_tokens=-1, timeout=60)
    assert float((torch.tensor(found) - wanted).abs().max()) < 1e-5
    assert float((torch.tensor(asked) - queries).abs().max()) < 1e-5
    cut = torch.from_numpy(own.encode(["w1 " * 200]))
    assert float((torch.tensor(long) - cut).abs().max()) < 1e-5
    assert float((wanted[0] - wanted[1]).abs().max()) > 1e-2
    assert [queue.connection.xlen(log) for log in logs] == [1] * len(logs)


def test_the_task_is_one_of_two(tmp_path):
    assert Settings(task="embed").task == "embed"
    with pytest.raises(ValueError, match="task"):
        Settings(task="translate")
