"""Requests with an adapter: from the folder that it lies in to its caller, whoever was killed."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from engine.errors import ModelRefused
from quire.client.client import Client
from quire.queue.claim.claim import Claimed
from quire.wire.output import Completion
from service.worker.model.adapters import (
    MAX_ADAPTERS,
    adapters_in,
    fingerprint_with,
    is_same_adapter,
)
from service.worker.process.worker import EXIT_REFUSED
from service.worker.settings.config import Settings
from tests.quire.batch_folder import Folder, ask
from tests.service.builders import (
    Output,
    Queue,
    StepGate,
    WorkerThread,
    eventually,
    expected_tokens,
    fake_model,
    left_in_the_middle,
    text_of,
)

#: Two adapters, a revision of each.
ADAPTERS = {"polite": "1", "sql": "1"}
LONG_PROMPT = tuple(range(1, 50))


def worker(queue: Queue, **model: Any) -> WorkerThread:
    """One that has the adapters above, unless told otherwise."""
    return WorkerThread(queue.settings(), **{"adapters": ADAPTERS, **model})


def folder_of(tmp_path: Path, *names: str) -> Path:
    """A folder of adapters; what is in them is for the engine to read."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    for name in names:
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").touch()
    return folder


def error_of(completion: Completion) -> tuple[str, str | None]:
    assert completion.error is not None
    return completion.error.code, completion.error.field


def test_each_request_gets_the_adapter_that_it_asks_for_and_is_told_so(queue: Queue):
    asked: dict[str, dict[str, Any]] = {
        "the model": {},
        "the model by its name": {"model": "fake"},
        "an adapter": {"adapter": "sql"},
        "another one": {"adapter": "polite", "model": "fake"},
        "as OpenAI's callers say it": {"model": "fake:sql"},
    }
    ids = {name: queue.submit((1, 2), max_tokens=60, **body) for name, body in asked.items()}
    with worker(queue):
        found = {name: queue.result(request_id) for name, request_id in ids.items()}
    wanted = dict(zip(asked, (None, None, "sql", "polite", "sql"), strict=True))
    for name, adapter in wanted.items():
        expected = expected_tokens((1, 2), max_tokens=60, adapter=adapter)
        assert found[name].token_ids == expected, name
        assert found[name].completion.model == ("fake" if adapter is None else f"fake:{adapter}")
    assert len({output.token_ids for output in found.values()}) == 3
    queue.assert_at_rest()


@pytest.mark.parametrize(
    ("body", "field"), [({"adapter": "sqll"}, "adapter"), ({"model": "fake:sqll"}, "model")]
)
def test_what_a_worker_does_not_have_it_refuses_by_the_field_and_serves_the_others(
    queue: Queue, body: dict[str, str], field: str
):
    asked, free = queue.submit(**body), queue.submit((1, 2), max_tokens=5)
    with worker(queue):
        completion = queue.result(asked).completion
        assert queue.result(free).token_ids == expected_tokens((1, 2), max_tokens=5)
    assert error_of(completion) == ("invalid_request", f"body.{field}")
    assert completion.error is not None
    assert completion.error.message == "this worker has no adapter 'sqll'; did you mean sql?"
    assert (completion.finish_reason, completion.model) == ("rejected", "fake")


def test_a_worker_without_adapters_serves_no_request_for_one_with_the_model_alone(queue: Queue):
    asked = [queue.submit(adapter="sql"), queue.submit(model="fake:sql")]
    with WorkerThread(queue.settings()):
        fields = [error_of(queue.result(request_id).completion) for request_id in asked]
    assert fields == [("invalid_request", "body.adapter"), ("invalid_request", "body.model")]


def test_equal_prompts_share_their_blocks_within_an_adapter_only(queue: Queue):
    cached: dict[str | None, list[int]] = {None: [], "sql": [], "polite": []}
    with worker(queue):
        for adapter in (None, "sql", "polite", None, "sql", "polite"):
            request_id = queue.submit(LONG_PROMPT, adapter=adapter, max_tokens=2)
            usage = queue.result(request_id).completion.usage
            cached[adapter].append(usage.cached_tokens)
    assert cached == {None: [0, 48], "sql": [0, 48], "polite": [0, 48]}


def test_the_lines_of_a_batch_file_ask_for_adapters_by_the_name_of_a_model(
    queue: Queue, tmp_path: Path
):
    same = {"prompt": [1, 2], "max_tokens": 9, "seed": 0}
    folder = Folder(tmp_path)
    folder.write(
        ask("alone", **same, model="fake"),
        ask("adapted", **same, model="fake:sql"),
        ask("in our words", **same, adapter="polite"),
        ask("missing", **same, model="fake:terse"),
    )
    with worker(queue):
        folder.run(queue.broker)
    wanted = {"alone": None, "adapted": "sql", "in our words": "polite"}
    assert folder.texts == {
        name: text_of(expected_tokens((1, 2), max_tokens=9, adapter=adapter))
        for name, adapter in wanted.items()
    }
    models = {line["custom_id"]: line["response"]["body"]["model"] for line in folder.results}
    assert models == {"alone": "fake", "adapted": "fake:sql", "in our words": "fake:polite"}
    assert folder.codes == {"missing": "invalid_request"}


