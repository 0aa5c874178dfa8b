"""One worker of several models: each queue's outputs are those of a worker of its own."""

import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from service.shared.settings.sources import ConfigurationError
from service.worker.model.served import load_model
from service.worker.model.shelf import Shelf
from service.worker.process import chooser
from service.worker.process.chooser import Demand, Rules, next_model
from service.worker.settings.config import Settings
from service.worker.settings.presets import PRESETS
from service.worker.settings.several import settings_of_models
from tests.service.builders import Queue, WorkerThread, expected_tokens
from tests.service.fake_model import BOS_ID, EOS_ID, VOCAB_SIZE, StepGate, byte_tokenizer
from tests.service.fake_model import fake_model as load_fake

pytestmark = pytest.mark.usefixtures("frozen_again")

NAMES = ("small", "middle", "large")
RULES = Rules(stay_seconds=5.0, wait_seconds=10.0)
#: Enough for all: to drop one costs a collection of all garbage.
KEEPS_ALL = {"models_memory_bytes": 1 << 30}


@pytest.fixture
def queues(queue: Queue) -> dict[str, Queue]:
    """A queue for each model, all in one Redis."""
    return {name: Queue(queue.connection, url=queue.url) for name in NAMES}


@pytest.fixture
def table(queues: dict[str, Queue], tmp_path: Path) -> Path:
    """A table with a model for each queue; the sources are folders beside it."""
    path = tmp_path / "models.toml"
    path.write_text(
        "".join(
            f'[models.{name}]\nqueue = "{queue.name}"\nsource = "{tmp_path / name}"\n'
            for name, queue in queues.items()
        )
    )
    return path


def settings_for(queues: dict[str, Queue], table: Path, **own: Any) -> Settings:
    """The settings of a worker of all models, which switches as often as it can."""
    common = queues["small"].settings(**own)
    values = {name: getattr(common, name) for name in common.model_fields_set}
    del values["queue"], values["served_model_name"]
    often = {"switch_stay_seconds": 0.0, "switch_wait_seconds": 0.0}
    return Settings(**{**often, **values, "models_file": table})


def switches(worker: WorkerThread, *sources: str) -> float:
    """How often a model was taken from these sources; from any without."""
    name = "quire_worker_model_switches_total"
    return sum(
        worker.metric(name, model=model, source=source)
        for model in NAMES
        for source in sources or ("loaded", "kept")
    )


# -- the decision ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("demands", "case", "chosen"),
    [
        # Nothing waits elsewhere.
        ({"a": Demand(5, 60.0)}, {}, None),
        # The served model is idle: no stay, no wait, and the longest wait is first.
        ({"b": Demand(1, 0.1), "c": Demand(9, 0.2)}, {"has_work": False, "served_seconds": 0}, "c"),
        # It has requests in the queue, though none is here.
        ({"a": Demand(1, 0.1), "b": Demand(1, 0.1)}, {"has_work": False}, None),
        # Work here, and the other has not waited for long.
        ({"b": Demand(9, 9.9)}, {}, None),
        ({"b": Demand(9, 10.0)}, {}, "b"),
        # The stay comes before any wait.
        ({"b": Demand(9, 999.0)}, {"served_seconds": 4.9}, None),
        # A wait begins anew where this worker has been: the third one gets its turn.
        (
            {"b": Demand(1, 900.0), "c": Demand(1, 30.0)},
            {"left_seconds": {"b": 12.0, "c": 60.0}},
            "c",
        ),
    ],
)
def test_the_model_that_has_waited_longest_is_next(demands, case, chosen):
    known = {"a": Demand(), **demands}
    given = {"served_seconds": 6.0, "has_work": True, "left_seconds": {}} | case
    assert next_model("a", known, rules=RULES, **given) == chosen


