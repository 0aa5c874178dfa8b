"""What goes wrong around the command: each is one sentence and the exit code for it."""

import json

import pytest

from quire.cli import main
from quire.errors import BrokerUnavailable
from quire.queue.side import Side
from quire.transport.connection import connect
from quire.transport.local_redis import URL_VARIABLE, LocalRedis
from quire.transport.patience import Patience
from tests.quire.builders import Clockwork, claim_next, make_item, make_request

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]


def test_a_refused_password_is_told_as_one(quire, monkeypatch):
    monkeypatch.delenv(URL_VARIABLE)
    with LocalRedis.start() as server:
        if not server.is_real:
            pytest.skip("no real Redis to set a password on")
        with connect(server.url) as connection:
            connection.config_set("requirepass", "right")
        url = ["--redis-url", server.url]
        said = quire("submit", "x", *url)
        assert said == (1, "", "error: Redis requires a password, and none was given\n")
        monkeypatch.setenv("QUIRE_REDIS_PASSWORD", "wrong")
        code, out, _ = quire("doctor", "--no-torch", *url)
        assert code == 1 and "QUIRE_REDIS_PASSWORD" in out
        code, _, err = quire("submit", "x", *url)
        assert code == 1 and "user or password" in err
        monkeypatch.setenv("QUIRE_REDIS_PASSWORD", "right")
        assert quire("submit", "x", *url)[0] == 0


def test_the_doctor_sees_a_server_that_takes_no_writes(quire, monkeypatch):
    monkeypatch.delenv(URL_VARIABLE)
    with LocalRedis.start() as server:
        if not server.is_real:
            pytest.skip("no real Redis to make a replica of")
        url = ["--redis-url", server.url]
        with connect(server.url) as connection:
            assert "ok    redis role: master\n" in quire("doctor", "--no-torch", *url)[1]
            connection.config_set("maxmemory", "100kb")
            code, out, _ = quire("doctor", "--no-torch", *url)
            assert code == 1 and "fail  redis memory: full, " in out
            connection.config_set("maxmemory", "0")
            connection.replicaof("127.0.0.1", 1)
            code, out, _ = quire("doctor", "--no-torch", *url)
        assert code == 1 and "fail  redis role: slave\n" in out


@pytest.mark.parametrize("verb", [["status"], ["submit", "x"], ["bench", "--num-prompts", "1"]])
@pytest.mark.parametrize(
    "wrong", [["--redis-url", "nowhere"], ["--queue", "a b"], ["--shards", "0"]]
)
def test_a_server_or_queue_that_cannot_be_right_is_wrong_usage(quire, verb, wrong):
    code, out, err = quire(*verb, *wrong)
    assert (code, out) == (2, "") and err.startswith("error: ")


def test_a_reason_that_is_no_text_is_refused_and_pauses_nothing(quire):
    """As a shell passes on what was written in another encoding than UTF-8."""
    code, out, err = quire("queue", "pause", "Wartung l\udce4uft")
    assert (code, out, err) == (2, "", "error: reason: must be a text\n")
    assert "PAUSED" not in quire("status")[1]


@pytest.mark.parametrize("seconds", ["-1", "nan", "soon"])
def test_a_time_that_is_no_number_of_seconds_is_told_as_one(quire, seconds):
    code, _, err = quire("drain", "--all", "--timeout", seconds)
    assert code == 2
    assert err.endswith(f"error: argument --timeout: {seconds} is not a number of seconds\n")


def test_a_time_that_no_clock_can_wait_for_is_a_year(quire, monkeypatch):
    slept = []
    monkeypatch.setattr("quire.cli.operate.time.sleep", slept.append)
    assert quire("top", "--interval", "1e300", "--count", "2")[0] == 0
    assert slept == [31_536_000]


@pytest.mark.parametrize(
    "words",
    [
        ("top", "--count"),
        ("dead", "ls", "--count"),
        *(
            ("bench", flag)
            for flag in ("--num-prompts", "--input-len", "--output-len", "--vocab-size")
        ),
        ("bench", "--max-concurrency"),
    ],
    ids=" ".join,
)
def test_a_number_of_things_is_one_at_least(quire, words):
    for number in ("0", "-3", "1.5", "many"):
        code, out, err = quire(*words, number)
        assert (code, out) == (2, "")
        assert err.endswith(f"error: argument {words[-1]}: {number} is not a positive number\n")


@pytest.mark.parametrize(
    "wrong", [["--request-rate", "nan"], ["--burstiness", "inf"], ["--burstiness", "nan"]]
)
def test_a_rate_that_is_no_number_is_refused(quire, wrong):
    code, out, err = quire("bench", *wrong)
    assert (code, out) == (2, "")
    assert err == "error: request-rate, burstiness: must be positive numbers\n"


