"""The `quire` command: data on stdout, exit codes as documented, and nothing heavy loaded."""

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quire import DeadlineExceeded, GenerationRequest, RequestFailed
from quire.cli.bench import Sample, figures_of, percentile
from quire.cli.run_batch import remaining_seconds
from quire.cli.verbs import VERBS
from quire.testing.in_memory import FakeWorker
from tests.quire.builders import make_request

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]

ROOT = Path(__file__).resolve().parents[3]


def echo(request):
    body = request.body
    text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    if text == "fail":
        raise RequestFailed("no_paper", "the tray is empty")
    if text == "late":
        raise DeadlineExceeded("late", "late")
    return [*text] if isinstance(text, str) else "ids"


@pytest.fixture
def worker(real_broker, monkeypatch):
    # It signs no registry: where a busy machine lets it answer after a second, a wait would say so.
    monkeypatch.setattr("quire.transport.patience.NOTE_SECONDS", 60.0)
    with FakeWorker(real_broker, echo) as worker:
        yield worker


def records(output):
    return [json.loads(line) for line in output.splitlines()]


def test_help_names_every_verb_and_loads_nothing_heavy():
    program = (
        "import sys, quire.cli\n"
        "try: quire.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'fakeredis', 'rich', 'service', 'asyncio'}\n"
        "heavy |= {'redis', 'pydantic', 'msgpack', 'quire.errors', 'quire.batch'}\n"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert all(f"  {verb.name} " in done.stdout for verb in VERBS)


def test_nothing_is_loaded_before_interruptions_are_expected():
    program = (
        "import sys\n"
        "import importlib, typing\n"
        "known = set(sys.modules)\n"
        "import quire.cli\n"
        "print(*sorted(set(sys.modules) - known))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["__future__", "quire", "quire.cli"]


#: `local` prints what its server logs.
@pytest.mark.parametrize(
    "verb", [verb.name for verb in VERBS if not verb.passes_on and verb.name != "local"]
)
def test_every_verb_explains_itself_and_speaks_json(quire, verb):
    code, out, _ = quire(verb, "--help")
    assert code == 0
    if verb in ("queue", "dead"):
        _, out, _ = quire(verb, {"queue": "resume", "dead": "ls"}[verb], "--help")
    assert "--json" in out


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["submit"], ["dead"], ["result"], ["status", "--what"]]
)
def test_a_wrong_command_line_is_exit_code_2(quire, arguments):
    code, out, err = quire(*arguments)
    assert (code, out) == (2, "")
    assert "usage" in err


def test_a_wrong_request_is_exit_code_2_and_names_the_field(quire):
    code, out, err = quire("submit", "x", "--top-p", "7")
    assert (code, out) == (2, "")
    assert "sampling.top_p" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["top", "--interval", "-1"],
        ["result", "a", "--timeout", "nan"],
        ["drain", "w", "--timeout", "inf"],
        ["submit", "x", "--metadata", "{bad"],
        ["submit", "x", "--metadata", "[]"],
        ["status", "--shards", "0"],
        ["bench", "--dataset", "no-such-file"],
        ["bench", "--dataset", __file__],
        ["bench", "--metric-percentiles", "50,all"],
        ["bench", "--metric-percentiles", "101"],
    ],
    ids=" ".join,
)
def test_a_value_that_cannot_be_right_is_exit_code_2_and_one_sentence(quire, arguments):
    code, out, err = quire(*arguments)
    assert (code, out) == (2, "")
    assert "error: " in err and "Traceback" not in err


def test_a_server_that_is_not_there_is_exit_code_1(quire):
    code, out, err = quire("submit", "x", "--redis-url", "redis://127.0.0.1:1/0")
    assert (code, out) == (1, "")
    assert "Error" in err and "Traceback" not in err


