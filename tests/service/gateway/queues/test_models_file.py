"""One gateway in front of several queues: the model of a call decides where it goes."""

import contextlib
import json

import openai
import pytest

from quire.testing.in_memory import FakeWorker
from service.shared.model_table import read_models
from service.shared.settings.sources import ConfigurationError
from tests.service.builders import eventually
from tests.service.gateway.builders import openai_client
from tests.service.gateway.front import CHAT

TABLE = """
[models.fake]
queue = "default"
aliases = ["fast"]

[models.large]
queue = "large"
aliases = ["best"]
max_open_answers = 1
"""


class Worker:
    """A worker of another queue of the same Redis, which announces one model."""

    def __init__(self, fake, queue: str, model: str, answer) -> None:
        self.broker = fake.make_broker(queue=queue)
        self.broker.ensure_groups()
        self.worker = FakeWorker(self.broker, answer, adapters=("sql",))
        self.requests = self.worker.requests
        self.broker.beat_worker("w", "ready", {}, model=model, adapters={"sql": "1"})


@pytest.fixture
def large(fake, script):
    with contextlib.ExitStack() as stack:
        other = Worker(fake, "large", "large", lambda request: [f"{p}!" for p in "abc"])
        stack.enter_context(other.worker)
        yield other


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "models.toml"
    path.write_text(TABLE)
    return path


@pytest.fixture
def gateway(start, large, table):
    return start(models_file=table)


def names(fake):
    return [request.body.get("model") for request in fake.requests]


def test_a_call_goes_to_the_queue_of_its_model(gateway, fake, large):
    small, other = gateway.complete(model="fake"), gateway.complete(model="large")
    assert (small.text_of_choice, small.body["model"]) == ("one two three", "fake")
    assert (other.text_of_choice, other.body["model"]) == ("a!b!c!", "large")
    assert (names(fake), names(large)) == (["fake"], ["large"])


def test_an_alias_is_its_model_also_with_an_adapter_and_in_a_stream(gateway, fake, large):
    assert gateway.complete(model="fast").body["model"] == "fake"
    assert gateway.complete(model="best:sql").body["model"] == "large:sql"
    with gateway.stream(model="best") as stream:
        events = stream.rest()
    assert "".join(event.text for event in events) == "a!b!c!"
    assert names(large) == ["large:sql", "large"], "the worker knows no alias"


def test_all_models_are_listed_with_aliases_and_adapters(gateway):
    listed = {one["id"]: one.get("alias_of") for one in gateway.get("/v1/models").body["data"]}
    assert listed == {
        "fake": None, "fast": "fake", "large": None, "large:sql": None, "best": "large",
    }  # fmt: skip
    assert gateway.get("/v1/models/best").body["alias_of"] == "large"
    assert gateway.get("/v1/models/other").status == 404


def test_what_no_worker_has_under_its_name_is_not_listed_and_the_operator_is_told(
    start, large, table, caplog
):
    # The queue of `other` has a live worker, which serves its model as `large`.
    table.write_text(TABLE + '\n[models.other]\nqueue = "large"\naliases = ["else"]\n')
    gateway = start(models_file=table)
    for _ in range(2):
        listed = [one["id"] for one in gateway.get("/v1/models").body["data"]]
    assert "large" in listed and not {"other", "else"} & {*listed}
    # Listed means callable, and nothing else is.
    statuses = {name: gateway.complete(model=name).status for name in (*listed, "other", "else")}
    assert statuses == {**dict.fromkeys(listed, 200), "other": 404, "else": 404}
    told = [line for line in caplog.messages if "cannot be called" in line]
    assert len(told) == 1 and "served_model_name" in told[0] and "other" in told[0]


def test_an_unknown_model_is_not_found_and_a_missing_one_is_named(gateway, fake, large):
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})):
        reply = gateway.ask("POST", path, {**body, "model": "lorge"})
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        assert "did you mean large?" in reply.error["message"]
        missing = gateway.ask("POST", path, body)
        assert (missing.status, missing.error["param"]) == (400, "model")
    assert not fake.requests and not large.requests