def test_an_interruption_while_modules_are_loaded_leaves_no_traceback(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("quire.cli.verbs.importlib.import_module", interrupted)
    assert main(["status"]) == 130


def test_who_waits_is_told_once_that_nobody_works(
    quire, real_broker, monkeypatch, ended_after_the_note
):
    monkeypatch.setattr("quire.transport.patience.NOTE_SECONDS", 0.05)
    request_id = quire("submit", "x")[1].strip()
    wait = ("result", request_id, "--timeout")
    nobody = f"no worker is alive on queue '{real_broker.keys.queue}'"
    code, out, err = quire(*wait, str(ended_after_the_note))
    note, error = err.splitlines()
    assert (code, out) == (1, "")
    assert note.startswith(f"{request_id} waits: {nobody}")
    assert error.startswith(f"error: {request_id} has not ended yet: {nobody}")
    # A wait that is shorter than the moment of the note is told at its end.
    monkeypatch.setattr("quire.transport.patience.NOTE_SECONDS", 60)
    wait = (*wait, "0.3")
    (error,) = quire(*wait)[2].splitlines()
    assert error.startswith(f"error: {request_id} has not ended yet: {nobody}")
    real_broker.beat_worker("w", "ready", {})
    assert "no worker" not in quire(*wait)[2]
    real_broker.beat_worker("w", "stopped", {})
    assert "the last one was w (stopped, " in quire(*wait)[2]
    real_broker.pause("later")
    assert "is paused (later)" in quire(*wait)[2]
    real_broker.resume()


@pytest.mark.parametrize(
    "verb", [("submit", "x", "--follow"), ("submit", "x", "--wait"), ("tail",)]
)
def test_who_follows_what_nobody_computes_is_told_its_id_and_why(
    quire, real_broker, real_connection, monkeypatch, verb
):
    explain, clockwork = Patience.explain, Clockwork(real_connection, real_broker)

    def explain_and_be_late(patience, reason):
        explain(patience, reason)
        # The deadline comes after the note, however slow the machine is.
        clockwork.bring_deadline("r")

    monkeypatch.setattr("quire.transport.patience.NOTE_SECONDS", 0.05)
    monkeypatch.setattr("quire.client.handle.MAX_BLOCK_SECONDS", 0.1)
    monkeypatch.setattr(Patience, "explain", explain_and_be_late)
    request = ("--deadline", "600", "--id", "r")
    if verb == ("tail",):
        quire("submit", "x", *request)
        verb, request = ("tail", "r"), ()
    code, out, err = quire(*verb, *request)
    assert (code, out) == (1, "")
    note, error = err.splitlines()
    assert note.startswith(f"r waits: no worker is alive on queue '{real_broker.keys.queue}'")
    assert error.startswith("error: r: deadline_exceeded")


def test_a_batch_that_nobody_computes_says_so_once(quire, real_broker, monkeypatch, tmp_path):
    monkeypatch.setattr("quire.transport.patience.NOTE_SECONDS", 0.05)
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    files = ("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    # The deadline is so far behind the note that even a busy machine comes to the note first.
    _, _, err = quire("run-batch", *files, "--deadline", "4")
    told = f"the batch in waits: no worker is alive on queue '{real_broker.keys.queue}'"
    assert err.count(told) == 1


@pytest.mark.parametrize("error", [BrokerUnavailable("Redis cannot be reached"), KeyboardInterrupt])
@pytest.mark.parametrize(
    ("verb", "told"), [("--follow", "quire tail r --after 2"), ("--wait", "quire result r")]
)
def test_whoever_stops_watching_is_told_how_to_go_on(
    quire, real_broker, monkeypatch, error, verb, told
):
    read = Side.read_output

    def then_away(broker, seen, **waiting):
        found = read(broker, seen, **waiting)
        if found:
            return found
        if broker.status("r").state == "running":
            raise error
        real_broker.commit([make_item(claim_next(real_broker).claim, 0, 2)])
        return {}

    monkeypatch.setattr(Side, "read_output", then_away)
    code, _, err = quire("submit", "x", "--id", "r", verb)
    assert code == (130 if error is KeyboardInterrupt else 1)
    assert f"the request continues; to see the rest: {told}\n" in err


@pytest.mark.parametrize("verb", ["tail", "result"])
def test_nothing_is_said_to_continue_of_which_nothing_is_known(quire, verb):
    code, out, err = quire(verb, "nope", "--redis-url", "redis://127.0.0.1:1/0")
    assert (code, out) == (1, "")
    assert err.startswith("error: Redis cannot be reached") and "continues" not in err
    assert err.endswith(" refused; start one: `quire serve` or `quire local`\n")


def test_a_submit_can_wait_for_its_time(quire, real_broker):
    code, out, _ = quire("submit", "x", "--delay", "60")
    assert code == 0
    assert real_broker.status(out.strip()).state == "scheduled"


def test_a_number_beyond_the_end_of_the_log_is_not_told_as_a_loss_of_redis(quire, real_broker):
    real_broker.submit(make_request(id="r"))
    real_broker.commit([make_item(claim_next(real_broker).claim, 0, 2, final=True)])
    code, out, err = quire("tail", "r", "--after", "20")
    assert (code, out) == (1, "")
    assert err == (
        "error: r: its log has 2 tokens, and the reader asked for those after the first 20: "
        "either that number is wrong, or Redis lost tokens\n"
    )