def test_submit_prints_ids_that_result_tail_and_inspect_take(quire, worker):
    code, out, err = quire("submit", "abc", "--metadata", '{"row": 1}', "--priority", "high")
    request_id = out.strip()
    assert (code, err) == (0, "")
    assert quire("result", request_id) == (0, "abc\n", "")
    assert quire("tail", request_id, "--after", "1") == (0, "bc\n", "")
    (completion,) = records(quire("result", request_id, "--json")[1])
    assert (completion["text"], completion["metadata"]) == ("abc", {"row": 1})
    assert completion["state"] == "completed"
    chunks = records(quire("tail", request_id, "--json")[1])
    assert [chunk.get("text") for chunk in chunks] == ["a", "b", "c", None]
    (found,) = records(quire("inspect", request_id, "--json")[1])
    assert (found["priority"], found["published"], found["log_entries"]) == ("high", 3, 4)
    assert found["completion"]["finish_reason"] == "eos"
    # The completion has none of its own: `result` puts the chunks together.
    assert not {"text", "token_ids"} & found["completion"].keys()
    assert "text" not in found and 0 < found["expires_seconds"] <= 3600


def test_the_trace_of_the_caller_goes_with_the_request(quire, real_broker, monkeypatch):
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    monkeypatch.setenv("TRACEPARENT", header)
    quire("submit", "x", "--id", "a")
    (found,) = records(quire("inspect", "a", "--json")[1])
    assert found["request"]["headers"] == {"traceparent": header}


@pytest.mark.parametrize(
    ("piped", "prompt"),
    [(b"a\rb\r\nc\r\n", "a\rb\r\nc"), (b"a\r\n", "a"), (b"a\r", "a\r"), (b"a\n\n", "a\n")],
)
def test_a_prompt_from_stdin_keeps_its_characters_but_for_the_line_end_behind_it(
    quire, monkeypatch, piped, prompt
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped), encoding="utf-8"))
    code, out, _ = quire("submit", "-")
    found = json.loads(quire("inspect", out.strip(), "--content", "--json")[1])
    assert (code, found["request"]["body"]["prompt"]) == (0, prompt)