# -- takeovers ------------------------------------------------------------------------------------


def begun(queue: Queue, *, revision: str = "1", fingerprint: str = "fake-1", **body: Any) -> str:
    """A request with the adapter `sql` of which a worker has said a few tokens before it left."""
    request_id = queue.submit((5, 6, 7), max_tokens=100, adapter="sql", **body)
    gone_on(queue, request_id, revision=revision, fingerprint=fingerprint)
    return request_id


def gone_on(queue: Queue, request_id: str, *, revision: str, **model: Any) -> None:
    """A worker comes, adds tokens to a request, and leaves."""
    left_in_the_middle(queue, request_id, adapters={"sql": revision}, **model)


def ended(queue: Queue, request_id: str, *, revision: str = "1", **model: Any) -> Output:
    """The end that a worker with this revision of the adapter brings about."""
    with worker(queue, adapters={"sql": revision}, **model):
        return queue.result(request_id)


WHOLE = expected_tokens((5, 6, 7), max_tokens=100, adapter="sql")


def test_another_worker_with_the_adapter_goes_on_as_it_would_have_gone(queue: Queue):
    output = ended(queue, begun(queue))
    assert output.token_ids == WHOLE
    assert output.completion.resumes == 1
    assert not output.completion.resumed_fingerprint_changed


def test_another_revision_does_not_go_on_with_what_an_earlier_one_has_said(queue: Queue):
    request_id = begun(queue)
    published, gate = queue.published(request_id), StepGate()
    with capture_logs() as said:
        output = ended(queue, request_id, revision="2", before_run=gate)
    completion = output.completion
    assert error_of(completion) == ("not_resumable", None)
    assert (completion.state, completion.finish_reason) == ("failed", "error")
    assert output.token_ids == WHOLE[:published]
    assert gate.batches == []
    (line,) = [line for line in said if line["event"] == "not resumable"]
    assert (line["before"], line["here"]) == ("fake-1 sql=1", "fake-1 sql=2")
    queue.assert_at_rest()


def test_another_engine_with_the_same_revision_goes_on_and_that_is_recorded(queue: Queue):
    output = ended(queue, begun(queue), fingerprint="fake-2")
    assert output.token_ids == WHOLE
    assert output.completion.resumed_fingerprint_changed


def test_a_model_that_is_called_as_the_adapter_is_does_not_go_on_with_its_tokens(queue: Queue):
    request_id = queue.submit((5, 6, 7), max_tokens=100, model="fake:sql")
    gone_on(queue, request_id, revision="1")
    published, gate = queue.published(request_id), StepGate()
    settings = queue.settings(served_model_name="fake:sql")
    with WorkerThread(settings, fingerprint="fake-2", before_run=gate):
        output = queue.result(request_id)
    assert error_of(output.completion) == ("not_resumable", None)
    assert output.token_ids == WHOLE[:published]
    assert gate.batches == []


def test_a_worker_that_lacks_the_adapter_says_so_of_what_was_begun_with_it_too(queue: Queue):
    request_id = begun(queue)
    with worker(queue, adapters={"polite": "1"}):
        completion = queue.result(request_id).completion
    assert error_of(completion) == ("invalid_request", "body.adapter")


def test_who_claimed_first_and_said_nothing_has_decided_nothing(queue: Queue):
    """A worker with revision 1 died before its first token; those of revision 2 do not mind."""
    request_id = queue.submit((5, 6, 7), max_tokens=100, adapter="sql")
    entries = queue.broker.peek(count=1, block_seconds=0.0)
    (claimed,) = queue.broker.claim(entries, fingerprint="fake-1 sql=1")
    assert isinstance(claimed, Claimed)
    queue.take_away(request_id)
    gone_on(queue, request_id, revision="2")
    gone_on(queue, request_id, revision="2")
    assert queue.broker.status(request_id).fingerprint == "fake-1 sql=2"
    assert error_of(ended(queue, request_id, revision="1").completion) == ("not_resumable", None)


@pytest.mark.parametrize("recorded", [None, "fake-1"])
def test_tokens_of_which_nobody_has_said_what_they_are_from_are_not_gone_on_with(
    queue: Queue, recorded: str | None
):
    request_id = queue.submit((5, 6, 7), max_tokens=100, adapter="sql")
    queue.publish_by_hand(request_id, WHOLE[:1], fingerprint=recorded)
    assert error_of(ended(queue, request_id).completion) == ("not_resumable", None)


def test_a_request_without_an_adapter_is_recorded_as_ever(queue: Queue):
    request_id = queue.submit((1, 2), max_tokens=5)
    with worker(queue):
        assert queue.result(request_id).token_ids == expected_tokens((1, 2), max_tokens=5)
    assert queue.broker.status(request_id).fingerprint == "fake-1"


