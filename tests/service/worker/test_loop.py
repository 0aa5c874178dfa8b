"""The engine thread by itself: its mail, and what it does with what it cannot use."""

from dataclasses import replace
from typing import Any

import pytest

from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from quire.queue.request.claims import Claim
from service.worker.loop import EngineLoop
from service.worker.observe.metrics import Metrics
from service.worker.observe.vitals import Vitals
from service.worker.outgoing.completions import Origin
from service.worker.outgoing.delivery import Delivery
from service.worker.outgoing.outbox import Outbox
from service.worker.process.threads import Supervised, ThreadDied
from tests.service.builders import StepGate, eventually, fake_model, make_settings


class LoopUnderTest:
    """An engine loop with its outbox, and no Redis anywhere."""

    def __init__(self, **overrides: Any) -> None:
        self.gate = StepGate()
        self.outbox = Outbox()
        self.vitals = Vitals(stall_timeout_seconds=60.0)
        self.metrics = Metrics(model="fake", queue="q")
        self.deaths: list[ThreadDied] = []
        settings = make_settings("redis://unused", "q", **overrides)
        self.loop = EngineLoop(
            lambda: fake_model(settings, before_run=self.gate),
            self.outbox,
            vitals=self.vitals,
            metrics=self.metrics,
            on_loaded=lambda served: None,
        )
        self.thread = Supervised("engine", self.loop.run, report=self.deaths.append)

    def open(self, key: str) -> None:
        self.outbox.open(Delivery(key, Claim(key, 1, "o"), Origin(request_id=key, model="fake")))

    def end_of(self, key: str) -> str:
        """The reason in the record that waits to be published."""
        (reason,) = eventually(
            lambda: [
                item.completion.finish_reason
                for delivery, item in self.outbox.take(timeout=0.01)
                if item is not None and item.completion is not None and delivery.key == key
            ]
        )
        return str(reason)

    def num_violations(self) -> float:
        found = self.metrics.registry.get_sample_value(
            "quire_engine_violations_total", {"model": "fake"}
        )
        assert found is not None
        return found


@pytest.fixture(params=[{}])
def under_test(request: pytest.FixtureRequest):
    under_test = LoopUnderTest(**request.param)
    yield under_test
    under_test.gate.open()
    under_test.loop.stop()
    if under_test.thread.ident is not None:
        under_test.thread.join(20.0)
        assert not under_test.thread.is_alive()


def make_request(key: str, **others: Any) -> Request:
    return Request(key, [1, 2], SamplingParams(max_tokens=5), arrival_time=0.0, **others)


def test_a_request_given_up_while_it_is_in_the_mail_never_runs(under_test: LoopUnderTest):
    under_test.open("a")
    under_test.loop.add(make_request("a"))
    under_test.loop.abort("a", FinishReason.CANCELLED)
    under_test.thread.start()
    assert under_test.end_of("a") == "cancelled"
    assert under_test.gate.batches == []


class BrokenText:
    """A stream of text with a bug that published tokens bring out."""

    def append(self, token_id: int) -> bool:
        raise RuntimeError(f"no such token: {token_id}")

    def take_text(self, *, final: bool) -> str:
        return ""


def test_a_request_the_engine_cannot_take_in_fails_alone(under_test: LoopUnderTest):
    broken = make_request("a", output_token_ids=[3], text=BrokenText())
    under_test.open("a")
    under_test.open("b")
    under_test.loop.add(broken)
    under_test.loop.add(make_request("b"))
    under_test.thread.start()
    ends = {}

    def collect() -> bool:
        for delivery, item in under_test.outbox.take(timeout=0.01):
            if item is not None and item.completion is not None:
                ends[delivery.key] = str(item.completion.finish_reason)
        return len(ends) == 2

    eventually(collect)
    assert ends == {"a": "error", "b": "length"}
    assert under_test.deaths == []


def test_giving_up_what_nobody_knows_is_no_mistake(under_test: LoopUnderTest):
    under_test.thread.start()
    under_test.loop.abort("nobody", FinishReason.CANCELLED)
    under_test.open("a")
    under_test.loop.add(make_request("a"))
    assert under_test.end_of("a") == "length"


def test_an_idle_engine_goes_round_and_is_not_busy(under_test: LoopUnderTest):
    under_test.thread.start()
    under_test.open("a")
    under_test.loop.add(make_request("a"))
    assert under_test.end_of("a") == "length"
    eventually(lambda: not under_test.vitals.is_busy)
    assert under_test.vitals.seconds_since_pass < 20.0
    assert under_test.num_violations() == 0


@pytest.mark.parametrize("under_test", [{"check_invariants": False}], indirect=True)
def test_an_idle_engine_whose_books_are_broken_tells_so_and_lives_on(under_test: LoopUnderTest):
    under_test.thread.start()
    for key in ("a", "b", "c"):
        under_test.open(key)
        under_test.loop.add(make_request(key))
        assert under_test.end_of(key) == "length"
        if key == "a":
            eventually(lambda: not under_test.vitals.is_busy)
            engine = under_test.loop._engine
            assert engine is not None
            # A block that nobody's table holds.
            engine._scheduler.kv_cache.pool.allocate(1)
    eventually(lambda: under_test.num_violations() >= 1)
    assert under_test.deaths == []


@pytest.mark.parametrize("under_test", [{"check_invariants": False}], indirect=True)
def test_an_engine_that_goes_round_and_computes_nothing_makes_no_progress(
    under_test: LoopUnderTest,
):
    under_test.thread.start()
    engine = eventually(lambda: under_test.loop._engine)
    pool = engine._scheduler.kv_cache.pool
    pool.free(pool.allocate(pool.num_free)[:1])
    under_test.open("a")
    under_test.loop.add(Request("a", [1] * 40, SamplingParams(max_tokens=5), arrival_time=0.0))
    vitals = under_test.vitals
    eventually(lambda: vitals.is_busy and vitals.seconds_since_progress > 0.3)
    eventually(lambda: vitals.seconds_since_pass < 0.3, "it still goes round")
    assert under_test.gate.batches == []
    under_test.loop.abort("a", FinishReason.CANCELLED)
    assert under_test.end_of("a") == "cancelled"


def test_a_layer_of_an_encoder_is_progress(under_test: LoopUnderTest):
    """A step with a large picture may take longer than a stall."""
    followed: list[Any] = []
    served = replace(under_test.loop._load(), follow_encoder=followed.append)
    under_test.loop._load = lambda: served
    under_test.thread.start()
    assert eventually(lambda: followed) == [under_test.vitals.progressed]
