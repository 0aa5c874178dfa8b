"""The gate of the soak through Redis: each thing it guards against fails it."""

from collections import Counter

import pytest

from benchmarks.bench_service_soak import OpenRequest, Question, check_answer, judge
from benchmarks.bench_soak import MAX_GROWTH_BYTES, SoakFailed

QUESTION = Question(prompt="1+2=", token_ids=[51, 257], text="3")
HAPPENED = Counter(completed=9, cancelled=1, preemptions=4, cached_prompt_tokens=16)


def asked(token_ids: list[int], text: str, *, is_cancelled: bool = False) -> OpenRequest:
    return OpenRequest(QUESTION, is_cancelled, token_ids, text)


def readings(**changes: list[int]) -> dict[str, list[int]]:
    flat = {"worker_bytes": [1 << 28] * 10, "redis_bytes": [1 << 20] * 10, "redis_keys": [9] * 10}
    return flat | changes


@pytest.mark.parametrize(
    ("one", "state"),
    [
        (asked([52, 257], "3"), "completed"),
        (asked([51], "3"), "completed"),
        (asked([51, 257], "4"), "completed"),
        (asked([51, 257], "3"), "failed"),
        (asked([51], "3"), "cancelled"),
        (asked([52], "", is_cancelled=True), "cancelled"),
    ],
    ids=["token", "short", "text", "failed", "cancelled by nobody", "cancelled after a wrong one"],
)
def test_what_is_not_the_answer_fails_the_soak(one, state):
    with pytest.raises(SoakFailed, match="r1"):
        check_answer("r1", one, state=state)


def test_the_answer_passes_and_so_does_its_beginning_of_a_cancelled_request():
    check_answer("r1", asked([51, 257], "3"), state="completed")
    check_answer("r1", asked([51, 257], "3", is_cancelled=True), state="completed")
    check_answer("r1", asked([51], "", is_cancelled=True), state="cancelled")


@pytest.mark.parametrize("name", ["worker", "redis"])
def test_a_process_that_grows_in_the_last_half_fails_the_soak(name):
    judge(readings(), HAPPENED, 20_000)
    growing = [(1 << 28) + tenth * MAX_GROWTH_BYTES for tenth in range(10)]
    with pytest.raises(SoakFailed, match=f"{name}: grew by"):
        judge(readings(**{f"{name}_bytes": growing}), HAPPENED, 20_000)


def test_one_key_that_stays_fails_the_soak():
    with pytest.raises(SoakFailed, match="number of keys"):
        judge(readings(redis_keys=[9] * 9 + [10]), HAPPENED, 20_000)


@pytest.mark.parametrize("kind", HAPPENED)
def test_a_soak_in_which_something_never_happened_says_nothing(kind):
    with pytest.raises(SoakFailed, match=kind):
        judge(readings(), HAPPENED - Counter({kind: 100}), 20_000)