def test_submit_reads_stdin_follows_and_waits(quire, worker, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    assert quire("submit", "-", "--follow") == (0, "from stdin\n", "")
    assert quire("submit", "--chat", "hi", "--wait") == (0, "hi\n", "")
    assert worker.requests[1].kind == "chat.completions"


def test_the_tokens_of_the_prompt_are_in_what_json_shows(quire, worker):
    (found,) = records(quire("submit", "ab", "--prompt-logprobs", "0", "--wait", "--json")[1])
    assert [(one["text"], one["logprob"]) for one in found["prompt_tokens"]] == [
        ("a", None),
        ("b", 0.0),
    ]


def test_the_prompt_of_a_request_is_shown_only_when_asked_for(quire, real_broker):
    real_broker.submit(make_request(id="a", kind="completions", body={"prompt": "secret"}))
    assert "secret" not in quire("inspect", "a")[1]
    assert "secret" in quire("inspect", "a", "--content")[1]


@pytest.mark.parametrize(
    ("prompts", "code"), [(["a", "b"], 0), (["a", "fail"], 3), (["fail", "late"], 1)]
)
def test_some_failures_are_exit_code_3_and_only_failures_1(quire, worker, prompts, code):
    found, _, err = quire("submit", "--wait", *prompts)
    assert found == code
    assert err.count("error:") == sum(prompt != "a" and prompt != "b" for prompt in prompts)


def test_waiting_too_long_is_exit_code_1(quire, real_broker):
    real_broker.submit(make_request(id="a"))
    code, out, err = quire("result", "a", "--timeout", "0.01")
    assert (code, out) == (1, "") and "not ended" in err


def test_a_queue_is_paused_and_resumed(quire, real_broker):
    assert quire("queue", "pause", "rebuild")[1].split() == [
        real_broker.keys.queue, "paused", "rebuild",
    ]  # fmt: skip
    assert "PAUSED" in quire("status")[1]
    (state,) = records(quire("queue", "resume", "--json")[1])
    assert state["paused"] is False


def test_what_waits_too_long_is_ended_without_a_worker(quire, real_broker, real_connection):
    real_broker.submit_many([make_request(id="late"), make_request(id="young")])
    real_connection.zadd(real_broker.keys.wait, {"late": 1})
    assert quire("queue", "expire")[:2] == (0, "late  expired\n")
    assert quire("queue", "expire", "--json")[:2] == (0, "")
    assert real_broker.status("young").state == "queued"


def test_schema_prints_the_request_a_client_sends(quire):
    (schema,) = records(quire("schema")[1])
    assert set(schema["required"]) == {"kind", "body"}
    assert set(GenerationRequest.model_fields) == set(schema["properties"])
    (sampling,) = records(quire("schema", "sampling", "--json")[1])
    assert sampling["properties"]["top_p"]["default"] == 1.0


def test_bench_measures_a_queue(quire, worker, tmp_path):
    saved = tmp_path / "figures.json"
    code, out, _ = quire(
        "bench", "--num-prompts", "20", "--max-concurrency", "5", "--goodput", "e2el:60000",
        "--save-result", str(saved), "--json",
    )  # fmt: skip
    figures = json.loads(out)
    assert code == 0
    assert (figures["completed"], figures["output_tokens"]) == (20, 60)
    assert figures["prompt_tokens"] == 20 * 32
    assert 0 < figures["ttft"]["p50"] <= figures["e2el"]["p99"]
    assert json.loads(saved.read_text()) == figures


def test_a_line_of_a_dataset_ends_at_a_line_feed_only(quire, worker, tmp_path):
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_bytes('{"prompt":\r "a\u2028\x85b"}\r\n\n{"prompt": "c"}'.encode())
    code, out, _ = quire("bench", "--num-prompts", "2", "--dataset", str(dataset), "--json")
    assert (code, json.loads(out)["completed"]) == (0, 2)


def test_bench_says_how_many_failed(quire, worker, tmp_path):
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "fine"}\n{"prompt": "fail"}\n')
    code, out, err = quire("bench", "--num-prompts", "4", "--dataset", str(dataset))
    assert code == 3
    assert ["completed", "2"] in [line.split() for line in out.splitlines()]
    assert "2 failed" in err and "no_paper" in err


@pytest.mark.parametrize("of_a_file", [False, True])
def test_bench_asks_for_an_adapter(quire, real_broker, tmp_path, of_a_file):
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "x"}\n')
    command = ["bench", "--num-prompts", "2", *(["--dataset", str(dataset)] if of_a_file else [])]
    asked = []

    def answer(request):
        asked.append(request.body.get("adapter"))
        return "x"

    with FakeWorker(real_broker, answer, adapters=["sql"]):
        assert quire(*command, "--adapter", "sql")[0] == 0
        assert quire(*command)[0] == 0
        code, _, err = quire(*command, "--adapter", "sqll")
    assert code == 1 and "no adapter 'sqll'" in err
    assert asked == ["sql", "sql", None, None]


def test_the_figures_of_a_run_are_these():
    sample = Sample(began=0.0, num_prompt_tokens=3, num_tokens=5, first=1.0, last=3.0, ended=4.0)
    sample.gaps = [0.5] * 4
    failed = Sample(began=0.0, ended=1.0, error="no")
    figures = figures_of([sample, failed], 10.0, percentiles=[50], goals={"ttft": 1000.0})
    assert (figures["completed"], figures["failed"]) == (1, 1)
    assert figures["ttft"] == {"mean": 1000.0, "p50": 1000.0}
    assert figures["tpot"] == {"mean": 500.0, "p50": 500.0}
    assert figures["itl"]["p50"] == 500.0
    assert figures["e2el"]["mean"] == 4000.0
    assert figures["goodput_requests_per_second"] == 0.1
    assert figures["output_tokens_per_second"] == 0.5
    assert [percentile([4, 1, 3, 2], p) for p in (0, 50, 100)] == [1, 2.5, 4]


