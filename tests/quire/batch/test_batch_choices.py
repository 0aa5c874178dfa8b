"""A line that asks for several choices is answered once, with all of them, whoever is killed."""

import itertools
import threading

import pytest

from quire import RequestFailed, State
from quire.testing.in_memory import FakeQuire
from quire.wire.codec import MAX_MESSAGE_BYTES
from tests.quire.batch_folder import Folder, ask

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def number_of(request) -> int:
    """Which choice a request is of."""
    return int(request.id.rpartition(":")[2])


def numbered(request):
    return "x" * (1 + number_of(request))


def test_the_choices_of_a_line_are_one_answer_in_their_order(folder):
    folder.write(ask("a", "prompt", n=3), ask("b", n=1), ask("c", n=None))
    with FakeQuire(answer=lambda r: numbered(r) if ":" in r.id else "one") as fake:
        progress = folder.run(fake.client())
    assert (progress.total, progress.completed) == (3, 3)
    body = next(line for line in folder.results if line["custom_id"] == "a")["response"]["body"]
    assert [(one["index"], one["text"]) for one in body["choices"]] == [
        (0, "x"), (1, "xx"), (2, "xxx"),
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens"] == len("prompt")
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["total_tokens"] == len("prompt") + 6
    asked = [request for request in fake.requests if request.body["prompt"] == "prompt"]
    assert len({request.body["seed"] for request in asked}) == 3


def test_a_seed_of_the_line_is_that_of_the_first_choice(folder):
    folder.write(ask("a", n=2, seed=7))
    with FakeQuire(answer=numbered) as fake:
        folder.run(fake.client())
    seeds = {number_of(request): request.body["seed"] for request in fake.requests}
    assert seeds[0] == 7 != seeds[1]


@pytest.mark.parametrize("n", [0, -1, 129, True, "2", 1.5, []])
def test_a_number_of_choices_that_cannot_be_is_a_bad_line(folder, n):
    folder.write(ask("a", n=n), ask("b", n=2))
    with FakeQuire(answer=numbered) as fake:
        folder.run(fake.client())
    assert folder.codes == {"a": "invalid_request"}
    assert "body.n" in folder.failures[0]["error"]["message"]
    assert len(folder.results) == 1


@pytest.mark.parametrize("max_inflight", [1, 1024])
def test_a_choice_that_fails_is_the_end_of_its_line_and_of_the_other_choices(folder, max_inflight):
    release, bad = threading.Event(), []

    def answer(request):
        if request.body["prompt"] == "good":
            return numbered(request)
        if number_of(request) == 1:
            bad.append(request.id)
            raise RequestFailed("no_paper", "the tray is empty")
        return "late" if release.wait(20) else ""

    folder.write(ask("a", "bad", n=3), ask("b", "good", n=2))
    with FakeQuire(answer=answer) as fake:
        progress = folder.run(fake.client(), max_inflight=max_inflight)
        others = [fake.client().status(bad[0][:-1] + number) for number in "02"]
        release.set()
    assert folder.codes == {"a": "no_paper"}
    assert (progress.completed, progress.failed, progress.inflight) == (1, 1, 0)
    assert all(one.cancel_requested or one.state is State.CANCELLED for one in others)


def test_a_run_that_was_broken_off_between_two_choices_takes_up_what_is_missing(folder):
    stop, release, made = threading.Event(), threading.Event(), []

    def answer(request):
        made.append(number_of(request))
        if number_of(request) == 1:
            yield "begun"
            release.wait(20)
        yield numbered(request)

    folder.write(ask("a", n=2))
    with FakeQuire(answer=answer) as fake:
        rounds = itertools.count()

        def stop_after_the_first(progress):
            # Its one token is read, and the other choice has begun.
            if progress.tokens >= 1 + len("begun") and next(rounds) == 0:
                stop.set()

        folder.run(fake.client(), stop=stop, on_progress=stop_after_the_first)
        assert folder.codes == {"a": "batch_cancelled"}
        release.set()
        folder.run(fake.client(), resume=True)
    (line,) = folder.results
    texts = [choice["text"] for choice in line["response"]["body"]["choices"]]
    assert texts == ["x", "begunxx"]
    assert made.count(0) == 1
    assert folder.failures == []


@pytest.mark.parametrize(
    ("line", "num_requests"), [(ask("a", n=3), 3), (ask("a", ["x", "y"], n=2), 4)]
)
def test_a_second_run_finds_every_choice_of_the_first(folder, line, num_requests):
    folder.write(line)
    with FakeQuire(answer=numbered) as fake:
        folder.run(fake.client())
        first = folder.results[0]["response"]["body"]["choices"]
        folder.output.unlink()
        folder.run(fake.client())
        assert folder.results[0]["response"]["body"]["choices"] == first
        assert len(fake.requests) == num_requests


# -- lists of prompts -----------------------------------------------------------------------------


def test_a_list_of_prompts_is_one_answer_of_all_their_choices(folder):
    folder.write(ask("a", ["long", "x"], n=2), ask("b", [[1, 2], [3]]), ask("c", ["only"]))
    with FakeQuire(answer=lambda request: str(request.body["prompt"])) as fake:
        progress = folder.run(fake.client())
    assert (progress.total, progress.completed) == (3, 3)
    bodies = {line["custom_id"]: line["response"]["body"] for line in folder.results}
    assert [(one["index"], one["text"]) for one in bodies["a"]["choices"]] == [
        (0, "long"), (1, "long"), (2, "x"), (3, "x"),
    ]  # fmt: skip
    assert bodies["a"]["usage"]["prompt_tokens"] == len("long") + len("x")
    assert bodies["a"]["usage"]["completion_tokens"] == 2 * (len("long") + len("x"))
    assert [one["text"] for one in bodies["b"]["choices"]] == ["[1, 2]", "[3]"]
    assert [one["text"] for one in bodies["c"]["choices"]] == ["only"]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (["a", ""], "body.prompt.1"),
        ([[1], [-1]], "body.prompt.1"),
        (["a", "x" * (1 << 20)], "body"),
        (["a", [1]], "body.prompt"),
        (["a"] * 129, "body.prompt"),
    ],
)
def test_a_prompt_of_a_list_that_cannot_be_is_a_bad_line_and_no_other(folder, prompt, field):
    folder.write(ask("a", prompt), ask("b", ["good"]))
    with FakeQuire(answer=lambda _: "one") as fake:
        folder.run(fake.client())
        assert [request.body["prompt"] for request in fake.requests] == ["good"]
    assert folder.codes == {"a": "invalid_request"}
    assert f"line 1: {field}: " in folder.failures[0]["error"]["message"]
    assert len(folder.results) == 1


