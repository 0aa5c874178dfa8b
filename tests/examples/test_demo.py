"""The demo's audit can find what it looks for, and its requests are the ones on file."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgpack
import pytest
import torch
import transformers

from examples.demo import chats
from examples.demo.__main__ import demonstrate
from examples.demo.afterwards import next_lines, quire_command, whole_answer
from examples.demo.audit import Ended, Verdict, count_faults
from examples.demo.chats import Undisturbed
from examples.demo.fleet import Fleet
from examples.demo.follower import Followed, Follower
from examples.demo.report import percentile
from examples.demo.stage import open_stage
from examples.demo.sums import mistakes
from examples.make_requests import NUM_REQUESTS, REQUESTS_FILE, make_lines
from models.abacus.tasks import answer, is_held_out
from quire import Client, Completion, LocalRedis, State
from quire.testing.in_memory import FakeQuire
from tests.engine.model.gguf_files import END, TOKENS, write_gguf
from tests.quire.builders import claim_next, make_item
from tests.service.forked import ForkedProgram


def entry(start: int, *ids: int) -> tuple[bytes, dict[bytes, bytes]]:
    return b"0-1", {b"from": b"%d" % start, b"ids": msgpack.packb(list(ids)), b"text": b""}


ROOT = Path(__file__).resolve().parents[2]
LAST = (b"9-1", {b"done": b""})


@pytest.mark.parametrize(
    ("entries", "faults"),
    [
        ([entry(0, 5, 6), entry(2, 7), LAST], (0, 0)),
        ([entry(0, 5), entry(2, 7), LAST], (1, 0)),
        ([entry(0, 5, 6), entry(1, 6, 7), LAST], (0, 1)),
        ([entry(0, 5, 6, 7), entry(3, 8), LAST], (0, 1)),
        ([LAST], (3, 0)),
    ],
    ids=["whole", "a gap", "an overlap", "beyond the end", "nothing"],
)
def test_the_audit_counts_lost_and_repeated_tokens(entries, faults):
    assert count_faults(entries, num_tokens=3) == faults


def test_the_follower_tells_once_where_a_request_goes_on_under_another_claim():
    with FakeQuire() as queue:
        handle = Client(queue.broker).submit([1, 2, 3])
        follower = Follower(queue.broker, [Followed(handle.request_id, "12+34=", submitted=0.0)])
        first = claim_next(queue.broker).claim
        queue.broker.commit([make_item(first, 0, 2)])
        told = []

        def on_news() -> None:
            told.append(follower.first_resumed())
            if len(told) == 1:
                queue.broker.release([first])
                again = claim_next(queue.broker).claim
                queue.broker.commit([make_item(again, 2, 3), make_item(again, 3, 4, final=True)])

        follower.follow(on_news)
    assert told == [None, "'12+34=' from token 2 on"]
    assert follower.first_resumed() is None


def test_asking_the_demo_for_help_does_not_start_it():
    command = [sys.executable, "-m", "examples.demo", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "200 requests" in done.stdout and done.stderr == ""


def test_the_requests_on_file_are_the_ones_their_program_makes():
    assert REQUESTS_FILE.read_text().splitlines() == make_lines()
    assert len(make_lines()) == NUM_REQUESTS


def test_every_request_has_a_checkable_answer_that_training_never_saw():
    for line in make_lines():
        request = json.loads(line)
        assert is_held_out(request["prompt"])
        assert len(answer(request["prompt"])) < request["max_tokens"]


def test_percentiles_are_values_that_occurred():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_a_wrong_answer_is_told_as_the_model_s_and_a_failure_as_a_failure():
    def ended(prompt: str, text: str, state: State) -> Ended:
        completion = SimpleNamespace(state=state)
        return Ended("id", prompt, text, (), cast("Completion", completion))

    verdict = Verdict(
        **dict.fromkeys((field.name for field in fields(Verdict)), 0)
        | {"wrong": (ended("9982+9818=", "19700", State.COMPLETED),)}
    )
    told = mistakes(verdict)
    assert told[0] == "'9982+9818=' was answered '19700', and '19800' is right"
    assert "the model's: it is small and errs" in told[1]
    assert "no token was lost" in told[2]
    assert "lost" not in " ".join(mistakes(replace(verdict, lost_tokens=1)))
    failed = replace(verdict, wrong=(ended("1+1=", "", State.FAILED),))
    assert mistakes(failed)[0] == "'1+1=' ended as failed"
    assert "the model's" not in " ".join(mistakes(failed))
    assert mistakes(replace(verdict, wrong=())) == []


class ForkedFleet(Fleet):
    """Its workers are forked from a process that has imported torch already."""

    def _launch(self, name, arguments, environment):
        return ForkedProgram("service", arguments, environ=environment, folder=str(ROOT))


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """Small, but large enough that the kill comes while answers are being generated."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        eos_token_id=END,
        bos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    return write_gguf(model, tmp_path_factory.mktemp("demo") / "small.gguf")