def test_a_model_has_a_limit_of_its_own_which_ends_with_the_answer(gateway, fake, large, script):
    large.worker._answer = script
    script.pieces = ["one ", None, "two"]
    with gateway.stream(model="large") as stream:
        stream.next()
        refused = gateway.complete(model="best")
        assert (refused.status, refused.error["code"]) == (429, "too_many_open_answers")
        assert "'large' has 1 answers open" in refused.error["message"]
        script.release.set()
        stream.rest()
    eventually(lambda: gateway.complete(model="large").status == 200, "the limit is free again")


def test_a_request_is_found_by_its_id_in_whichever_queue_has_it(start, large, table):
    first, second = start(models_file=table), start(models_file=table)
    made = first.complete(model="large")
    again = second.get(f"/v1/requests/{made.request_id}")
    assert (again.status, again.text_of_choice) == (200, "a!b!c!")
    with second.resume(made.request_id, "2") as stream:
        assert "".join(event.text for event in stream.rest()) == "b!c!"
    unknown = "req-" + "0" * 32
    assert second.get(f"/v1/requests/{unknown}").error["code"] == "unknown_request"


def test_a_key_finds_its_call_also_after_the_model_has_moved(start, fake, large, table):
    key = {"Idempotency-Key": "k"}
    first = start(models_file=table).complete(model="large", headers=key)
    table.write_text(TABLE.replace('queue = "large"', 'queue = "moved"'))
    with contextlib.ExitStack() as stack:
        # A gateway of the new table still knows the old queue by another model.
        table.write_text(table.read_text() + '\n[models.old]\nqueue = "large"\n')
        moved = Worker(fake, "moved", "large", lambda request: "never")
        stack.enter_context(moved.worker)
        gateway = start(models_file=table)
        again = gateway.complete(model="large", headers=key)
        assert (again.request_id, again.text_of_choice) == (first.request_id, "a!b!c!")
        other = gateway.complete(model="fake", headers=key)
        assert (other.status, other.error["code"]) == (422, "idempotency_key_reused")
        assert not moved.requests, "the control: without the search it would be computed again"
        assert gateway.complete(model="large").text_of_choice == "never"


def test_responses_continue_across_models(gateway, fake, large):
    with openai_client(gateway.url) as client:
        one = client.responses.create(model="best", input="x")
        assert (one.output_text, one.model) == ("a!b!c!", "large")
        two = client.responses.create(model="fake", input="y", previous_response_id=one.id)
        assert two.output_text == "one two three"
        assert client.responses.retrieve(one.id).output_text == "a!b!c!"
        messages = json.dumps(fake.requests[-1].body)
        assert "a!b!c!" in messages, "the other queue's answer is its context"
        client.responses.delete(one.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(one.id)


def test_a_table_without_a_model_for_a_chat_uses_the_only_one(start, large, tmp_path):
    path = tmp_path / "one.toml"
    path.write_text('[models.large]\nqueue = "large"\n')
    reply = start(models_file=path).ask(
        "POST", CHAT, {"messages": [{"role": "user", "content": "x"}]}
    )
    assert (reply.status, reply.body["model"]) == (200, "large")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[models]", "models: "),
        ("[models.a]", "models.a.queue: "),
        ('[models.a]\nqueue = "b c"', "models.a.queue: "),
        ('[models.a]\nqueue = "q"\nshard = 2', "models.a.shard: "),
        ('[models.a]\nqueue = "q"\naliases = ["a"]', "'a' also names 'a'"),
        (
            '[models.a]\nqueue = "q"\n[models.b]\nqueue = "q"\nshards = 2',
            "another number of shards",
        ),
        ("[models", "cannot read"),
    ],
)
def test_a_wrong_table_is_refused_by_its_entry(tmp_path, text, reason):
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="models_file: ") as refused:
        read_models(path)
    assert reason in str(refused.value)