@pytest.mark.parametrize("asked", [{}, {"n": 2, "seed": 7}], ids=["alone", "two with a seed"])
def test_a_line_that_is_nearly_too_long_costs_itself_at_most(folder, asked):
    """Beside its body a message has an id, a tenant and a deadline, a choice also a longer seed."""
    lengths = range(MAX_MESSAGE_BYTES - 400, MAX_MESSAGE_BYTES + 1, 50)
    lines = [ask(str(length), "x" * length, **asked) for length in lengths]
    folder.write(*lines, ask("good"))
    with FakeQuire(answer=lambda _: "one") as fake:
        folder.run(fake.client(), tenant="x" * 64, deadline_seconds=600)
    done = {line["custom_id"] for line in folder.results}
    assert {"good", str(lengths[0])} <= done
    assert set(folder.codes) == {line["custom_id"] for line in lines} - done
    assert set(folder.codes.values()) == {"invalid_request"}


def test_a_worker_that_refuses_a_prompt_is_told_with_the_place_of_that_prompt(folder):
    def answer(request):
        if request.body["prompt"] == "long":
            raise RequestFailed("invalid_request", "is too long", "body.prompt")
        return "said"

    folder.write(ask("a", ["x", "long"], n=2), ask("b", "long"))
    with FakeQuire(answer=answer) as fake:
        folder.run(fake.client())
    messages = {one["custom_id"]: one["error"]["message"] for one in folder.failures}
    assert messages == {"a": "body.prompt.1: is too long", "b": "body.prompt: is too long"}