# -- at the start ---------------------------------------------------------------------------------


def test_the_adapters_of_a_folder_are_its_subfolders_that_are_one(tmp_path: Path):
    folder = folder_of(tmp_path, "sql", "polite-2.1_b", "..2024_11_03", ".hidden")
    (folder / "checkpoints").mkdir()
    (folder / "adapter_config.txt").touch()
    (folder / "linked").symlink_to(folder / ".hidden")
    found = adapters_in(folder)
    assert list(found) == ["linked", "polite-2.1_b", "sql"]
    assert found["sql"] == folder / "sql"
    assert adapters_in(None) == {}


def test_a_folder_that_cannot_be_meant_is_refused_by_a_sentence_that_names_it(tmp_path: Path):
    def refusal(folder: Path) -> str:
        with pytest.raises(ModelRefused) as caught:
            adapters_in(folder)
        return str(caught.value)

    folder = folder_of(tmp_path, "sql", "a b")
    assert f"{folder / 'a b'}: an adapter has the name of its folder" in refusal(folder)
    assert refusal(folder / "sql") == (
        f"adapters: {folder / 'sql'} is an adapter itself; name the folder that contains it"
    )
    assert "cannot read" in refusal(folder / "nowhere")
    assert "cannot read" in refusal(folder / "sql" / "adapter_config.json")


def test_more_adapters_than_a_worker_can_tell_of_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert MAX_ADAPTERS > 3
    monkeypatch.setattr("service.worker.model.adapters.MAX_ADAPTERS", 3)
    folder = folder_of(tmp_path, "a", "b", "c")
    assert len(adapters_in(folder)) == 3
    (folder / "d").mkdir()
    (folder / "d" / "adapter_config.json").touch()
    with pytest.raises(ModelRefused, match="has 4 adapters, and the limit is 3"):
        adapters_in(folder)


def test_a_worker_whose_adapters_are_refused_does_not_start(queue: Queue, tmp_path: Path):
    settings = queue.settings(adapters=tmp_path / "nowhere")
    with capture_logs() as said, WorkerThread(settings) as one:
        assert one.wait() == EXIT_REFUSED
    (line,) = [line for line in said if line["event"] == "worker cannot serve"]
    assert str(tmp_path / "nowhere") in line["reason"]


def test_a_worker_tells_the_registry_which_adapters_it_has_once_it_has_them(queue: Queue):
    gate = StepGate()

    def load_late(settings: Settings) -> Any:
        gate.wait_for_arrival()
        return fake_model(settings, adapters=ADAPTERS)

    with (
        WorkerThread(queue.settings(), load=load_late),
        Client(queue.url, queue=queue.name) as client,
    ):
        assert eventually(client.adapters) == {"fake": []}
        gate._has_arrived.set()
        eventually(lambda: client.adapters() == {"fake": ["polite", "sql"]})
        (info,) = queue.broker.workers()
        assert info.adapters == ADAPTERS
        assert all(isinstance(value, int | float) for value in info.load.values())


def test_a_worker_that_starts_tells_the_names_of_its_adapters(queue: Queue, tmp_path: Path):
    """Its model is told, and asked for; whoever asks for an adapter of it must not be refused."""
    gate = StepGate()

    def load_late(settings: Settings) -> Any:
        gate.wait_for_arrival()
        return fake_model(settings, adapters=ADAPTERS)

    settings = queue.settings(adapters=folder_of(tmp_path, "polite", "sql"))
    with WorkerThread(settings, load=load_late), Client(queue.url, queue=queue.name) as client:
        assert eventually(client.adapters) == {"fake": ["polite", "sql"]}
        (info,) = queue.broker.workers()
        assert (info.state, set(info.adapters.values())) == ("loading", {""})
        gate._has_arrived.set()
        eventually(lambda: queue.broker.workers()[0].adapters == ADAPTERS)


def test_a_variable_without_a_value_is_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIRE_ADAPTERS", "")
    assert Settings.load([]).adapters is None
    monkeypatch.setenv("QUIRE_ADAPTERS", "somewhere")
    assert Settings.load([]).adapters == Path("somewhere")


def test_fingerprints_are_of_one_adapter_where_name_and_revision_are_the_same():
    first = fingerprint_with("engine-1", "sql", revision="1")
    assert is_same_adapter(first, fingerprint_with("engine-2", "sql", revision="1"))
    assert not is_same_adapter(first, fingerprint_with("engine-1", "sql", revision="2"))
    assert not is_same_adapter(first, fingerprint_with("engine-1", "sq", revision="1"))
    assert not is_same_adapter("engine-1", first)
    assert not is_same_adapter(first, "engine-1")
    assert not is_same_adapter("", first)
    assert is_same_adapter("engine-1", "engine-2")
    assert is_same_adapter("", "engine-1")
    # Of an engine that is not ours.
    assert is_same_adapter("some engine 1", "some engine of=2 ago")
