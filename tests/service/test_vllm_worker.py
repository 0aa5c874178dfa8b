"""A worker around a fake of vLLM: what it does when a step fails, and what its metrics say."""

import functools
from collections.abc import Callable, Sequence

import pytest

from engine.errors import DeviceFailed
from engine.vllm.engine import VllmEngine
from ops.pages.metrics_page import ABSENT, IN_PART, WITHOUT_COUNTERPART
from service.worker.model.served import ServedModel
from service.worker.observe.register import REGISTER
from service.worker.settings.config import Settings
from tests.engine.vllm.fake_vllm import FakeVllm
from tests.service.builders import (
    PATIENCE_SECONDS,
    VOCAB_SIZE,
    Queue,
    WorkerThread,
    expected_tokens,
    fake_model,
)
from tests.service.fake_model import NEVER

#: What a fake model says by itself.
SAID = [id_ for id_ in range(VOCAB_SIZE) if id_ not in NEVER]


class Failing:
    """A step of vLLM that raises its error once each of the requests has published a token."""

    def __init__(self, queue: Queue, ids: Sequence[str]) -> None:
        self._queue, self._ids = queue, ids

    def __call__(self) -> None:
        if all(self._queue.published(request_id) >= 1 for request_id in self._ids):
            raise DeviceFailed("vLLM failed in a step: RuntimeError('out of memory')")


def loaded(settings: Settings, *, before_step: Callable[[], None] = lambda: None) -> ServedModel:
    """A fake model whose tokens are computed by a fake of vLLM."""
    served = fake_model(settings)
    backend = FakeVllm(512, 16, vocabulary=SAID, before_step=before_step)
    # `replace` would need a copy of the native engine.
    object.__setattr__(served, "engine", VllmEngine(served.engine.config, backend))
    return served


def test_an_error_in_a_step_of_vllm_ends_its_worker_and_no_request(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("service.worker.process.worker.LAST_COMMIT_SECONDS", PATIENCE_SECONDS)
    ids = [queue.submit((n,), max_tokens=300) for n in (4, 5)]
    load = functools.partial(loaded, before_step=Failing(queue, ids))
    with WorkerThread(queue.settings(lease_seconds=600.0), load=load) as worker:
        assert worker.wait() == 1
    for request_id in ids:
        status = queue.broker.status(request_id)
        assert (status.state, status.attempts) == ("queued", 0)
        assert status.published >= 1
    with WorkerThread(queue.settings()):
        outputs = [queue.result(id_) for id_ in ids]
    for n, output in zip((4, 5), outputs, strict=True):
        assert output.token_ids == expected_tokens((n,), max_tokens=300)
        assert output.completion.resumes == 1


def test_its_metrics_say_what_the_page_says_of_vllm(queue: Queue):
    known = {family.name: family for members in REGISTER.values() for family in members}
    assert {*ABSENT, *WITHOUT_COUNTERPART, *IN_PART} <= known.keys()
    ids = [queue.submit((n,), max_tokens=12) for n in (4, 5)]
    with WorkerThread(queue.settings(), load=loaded) as worker:
        for request_id in ids:
            queue.result(request_id)
    # Each step is counted after its outputs are on their way.
    families = {
        family.name: sum(
            sample.value for sample in family.samples if not sample.name.endswith("_created")
        )
        for family in worker.worker.metrics.registry.collect()
    }
    for name in WITHOUT_COUNTERPART:
        assert families[name.removesuffix("_total")] == 0, name
    assert not ABSENT.keys() & families.keys()
    assert worker.metric("quire_kv_cache_blocks", model="fake", state="cached") == 0
    computed = [
        worker.metric("quire_engine_computed_tokens_total", model="fake", kind=kind)
        for kind in ("prefill", "decode", "draft")
    ]
    assert computed == [0, 24, 0]
    assert worker.metric("quire_generation_tokens_total", model="fake") == 24