def write_batch(path, *prompts):
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": text}}
        for n, text in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(("prompts", "code"), [("ab", 0), (["a", "fail"], 3), (["fail"], 1)])
def test_run_batch_writes_both_files_and_tells_how_it_went(quire, worker, tmp_path, prompts, code):
    source, output, errors = (tmp_path / name for name in ("in", "out", "err"))
    write_batch(source, *prompts)
    found, out, err = quire(
        "run-batch", "-i", str(source), "-o", str(output), "-e", str(errors), "--json"
    )
    (progress,) = records(out)
    assert (found, progress["ending"], progress["total"]) == (code, "completed", len(prompts))
    assert len(records(output.read_text())) == progress["completed"]
    assert len(records(errors.read_text())) == progress["failed"]
    assert err == "", "progress is for terminals only"
    assert quire("run-batch", "-i", str(source), "-o", str(output), "-e", str(errors))[0] == 2


def test_the_time_left_counts_only_what_this_run_has_done():
    from quire.batch.batch import BatchProgress

    now = BatchProgress(total=100, completed=60, done_before=50, seconds=5.0)
    assert remaining_seconds(now) == 20.0
    assert remaining_seconds(BatchProgress(total=100, seconds=5.0)) is None


@pytest.mark.processes
def test_an_interrupted_batch_names_the_rest_and_goes_on_later(real_server, real_broker, tmp_path):
    release = threading.Event()

    def answer(request):
        if request.body["prompt"] == "slow":
            release.wait(30)
        return "done"

    source, output, errors = (tmp_path / name for name in ("in", "out", "err"))
    write_batch(source, "quick", "slow", "slow")
    command = [
        *(sys.executable, "-m", "quire.cli", "run-batch", "--queue", real_broker.keys.queue),
        *("-i", str(source), "-o", str(output), "-e", str(errors)),
    ]
    environment = os.environ | {"QUIRE_REDIS_URL": real_server.url}
    with FakeWorker(real_broker, answer):
        runner = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        while not (output.exists() and output.read_text()):
            assert runner.poll() is None
            release.wait(0.005)
        runner.send_signal(signal.SIGINT)
        assert runner.wait(30) == 130
        codes = [line["error"]["code"] for line in records(errors.read_text())]
        assert codes == ["batch_cancelled"] * 2
        release.set()
        subprocess.run([*command, "--resume"], cwd=ROOT, env=environment, check=True)
    assert len(records(output.read_text())) == 3
    assert errors.read_text() == ""


@pytest.mark.processes
def test_a_reader_that_goes_away_ends_the_command_quietly(quire, worker, real_server, real_broker):
    quire("submit", "x" * 2000, "--id", "long", "--wait")
    command = f"{sys.executable} -m quire.cli tail long --json | head -1"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


def test_the_demo_is_in_a_checkout_only(quire, monkeypatch, tmp_path):
    monkeypatch.setattr("quire.cli.programs.APPLICATION", tmp_path)
    code, out, err = quire("demo")
    assert (code, out) == (1, "") and "checkout" in err


@pytest.mark.parametrize(
    ("verb", "module"),
    [
        ("worker", "service"),
        *((name, f"service.{name}") for name in ("gateway", "batcher", "notifier")),
        *((name, f"service.{name}") for name in ("exporter", "console")),
    ],
)
def test_a_verb_becomes_the_service_with_all_its_flags(quire, monkeypatch, verb, module):
    become = []
    monkeypatch.setattr("os.execve", lambda *arguments: become.append(arguments))
    quire(verb, "--http-port", "zero")
    ((program, command, environment),) = become
    assert command == [program, "-m", module, "--http-port", "zero"]
    assert environment["PYTHONSAFEPATH"] == "1"
    assert importlib.util.find_spec(f"{module}.__main__") is not None


@pytest.mark.processes
def test_its_exit_code_and_its_complaint_are_those_of_the_service():
    command = [sys.executable, "-m", "quire.cli", "exporter", "--http-port", "zero"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "http_port" in done.stderr
