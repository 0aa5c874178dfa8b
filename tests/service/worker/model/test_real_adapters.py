"""Adapters of a real model, through real processes and a real Redis, killed in the middle."""

from pathlib import Path

import pytest

from quire import Completion, RequestFailed
from quire.client.client import Client
from service.worker.settings.config import EMBEDDED_MODEL
from tests.chaos.adapters import SCALE, lay_out
from tests.engine.model.adapted import merged
from tests.service.builders import Queue
from tests.service.processes import HELD_WORKER, REAL_WORKER, WorkerProcess, killed_in_the_middle

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not (EMBEDDED_MODEL / "model.safetensors").exists(), reason="the model is not trained yet"
    ),
]
MAX_TOKENS = 160
#: Beyond its end the model says all kinds of things, another one with each adapter.
GREEDY = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
SAMPLED = {"max_tokens": MAX_TOKENS, "temperature": 0.9, "seed": 5, "ignore_eos": True}
PROMPT = tuple(b"12+34=")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "adapters"
    lay_out(folder, model=EMBEDDED_MODEL)
    return folder


def flags_with(adapters: Path) -> tuple[str, ...]:
    model = ("--model", str(EMBEDDED_MODEL), "--dtype", "float32", "--device", "cpu")
    return (*model, "--adapters", str(adapters))


def real_worker(queue: Queue, adapters: Path) -> WorkerProcess:
    return WorkerProcess(queue, *flags_with(adapters), module=REAL_WORKER)


def killed_half_way(queue: Queue, adapters: Path, request_id: str, *, tokens: int) -> None:
    """A worker that guesses ahead comes, says so many tokens of the request, and is killed."""
    flags = (*flags_with(adapters), "--num-speculative-tokens", "4")
    published = killed_in_the_middle(queue, request_id, *flags, tokens=tokens, module=HELD_WORKER)
    assert published < MAX_TOKENS


def test_a_worker_killed_in_the_middle_of_an_adapters_text_leaves_the_same_text(
    queue: Queue, adapters: Path
):
    """The one that is killed guesses ahead, the other does not; others run beside it."""
    with Client(queue.url, queue=queue.name) as client:
        handle = client.submit(PROMPT, sampling=SAMPLED, adapter="first")
        others = [client.submit(PROMPT, sampling=SAMPLED, adapter=a) for a in ("second", None)]
        killed_half_way(queue, adapters, handle.request_id, tokens=30)
        with real_worker(queue, adapters):
            interrupted = handle.result(timeout=90)
            beside = [other.result(timeout=90) for other in others]
            whole = client.submit(PROMPT, sampling=SAMPLED, model="abacus:first")
            undisturbed = whole.result(timeout=90)
    assert (interrupted.resumes, undisturbed.resumes) == (1, 0)
    assert len(undisturbed.token_ids) == MAX_TOKENS
    assert interrupted.token_ids == undisturbed.token_ids
    assert interrupted.text == undisturbed.text
    assert not interrupted.resumed_fingerprint_changed
    assert interrupted.model == undisturbed.model == "abacus:first"
    assert len({interrupted.token_ids, *(one.token_ids for one in beside)}) == 3


def test_what_it_says_is_what_transformers_says_with_the_adapter_in_its_weights(
    queue: Queue, adapters: Path
):
    size = 40
    with Client(queue.url, queue=queue.name) as client:
        asked = {
            name: client.submit(PROMPT, sampling=GREEDY | {"max_tokens": size}, adapter=name)
            for name in ("first", "second")
        }
        with real_worker(queue, adapters):
            told = {name: handle.result(timeout=90).token_ids for name, handle in asked.items()}
    for name, token_ids in told.items():
        oracle = merged(EMBEDDED_MODEL, adapters / name, SCALE)
        assert list(token_ids) == oracle.greedy(PROMPT, size), name
    assert told["first"] != told["second"]


def test_a_worker_with_other_weights_under_the_same_name_does_not_go_on(
    queue: Queue, adapters: Path, tmp_path: Path
):
    other = tmp_path / "adapters"
    other.mkdir()
    # What is named the same, and so much alike that nobody would see it in the tokens at once.
    (other / "first").mkdir()
    for file in (adapters / "first").iterdir():
        (other / "first" / file.name).write_bytes(file.read_bytes())
    config = (other / "first" / "adapter_config.json").read_text()
    (other / "first" / "adapter_config.json").write_text(config.replace("12.0", "12.5"))
    with Client(queue.url, queue=queue.name) as client:
        handle = client.submit(PROMPT, sampling=SAMPLED, adapter="first")
        free = client.submit(PROMPT, sampling=SAMPLED | {"max_tokens": 90})
        killed_half_way(queue, adapters, handle.request_id, tokens=10)
        with real_worker(queue, other):
            with pytest.raises(RequestFailed) as caught:
                handle.result(timeout=90)
            went_on: Completion = free.result(timeout=90)
    assert caught.value.code == "not_resumable"
    # Who asked for no adapter is served by any worker of the model.
    assert len(went_on.token_ids) == 90


def test_a_folder_that_cannot_be_computed_right_refuses_the_start(
    queue: Queue, adapters: Path, tmp_path: Path
):
    bad = tmp_path / "adapters" / "bad"
    bad.mkdir(parents=True)
    for file in (adapters / "first").iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    config = (bad / "adapter_config.json").read_text()
    (bad / "adapter_config.json").write_text(config.replace("{", '{"use_dora": true, ', 1))
    with real_worker(queue, tmp_path / "adapters") as worker:
        assert worker.wait() == 2
    (told,) = [line for line in worker.log if line["level"] == "critical"]
    assert str(bad) in told["reason"] and "use_dora" in told["reason"]