# -- a worker -------------------------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What each look at the queues has chosen."""
    found: list[str | None] = []

    def look(*args: Any, **kwargs: Any) -> str | None:
        found.append(next_model(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(chooser, "next_model", look)
    return found


def step_between_looks(
    gate: StepGate, worker: WorkerThread, looks: list[str | None], condition: Callable[[], bool]
) -> None:
    """One step after each look, and as many as a chosen switch needs.

    Looks come by a clock. Steps that do not wait for them end the requests of a busy machine before
    the switches have come.
    """
    num_seen = 0

    def may_step() -> bool:
        nonlocal num_seen
        before, num_seen = num_seen, len(looks)
        num_chosen = sum(model is not None for model in looks)
        return num_seen > before or switches(worker) < num_chosen

    gate.step_until(condition, may_step=may_step)


def resumed(worker: WorkerThread) -> float:
    name = "quire_requests_resumed_total"
    return sum(worker.metric(name, model=model, fingerprint="same") for model in NAMES)


def test_requests_are_released_in_mid_sentence_and_go_on_at_the_next_token(queues, table, looks):
    gate = StepGate(steps=0)
    ids = {name: one.submit((1, 2), max_tokens=400) for name, one in queues.items()}
    settings = settings_for(queues, table, **KEEPS_ALL, switch_stay_seconds=0.2)
    with WorkerThread(settings, load=lambda known: load_fake(known, before_run=gate)) as worker:
        step_between_looks(gate, worker, looks, lambda: resumed(worker) >= 3)
        gate.open()
        outputs = {name: one.result(ids[name]) for name, one in queues.items()}
        released = sum(
            worker.metric("quire_requests_finished_total", model=name, outcome="released")
            for name in NAMES
        )
    whole = expected_tokens([1, 2], max_tokens=400)
    assert {name: out.token_ids for name, out in outputs.items()} == dict.fromkeys(NAMES, whole)
    assert {out.completion.model for out in outputs.values()} == set(NAMES)
    assert released >= 3
    assert worker.exit_code == 0


def test_an_idle_worker_switches_at_once_and_announces_each_model(queues, table):
    settings = settings_for(queues, table, **KEEPS_ALL, switch_wait_seconds=600.0)
    with WorkerThread(settings, load=load_fake) as worker:
        for name in ("large", "small", "large"):
            assert queues[name].result(queues[name].submit()).completion.model == name
        assert (switches(worker, "loaded"), switches(worker, "kept")) == (1, 2)
        assert worker.metric("quire_worker_models_loaded") == 2
        announced = {
            name: [info.model for info in one.broker.workers()] for name, one in queues.items()
        }
        assert announced == {name: [name] for name in NAMES}
        states = [worker.metric("quire_engine_state", model=name, state="ready") for name in NAMES]
        assert states == [0, 0, 1], "a worker counts once, with the model that it serves"


def test_a_model_with_work_is_not_left_before_its_time(queues, table):
    gate = StepGate(steps=0)
    settings = settings_for(queues, table, switch_stay_seconds=600.0)
    first = queues["small"].submit(max_tokens=500)
    with WorkerThread(settings, load=lambda known: load_fake(known, before_run=gate)) as worker:
        gate.step_until(lambda: queues["small"].published(first) >= 4)
        second = queues["large"].submit(max_tokens=5)
        gate.step_until(lambda: queues["small"].published(first) >= 40)
        assert switches(worker, "loaded") == 0
        gate.open()
        assert len(queues["large"].result(second).token_ids) == 5
        assert switches(worker, "loaded") == 1
    assert len(queues["small"].result(first).token_ids) == 500


def test_a_drain_in_the_middle_releases_all(queues, table, looks):
    gate = StepGate(steps=0)
    ids = {name: one.submit((3,), max_tokens=100) for name, one in queues.items()}
    settings = settings_for(queues, table, **KEEPS_ALL, drain_seconds=0.0)
    with WorkerThread(settings, load=lambda known: load_fake(known, before_run=gate)) as worker:
        step_between_looks(gate, worker, looks, lambda: switches(worker) >= 2)
        worker.worker.stop()
        gate.step_to_end_of(worker)
    assert worker.exit_code == 0
    for one in queues.values():
        assert one.connection.zcard(one.keys.lease) == 0
    with WorkerThread(settings_for(queues, table, **KEEPS_ALL), load=load_fake):
        whole = expected_tokens([3], max_tokens=100)
        assert all(queues[name].result(ids[name]).token_ids == whole for name in NAMES)


# -- memory ---------------------------------------------------------------------------------------


@pytest.fixture
def models(queues, table) -> dict[str, Settings]:
    made = settings_of_models(settings_for(queues, table, num_blocks=8))
    return {one.model_name: one for one in made}


def test_what_does_not_fit_is_dropped_and_its_memory_is_free(models, tmp_path):
    for name, megabytes in (("small", 1), ("middle", 2), ("large", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(megabytes << 20))
    loads: list[str] = []

    def load(settings: Settings) -> Any:
        loads.append(settings.model_name)
        served = load_fake(settings)
        gc.freeze()
        return served

    shelf = Shelf(load, budget_bytes=5 << 20)
    engines = {name: weakref.ref(shelf.take(models[name]).engine) for name in ("small", "middle")}
    assert len(shelf) == 2 and shelf.take(models["small"]).engine is engines["small"]()
    # Three megabytes beside one fit, beside three they do not: the one that was served last stays.
    shelf.take(models["large"])
    assert (shelf.holds("small"), shelf.holds("middle")) == (True, False)
    assert engines["middle"]() is None, "a frozen model would stay in memory for ever"
    assert engines["small"]() is not None
    assert loads == ["small", "middle", "large"]
    alone = Shelf(load, budget_bytes=None)
    alone.take(models["small"])
    alone.take(models["middle"])
    assert len(alone) == 1


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "given", "reason"),
    [
        ("settings = {max_num_seqz = 3}", {}, "max_num_seqz"),
        ('settings = {queue = "x"}', {}, "queue is a key of the entry"),
        ("settings = {max_num_seqs = 0}", {}, "max_num_seqs"),
        ("", {"served_models": ("smal",)}, "did you mean small"),
        ('[models.twin]\nqueue = "QUEUE"\nsource = "x"', {}, "same queue"),
    ],
)
def test_a_table_that_cannot_be_served_is_refused(queues, table, change, given, reason):
    table.write_text(table.read_text() + change.replace("QUEUE", queues["small"].name))
    with pytest.raises(ConfigurationError, match=reason):
        settings_of_models(settings_for(queues, table, **given))


def test_a_model_has_its_own_settings_and_those_of_the_worker(queues, table):
    table.write_text(table.read_text() + "settings = {max_num_seqs = 3}")
    made = settings_of_models(settings_for(queues, table, claim_batch=7))
    assert [one.model_name for one in made] == list(NAMES)
    assert [one.queue for one in made] == [one.name for one in queues.values()]
    assert [one.max_num_seqs for one in made][-1] == 3
    assert {one.claim_batch for one in made} == {7}
    chosen = settings_of_models(settings_for(queues, table, served_models=("large",)))
    assert [one.model_name for one in chosen] == ["large"]


def test_an_entry_chooses_a_preset_for_what_neither_it_nor_the_worker_sets(queues, table):
    one = table.read_text().splitlines()[:3]
    table.write_text("\n".join([*one, 'settings = {preset = "low-latency", max_num_seqs = 3}']))
    (made,) = settings_of_models(settings_for(queues, table, claim_batch=7))
    preset = PRESETS["low-latency"]
    assert preset.keys() >= {"max_num_seqs", "claim_batch", "max_prefill_tokens"}
    assert (made.max_num_seqs, made.claim_batch) == (3, 7)
    assert made.max_prefill_tokens == preset["max_prefill_tokens"]


@pytest.mark.parametrize("given", [{"burst": True}, {"model": "x"}, {"engine": "vllm"}])
def test_settings_of_one_model_are_refused_beside_a_table(queues, table, given):
    with pytest.raises(ValueError, match="models_file"):
        settings_for(queues, table, **given)


# -- three real models ----------------------------------------------------------------------------


def save_models(folder: Path) -> None:
    """Three models of different size with random weights; a token is a byte."""
    ids = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    wide = {"initializer_range": 0.3, "max_position_embeddings": 256, "num_attention_heads": 4}
    sizes = {
        "small": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
        "middle": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        "large": {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3},
    }
    for seed, (name, size) in enumerate(sizes.items()):
        transformers.set_seed(seed)
        config = transformers.LlamaConfig(**ids, **wide, **size, num_key_value_heads=2)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=byte_tokenizer(), bos_token="<bos>", eos_token="<eos>"
        ).save_pretrained(folder / name)


