"""A batch runs every line once, whatever is wrong with some of them, and whoever is killed."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quire import Broker, Client, RequestFailed
from quire.batch.files import BatchFileError
from quire.batch.run import MAX_LOSSES
from quire.testing.in_memory import FakeQuire, FakeWorker
from tests.quire.batch_folder import Folder, ask, waiting_for
from tests.quire.builders import Snapshot, claim_next, make_item

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).resolve().parents[3]


def chat(custom_id, content):
    body = {"model": "abacus", "messages": [{"role": "user", "content": content}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def echo(request):
    body = request.body
    text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    return text.upper()


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_chats_and_completions_come_back_in_the_format_of_openai(folder):
    folder.write(chat("c", "hello"), ask("p", "12+34="))
    with FakeQuire(answer=echo) as fake:
        progress = folder.run(fake.client())
    assert (progress.total, progress.completed, progress.ending) == (2, 2, "completed")
    assert folder.texts == {"c": "HELLO", "p": "12+34="}
    by_id = {line["custom_id"]: line for line in folder.results}
    result, response = by_id["c"], by_id["c"]["response"]
    assert result["id"].startswith("batch_req_") and result["error"] is None
    assert response["status_code"] == 200 and response["request_id"]
    assert response["body"]["object"] == "chat.completion"
    assert response["body"]["choices"][0]["message"]["role"] == "assistant"
    assert response["body"]["choices"][0]["finish_reason"] == "stop"
    assert response["body"]["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert by_id["p"]["response"]["body"]["object"] == "text_completion"
    assert folder.failures == []


def test_log_probabilities_are_in_the_responses_of_those_lines_that_ask(folder):
    chosen = chat("c", "hi")
    chosen["body"] |= {"logprobs": True, "top_logprobs": 2}
    folder.write(chosen, ask("p", "hi", logprobs=0), ask("q", "hi"), chat("d", "hi"))
    with FakeQuire(answer=echo) as fake:
        folder.run(fake.client())
    assert folder.texts == dict.fromkeys("cpqd", "HI")
    found = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["logprobs"]
        for line in folder.results
    }
    certain = {"token": "H", "logprob": 0.0, "bytes": [72]}
    assert found["c"]["content"][0] == certain | {"top_logprobs": [certain]}
    assert found["p"]["tokens"] == ["H", "I"]
    assert found["p"]["top_logprobs"] == [{"H": 0.0}, {"I": 0.0}]
    assert found["q"] is None and found["d"] is None


def test_the_line_that_the_document_shows_can_be_run(folder):
    (line,) = re.findall(r"```json\n(.*)\n```", (ROOT / "docs" / "how-to" / "batch.md").read_text())
    folder.write(line)
    with FakeQuire(answer=echo) as fake:
        folder.run(fake.client())
    assert folder.texts == {"row-1": "12+34="}


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("{not json", "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ("[1]", "invalid_json"),
        ({"url": "/v1/completions", "body": {"prompt": "x"}}, "invalid_custom_id"),
        (ask(7), "invalid_custom_id"),
        (ask("bad") | {"url": "/v1/translations"}, "invalid_url"),
        (ask("bad") | {"url": {}}, "invalid_url"),
        (ask("bad") | {"method": "GET"}, "invalid_method"),
        (ask("bad") | {"body": None}, "invalid_body"),
        (ask("bad") | {"session_id": "a b"}, "invalid_session_id"),
        (ask("bad") | {"session_id": 7}, "invalid_session_id"),
        (ask("bad", top_p=7), "invalid_request"),
        (ask("bad", best_of=7), "invalid_request"),
        (ask("bad", ""), "invalid_request"),
        (ask("bad", "x" * 2_000_000), "invalid_request"),
        (ask("fine"), "duplicate_custom_id"),
        ('{"custom_id": "\\ud800", "url": "\\ud800", "body": {}}', "invalid_url"),
    ],
)
def test_a_bad_line_fails_alone(folder, line, code):
    folder.write(ask("fine"), line, ask("also"))
    with FakeQuire(answer=echo) as fake:
        progress = folder.run(fake.broker)
    assert folder.texts == {"fine": "X", "also": "X"}
    assert [failure["error"]["code"] for failure in folder.failures] == [code]
    assert folder.failures[0]["response"] is None
    assert (progress.completed, progress.failed) == (2, 1)


def test_a_request_that_fails_is_a_line_of_the_error_file(folder):
    def answer(request):
        if request.body["prompt"] == "bad":
            raise RequestFailed("no_paper", "the tray is empty")
        return "good"

    folder.write(ask("a", "bad"), ask("b"))
    with FakeQuire(answer=answer) as fake:
        folder.run(fake.client())
    assert folder.texts == {"b": "good"}
    assert folder.failures[0]["error"] == {"code": "no_paper", "message": "the tray is empty"}


def test_no_more_requests_are_on_their_way_than_allowed(folder):
    folder.write(*(ask(f"r{index}") for index in range(20)))
    inflight = []
    with FakeQuire(answer=echo) as fake:
        folder.run(fake.client(), max_inflight=3, on_progress=lambda p: inflight.append(p.inflight))
    assert len(folder.results) == 20
    assert 0 < max(inflight) <= 3


def test_more_lines_than_one_read_takes_all_come_back(folder, monkeypatch):
    monkeypatch.setattr("quire.batch.run.READ_SIZE", 16)
    monkeypatch.setattr("quire.batch.open_lines.SUBMIT_SIZE", 8)
    folder.write(*(ask(f"r{index}", f"p{index}") for index in range(100)))
    with FakeQuire(answer=echo) as fake:
        folder.run(fake.client(), max_inflight=100)
    assert folder.texts == {f"r{index}": f"P{index}" for index in range(100)}


def test_the_shards_of_a_queue_share_a_batch(folder):
    folder.write(*(ask(f"r{index}", f"p{index}") for index in range(30)))
    with FakeQuire() as fake:
        brokers = [Broker(fake.connection, queue="sharded", shard=shard) for shard in range(2)]
        with FakeWorker(brokers[0], echo) as first, FakeWorker(brokers[1], echo) as second:
            folder.run(Client(fake.connection, queue="sharded", shards=2))
    assert folder.texts == {f"r{index}": f"P{index}" for index in range(30)}
    assert first.requests and second.requests


def test_a_second_run_of_the_same_batch_generates_nothing_again(folder):
    folder.write(ask("a", temperature=1), ask("b"))
    with FakeQuire(answer=echo) as fake:
        folder.run(fake.client())
        first = folder.texts
        folder.output.unlink()
        folder.run(fake.client())
        assert folder.texts == first
        assert len(fake.requests) == 2
        folder.output.unlink()
        folder.run(fake.client(), name="another batch")
        assert len(fake.requests) == 4


def test_a_line_without_a_seed_gets_the_same_one_in_every_run(folder):
    folder.write(ask("a"))
    seeds = []
    for _ in range(2):
        with FakeQuire(answer=echo) as fake:
            folder.run(fake.client())
            seeds.append(fake.requests[0].parse_body().sampling.seed)
        folder.output.unlink()
    assert seeds[0] == seeds[1] is not None


def test_results_that_are_there_are_not_written_over(folder):
    folder.write(ask("a"))
    with FakeQuire(answer=echo) as fake:
        folder.run(fake.client())
        before = folder.output.read_text()
        with pytest.raises(BatchFileError, match="resume"):
            folder.run(fake.client())
    assert folder.output.read_text() == before


def test_a_file_that_another_batch_writes_is_left_alone(folder):
    release = threading.Event()
    folder.write(ask("a"))
    with FakeQuire(answer=lambda request: release.wait(10) and "x") as fake:
        first = threading.Thread(target=folder.run, args=(fake.client(),))
        first.start()
        while not fake.requests:
            release.wait(0.001)
        with pytest.raises(BatchFileError, match="another batch"):
            folder.run(fake.client(), resume=True)
        release.set()
        first.join()
    assert folder.texts == {"a": "x"}


@pytest.mark.parametrize(
    ("which", "line"),
    [
        ("output", "nonsense"),
        ("output", '{"id": "a", "custom_id": "a", "error": {"code": "lost"}}'),
        ("errors", '{"id": "a", "custom_id": "a", "error": null}'),
        ("errors", '{"id": 1, "custom_id": "a", "error": {"code": "lost"}}'),
        ("errors", '{"id": "a", "custom_id": ["a"], "error": {"code": "lost"}}'),
        ("errors", '["id", "custom_id", "error"]'),
    ],
)
def test_a_file_that_has_other_lines_than_ours_is_left_as_it_is(folder, which, line):
    folder.write(ask("a"))
    file = getattr(folder, which)
    file.write_text(line + "\n")
    with FakeQuire(answer=echo) as fake, pytest.raises(BatchFileError, match=f"{file}:1 is not"):
        folder.run(fake.client(), resume=True)
    assert file.read_text() == line + "\n"


def test_a_file_of_requests_that_is_not_there_is_the_error_of_a_file(folder):
    with FakeQuire() as fake, pytest.raises(BatchFileError, match=r"in\.jsonl: No such file"):
        folder.run(fake.client())


def test_a_torn_last_line_is_cut_off_and_run_again(folder):
    folder.write(ask("a"), ask("b"), "nonsense")
    with FakeQuire(answer=echo) as fake:
        folder.run(fake.client())
        whole = folder.texts
        kept, torn = folder.output.read_text().splitlines(keepends=True)
        folder.output.write_text(kept + torn[: len(torn) // 2])
        progress = folder.run(fake.client(), resume=True)
    assert folder.texts == whole
    assert len(folder.results) == 2 and len(folder.failures) == 1
    assert (progress.completed, progress.failed) == (2, 1)


def test_what_redis_has_lost_is_submitted_again(folder, monkeypatch):
    monkeypatch.setattr("quire.batch.run.SILENT_SECONDS", 0.05)
    release = threading.Event()
    folder.write(ask("a", "slow"))
    with FakeQuire(answer=waiting_for(release)) as fake:
        runner = threading.Thread(target=folder.run, args=(fake.broker,))
        runner.start()
        while not fake.requests:
            release.wait(0.001)
        fake.connection.delete(*fake.broker.keys.of_request(fake.requests[0].id))
        release.set()
        runner.join(20)
    assert folder.texts == {"a": "begun"}


def test_what_redis_loses_again_and_again_fails_its_line(folder, monkeypatch):
    monkeypatch.setattr("quire.batch.run.SILENT_SECONDS", 0.02)
    folder.write(ask("a"))
    lost = []
    with FakeQuire() as fake:
        submit_messages = fake.broker.submit_messages

        def submit_and_lose(requests):
            answers = submit_messages(requests)
            lost.extend(request.id for request in requests)
            fake.connection.delete(*fake.broker.keys.of_request(lost[-1]))
            return answers

        monkeypatch.setattr(fake.broker, "submit_messages", submit_and_lose)
        folder.run(fake.broker)
    assert folder.codes == {"a": "lost"}
    assert lost == [lost[0]] * (1 + MAX_LOSSES)


def test_a_log_that_lost_what_was_read_is_read_again(folder, monkeypatch):
    monkeypatch.setattr("quire.batch.run.SILENT_SECONDS", 0.05)
    folder.write(ask("a"))
    with FakeQuire() as fake:
        runner = threading.Thread(target=folder.run, args=(fake.broker,))
        runner.start()
        while not sum(fake.broker.queue_depth().values()):
            runner.join(0.001)
        claim = claim_next(fake.broker).claim
        disk = Snapshot(fake.connection, fake.broker)
        fake.broker.commit([make_item(claim, 0, 3)])
        reads = fake.broker.read_output
        seen = threading.Event()

        def watched(positions, **options):
            if 3 in positions.values():
                seen.set()
            return reads(positions, **options)

        monkeypatch.setattr(fake.broker, "read_output", watched)
        assert seen.wait(20)
        disk.restore()
        fake.broker.commit([make_item(claim, 0, 2)])
        fake.broker.commit([make_item(claim, 2, 4, final=True)])
        runner.join(20)
    assert folder.texts == {"a": "abcd"}


def test_a_log_that_cannot_be_read_fails_its_own_line(folder):
    release = threading.Event()
    folder.write(ask("a", "slow"), ask("b", "slow"))
    with FakeQuire(answer=waiting_for(release)) as fake:
        runner = threading.Thread(target=folder.run, args=(fake.broker,))
        runner.start()
        while len(fake.requests) < 2:
            release.wait(0.001)
        log = fake.broker.keys.output(fake.requests[0].id)
        fake.connection.xadd(log, {"not": "ours"}, id="900-9")
        fake.connection.expire(log, 60)
        while not (folder.errors.exists() and folder.failures):
            release.wait(0.001)
        release.set()
        runner.join(20)
    assert list(folder.codes.values()) == ["protocol_error"]
    assert len(folder.results) == 1


def test_a_record_that_cannot_be_read_fails_its_own_line(folder, monkeypatch):
    monkeypatch.setattr("quire.batch.run.SILENT_SECONDS", 0.02)
    release = threading.Event()
    folder.write(ask("a"), ask("b"))
    with FakeQuire(answer=lambda _: "done" if release.wait(20) else "late") as fake:
        runner = threading.Thread(target=folder.run, args=(fake.broker,))
        runner.start()
        while len(fake.requests) < 2:
            release.wait(0.001)
        record = fake.broker.keys.request(fake.requests[0].id)
        fake.connection.hset(record, "deadline_ms", "not ours")
        while runner.is_alive() and not (folder.errors.exists() and folder.failures):
            runner.join(0.001)
        release.set()
        runner.join(20)
    assert list(folder.codes.values()) == ["protocol_error"]
    assert len(folder.results) == 1


def without_clock(results):
    for line in results:
        line["response"]["body"].pop("created")
    return sorted(results, key=lambda line: line["custom_id"])


_RUN_BATCH = """
import sys; from quire.batch import run_batch
url, queue, source, output, errors, resume = sys.argv[1:]
resume = bool(resume)
run_batch(url, source, output, errors_path=errors, queue=queue, resume=resume, max_inflight=30)
"""


@pytest.mark.real_redis
@pytest.mark.processes
def test_a_batch_that_was_killed_goes_on_inside_a_line_and_ends_as_if_nothing_was(
    real_server, real_broker, tmp_path
):
    """Killed with lines done, lines half published, and lines not begun."""
    release = threading.Event()

    def answer(request):
        yield f"half of {request.body['prompt']}, "
        if int(request.body["prompt"]) % 2:
            release.wait(30)
        yield "whole"

    folder = Folder(tmp_path)
    folder.write(*(ask(f"r{index}", str(index)) for index in range(40)))
    command = [
        *(sys.executable, "-c", _RUN_BATCH, real_server.url, real_broker.keys.queue),
        *(str(folder.input), str(folder.output), str(folder.errors)),
    ]
    with FakeWorker(real_broker, answer) as worker:
        runner = subprocess.Popen([*command, ""], cwd=ROOT)
        while not (folder.output.exists() and len(folder.results) >= 10):
            assert runner.poll() is None
            release.wait(0.002)
        runner.kill()
        runner.wait()
        killed_at = len(folder.results)
        release.set()
        subprocess.run([*command, "resume"], cwd=ROOT, check=True)
        interrupted = folder.results
        folder.output.unlink()
        subprocess.run([*command, ""], cwd=ROOT, check=True)
    assert 10 <= killed_at < 40
    assert len({line["custom_id"] for line in interrupted}) == len(interrupted) == 40
    assert without_clock(interrupted) == without_clock(folder.results)
    assert len(worker.requests) == 40, "no line was generated twice"
