"""The demo's audit can find what it looks for, and its requests are the ones on file."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import cast

import msgpack
import pytest

from examples.demo.audit import Ended, Verdict, count_faults
from examples.demo.follower import Followed, Follower
from examples.demo.report import mistakes, percentile
from examples.make_requests import NUM_REQUESTS, REQUESTS_FILE, make_lines
from models.abacus.tasks import answer, is_held_out
from quire import Client, Completion, State
from quire.testing.in_memory import FakeQuire
from tests.quire.builders import claim_next, make_item


def entry(start: int, *ids: int) -> tuple[bytes, dict[bytes, bytes]]:
    return b"0-1", {b"from": b"%d" % start, b"ids": msgpack.packb(list(ids)), b"text": b""}


END = (b"9-1", {b"done": b""})


@pytest.mark.parametrize(
    ("entries", "faults"),
    [
        ([entry(0, 5, 6), entry(2, 7), END], (0, 0)),
        ([entry(0, 5), entry(2, 7), END], (1, 0)),
        ([entry(0, 5, 6), entry(1, 6, 7), END], (0, 1)),
        ([entry(0, 5, 6, 7), entry(3, 8), END], (0, 1)),
        ([END], (3, 0)),
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
        return Ended("id", prompt, text, cast("Completion", completion))

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