def traffic(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests for all models in a random order, greedy and sampled ones, with fixed seeds."""
    chance = random.Random(seed)
    return [
        (
            chance.choice(NAMES),
            {
                "prompt": tuple(chance.choices(range(1, 200), k=chance.randint(2, 40))),
                "max_tokens": chance.randint(20, 120),
                "temperature": chance.choice([0.0, 1.0]),
                "seed": number,
            },
        )
        for number in range(24)
    ]


def test_three_models_under_random_traffic_answer_as_each_does_alone(queues, table, tmp_path):
    save_models(tmp_path)
    small = {"num_blocks": 256, "device": "cpu", "max_num_seqs": 4, "claim_batch": 4}
    requests = traffic(seed=7)
    alone: list[Any] = []
    for name in NAMES:
        other = Queue(queues[name].connection, url=queues[name].url)
        own = other.settings(model=str(tmp_path / name), served_model_name=name, **small)
        with WorkerThread(own, load=load_model):
            ids = [other.submit(**body) for model, body in requests if model == name]
            alone += [(name, other.result(one).token_ids) for one in ids]
    settings = settings_for(queues, table, models_memory_bytes=20 << 20, **small)
    with WorkerThread(settings, load=load_model) as worker:
        ids = [(model, queues[model].submit(**body)) for model, body in requests]
        outputs = {one: queues[model].result(one, seconds=60) for model, one in ids}
        num_switches = switches(worker)
        num_resumed = resumed(worker)
    together = [(model, outputs[one].token_ids) for model, one in ids]
    assert sorted(together) == sorted(alone)
    assert num_switches >= 3 and num_resumed >= 3
    assert len(set(together)) == len(requests), "the control: no two answers are the same"