@pytest.fixture(scope="module")
def chat_stage(small_model, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    # No worker takes more than its share: either is a victim with requests.
    flags = ("--model", str(small_model), "--claim-batch", "2")
    with (
        LocalRedis.start() as server,
        open_stage(server, logs, flags=flags, fleet_class=ForkedFleet) as stage,
    ):
        yield stage


@pytest.mark.processes
def test_chats_are_answered_as_undisturbed_across_a_kill(chat_stage, capsys):
    values = chats.run(chat_stage, max_tokens=400, kill_after=0.1)
    assert chats.is_good(values), json.dumps(values)
    assert values["submitted"] == values["completed"] == values["correct"] == len(chats.CHATS)
    assert (values["lost_tokens"], values["repeated_tokens"]) == (0, 0)
    assert values["killed_workers"] == 1
    assert values["resumed_requests"] >= 1
    assert values["changed_answers"] == 0
    told = capsys.readouterr().err
    assert len(re.findall(r"^token +\d+ of .*\|", told, re.MULTILINE)) == values["resumed_requests"]
    killed, alive = chat_stage.fleet.killed[0], chat_stage.fleet.alive()
    assert f"[{killed} was killed here; {alive} goes on]" in told.replace("\n    ", " ")


@pytest.mark.processes
def test_an_answer_that_differs_from_the_undisturbed_one_is_counted(
    chat_stage, capsys, monkeypatch
):
    play = chat_stage.play

    def spoiled(requests, *, kill_at):
        played = play(requests, kill_at=kill_at)
        if kill_at is not None:
            requests[3].token_ids[5] += 1
        return played

    monkeypatch.setattr(chat_stage, "play", spoiled)
    values = chats.run(chat_stage, max_tokens=20)
    assert (values["changed_answers"], values["correct"]) == (1, len(chats.CHATS) - 1)
    assert not chats.is_good(values)
    told = f"{chats.CHATS[3][0]['content']!r} ended as completed, and differs"
    assert f"{told} from the undisturbed answer at token 5\n" in capsys.readouterr().err


def test_one_answer_is_shown_whole_with_the_place_of_the_kill():
    def taken_over(prompt: str, text: str, at: int | None) -> Followed:
        completion = cast("Completion", SimpleNamespace(state=State.COMPLETED))
        resumed_at = None if at is None else (at, at)
        return Followed(
            prompt, prompt, submitted=0.0, text=text, token_ids=list(range(len(text))),
            resumed_at=resumed_at, completion=completion,
        )  # fmt: skip

    requests = [
        taken_over("undisturbed", "a" * 90, None),
        taken_over("at the beginning", "b" * 90, 1),
        taken_over("in the middle", "one two thr\x1b[31mee\n\nfour " + "five " * 30, 9),
    ]
    told = whole_answer(requests, killed="worker-1", alive="worker-2")
    mark = "[worker-1 was killed here; worker-2 goes on]"
    assert told[0] == "one whole answer, whose first 9 of 175 tokens are from worker-1:"
    assert told[2] == "    in the middle"
    assert told[4] == f"    one two t{mark}hr\u241b[31mee"
    assert told[5].strip() == "" and told[6].startswith("    four five five")
    assert " ".join(told[6:]).split() == ["four", *["five"] * 30]
    assert max(map(len, told)) <= 96
    assert whole_answer(requests[:1], killed="worker-1", alive="worker-2") == []


def test_what_to_do_next_can_be_typed_as_it_is(tmp_path, monkeypatch):
    """`quire` is not on the PATH of who runs `make demo`, and a path may have a space."""
    model = tmp_path / "a model.gguf"
    model.write_bytes(b"GGUF")
    (said, told) = next_lines(str(model))
    assert said == "next:"
    command, verb, path = shlex.split(told, comments=True)
    assert (verb, path) == ("serve", str(model))
    monkeypatch.setenv("PATH", "")
    done = subprocess.run(
        [command, verb, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "usage: quire serve" in done.stdout
    _, alone, made = next_lines(None)
    assert shlex.split(alone, comments=True) == [command, "serve"]
    assert shlex.split(made, comments=True) == ["make", "demo", "MODEL=smollm2"]
    monkeypatch.chdir(tmp_path)
    assert Path(quire_command()[0]).is_absolute()


def test_whose_server_is_used_is_said_before_it_is(monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_REDIS_URL", "redis://someone:secret@127.0.0.1:1/0")
    assert demonstrate(None) == 1
    whose, refusal = capsys.readouterr().err.splitlines()
    assert whose.startswith("Redis: redis://someone@127.0.0.1:1/0, the server that QUIRE_REDIS_URL")
    assert "secret" not in whose and "unset QUIRE_REDIS_URL" in whose
    assert "does not answer" in refusal


GOOD_CHATS = {
    "submitted": 12, "completed": 12, "correct": 12, "lost_tokens": 0, "repeated_tokens": 0,
    "killed_workers": 1, "resumed_requests": 1, "changed_answers": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "bad",
    [
        {"completed": 11}, {"lost_tokens": 1}, {"repeated_tokens": 1}, {"killed_workers": 0},
        {"resumed_requests": 0}, {"changed_answers": 1},
    ],
    ids=str,
)  # fmt: skip
def test_the_demo_with_chats_fails_if_any_figure_is_not_as_promised(bad):
    assert chats.is_good(GOOD_CHATS)
    assert not chats.is_good(GOOD_CHATS | bad)


def test_a_text_or_a_length_that_differs_is_a_change_too():
    whole = Followed("id", "hi", submitted=0.0, text="ab", token_ids=[1, 2])
    undisturbed = Undisturbed.of([whole])
    completion = cast("Completion", SimpleNamespace(state=State.COMPLETED))
    for text, token_ids in (("ab", (1, 2)), ("ax", (1, 2)), ("ab", (1,)), ("ab", (1, 2, 3))):
        ended = Ended("id", "hi", text, token_ids, completion)
        assert undisturbed.is_same(ended) == ((text, token_ids) == ("ab", (1, 2)))
