"""The tasks of abacus: answers follow from prompts, and held-out prompts stay held out."""

import random
import subprocess
import sys

import pytest

from models.abacus.tasks import (
    HELD_OUT_DIVISOR,
    MAX_ANSWER_CHARACTERS,
    TASKS,
    UnknownPromptError,
    answer,
    check,
    generate,
    is_held_out,
)

RIGHT_ANSWERS = [
    ("12+34=", "46"),
    ("9999+1=", "10000"),
    ("0+0=", "0"),
    ("reverse: quire=", "eriuq"),
    ("reverse: aab=", "baa"),
    ("sort: 31 4 15=", "4 15 31"),
    ("sort: 7 10 7 0=", "0 7 7 10"),
    ("count: 7 to 12=", "7 8 9 10 11 12"),
    ("count: 101 to 98=", "101 100 99 98"),
    ("json: a=1 name=bob=", '{"a":1,"name":"bob"}'),
    ("json: zero=0 true=true=", '{"zero":0,"true":"true"}'),
]

WRONG_ANSWERS = [
    ("12+34=", "47"),
    ("12+34=", "046"),
    ("12+34=", "46 "),
    ("12+34=", ""),
    ("reverse: quire=", "quire"),
    ("sort: 31 4 15=", "31 4 15"),
    ("sort: 7 10 7 0=", "0 7 10"),
    ("count: 7 to 12=", "7 8 9 10 11"),
    ("count: 7 to 12=", "7 8 9 10 11 12 13"),
    ("json: a=1 name=bob=", '{"a":"1","name":"bob"}'),
    ("json: a=1 name=bob=", '{"name":"bob","a":1}'),
]

FOREIGN_PROMPTS = [
    "",
    "12+34",
    "012+34=",
    "12-34=",
    "reverse: =",
    "reverse: Quire=",
    "sort: =",
    "sort: 1  2=",
    "count: 1 to=",
    "json: a=",
    "json: a=01=",
    "12+34=46",
]


@pytest.mark.parametrize(("prompt", "text"), RIGHT_ANSWERS)
def test_the_right_answer_is_accepted(prompt: str, text: str) -> None:
    assert answer(prompt) == text
    assert check(prompt, text)


@pytest.mark.parametrize(("prompt", "text"), WRONG_ANSWERS)
def test_anything_but_the_exact_answer_is_refused(prompt: str, text: str) -> None:
    assert not check(prompt, text)


@pytest.mark.parametrize("prompt", FOREIGN_PROMPTS)
def test_a_text_that_is_no_prompt_raises_instead_of_being_judged(prompt: str) -> None:
    with pytest.raises(UnknownPromptError):
        check(prompt, "")


@pytest.mark.parametrize("task", TASKS)
def test_every_generated_answer_passes_its_own_check_and_fits_the_limit(task: str) -> None:
    source = random.Random(1)
    for _ in range(500):
        prompt, text = generate(task, source)
        assert check(prompt, text)
        assert not check(prompt, text + "0")
        assert 0 < len(text) <= MAX_ANSWER_CHARACTERS


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_draws_the_same_examples(task: str) -> None:
    first, second, other = random.Random(1), random.Random(1), random.Random(2)
    drawn = [generate(task, first) for _ in range(20)]
    assert drawn == [generate(task, second) for _ in range(20)]
    assert drawn != [generate(task, other) for _ in range(20)]


@pytest.mark.parametrize("task", TASKS)
def test_training_and_held_out_prompts_are_disjoint(task: str) -> None:
    source = random.Random(1)
    trained = {generate(task, source).prompt for _ in range(2000)}
    held_out = {generate(task, source, held_out=True).prompt for _ in range(200)}
    assert trained.isdisjoint(held_out)
    assert not any(map(is_held_out, trained))
    assert all(map(is_held_out, held_out))


def test_the_held_out_split_is_the_one_the_stored_weights_were_trained_with() -> None:
    # A change of the hash would move prompts the stored model has seen into the held-out part.
    held_out = [number for number in range(100) if is_held_out(f"{number}+1=")]
    assert held_out == [11, 14, 78, 89, 91]


def test_about_one_prompt_in_sixteen_is_held_out() -> None:
    held_out = sum(is_held_out(f"{number}+{number}=") for number in range(9999))
    assert held_out == pytest.approx(9999 / HELD_OUT_DIVISOR, rel=0.15)


def test_the_tasks_need_no_torch() -> None:
    program = "import sys, models.abacus.tasks; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
