"""Requests with pictures: what they share, what they may share, and which are refused."""

import hashlib

import pytest

from engine.errors import RequestRejected
from engine.fake_runner import fake_generation
from engine.picture import Picture, content_between, pictures_between
from engine.scheduling.scheduler import Scheduler
from tests.engine.builders import Machine, make_config, make_request

#: Eight placeholders between five and four tokens of text; a block holds four tokens.
PROMPT = [1, 2, 3, 4, 5, *[9] * 8, 6, 7, 8, 9]


def make_picture(name: str, *, start: int = 5, length: int = 8) -> Picture:
    return Picture(hashlib.sha256(name.encode()).digest(), start, length, {})


def expected(*pictures: Picture, prompt=PROMPT, num_tokens: int = 4) -> list[int]:
    return fake_generation(prompt, num_tokens=num_tokens, pictures=pictures)


def machine_of(**overrides) -> Machine:
    return Machine(make_config(reads_pictures=True, **overrides))


def test_the_same_tokens_with_another_picture_share_only_the_blocks_before_it():
    machine = machine_of()
    for name, num_cached in (("cat", 0), ("dog", 4), ("cat", 16), ("dog", 16)):
        picture = make_picture(name)
        request = make_request(f"{name} {num_cached}", prompt=PROMPT, pictures=(picture,))
        machine.add(request)
        machine.run()
        assert request.num_cached_tokens == num_cached
        assert request.output_token_ids == expected(picture)


def test_a_picture_at_another_place_among_equal_tokens_is_another_content():
    """The block has the same ids, and the same picture: but other parts of it."""
    prompt = [9] * 12
    machine = machine_of()
    for start in (0, 2, 4):
        picture = make_picture("cat", start=start)
        request = make_request(f"at {start}", prompt=prompt, pictures=(picture,))
        machine.add(request)
        machine.run()
        assert request.num_cached_tokens == 0
        assert request.output_token_ids == expected(picture, prompt=prompt)


def test_a_picture_that_takes_more_tokens_is_another_content():
    """A model may divide the same picture otherwise where it is not alone."""
    short, long = make_picture("cat", length=8), make_picture("cat", length=9)
    assert content_between((short,), 4, 8) != content_between((long,), 4, 8)


def test_text_has_the_content_of_no_picture():
    picture = make_picture("cat")
    assert content_between((picture,), 0, 5) == content_between((picture,), 13, 17) == b""
    assert content_between((picture,), 4, 6) and content_between((picture,), 12, 16)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_what_is_preempted_goes_on_with_its_pictures(mode):
    machine = machine_of(
        num_blocks=12, num_host_blocks=32, preemption_mode=mode, enable_prefix_caching=False
    )
    pictures = {name: make_picture(name) for name in ("cat", "dog", "cow")}
    for name, picture in pictures.items():
        machine.add(make_request(name, prompt=PROMPT, pictures=(picture,), max_tokens=20))
    machine.run()
    snapshot = machine.engine.snapshot()
    assert getattr(snapshot, f"preemptions_{mode}") > 0
    for name, picture in pictures.items():
        assert machine.tokens(name) == expected(picture, num_tokens=20)


def test_a_request_taken_over_goes_on_with_its_pictures():
    picture = make_picture("cat")
    published = expected(picture)[:2]
    machine = machine_of()
    machine.add(make_request("r", prompt=PROMPT, pictures=(picture,), output=published))
    machine.run()
    assert machine.tokens("r") == expected(picture)[2:]


NAMES = ("cat", "dog", "cow", "pig")
MORE_NAMES = (*NAMES, "hen", "fox", "bee")


def pictures_of(batch) -> list[str]:
    """What the rows of a step compute with, each once."""
    found = [
        picture.digest
        for row in batch.rows
        for picture in pictures_between(row.pictures, row.start, row.end)
    ]
    return [name for name in MORE_NAMES if make_picture(name).digest in found]


def pictured_requests(*names: str, **others) -> list:
    """Each with a picture of eight tokens at its beginning."""
    prompt = [9] * 8 + [6, 7]
    return [
        make_request(name, prompt=prompt, pictures=(make_picture(name, start=0),), **others)
        for name in names
    ]


#: In a step, each row has half of a picture, and three pictures are longer than the step.
HALVES = {"reads_pictures": True, "max_num_batched_tokens": 20, "long_prefill_token_threshold": 4}


def test_a_step_begins_another_picture_only_while_those_it_has_begun_are_shorter_than_its_tokens():
    """Each has eight tokens, in two rows; three of them are longer than a step."""
    machine = Machine(make_config(**HALVES))
    requests = pictured_requests(*NAMES)
    machine.add(*requests)
    machine.run()
    assert [pictures_of(batch) for batch in machine.batches[:4]] == [
        ["cat", "dog", "cow"],
        ["cat", "dog", "cow", "pig"],
        ["pig"],
        [],
    ]
    for request in requests:
        tokens = expected(*request.pictures, prompt=request.prompt_token_ids)
        assert machine.tokens(request.request_id) == tokens


def test_what_a_step_that_failed_was_to_encode_is_not_free_when_it_is_planned_again():
    scheduler = Scheduler(make_config(**HALVES))
    for request in pictured_requests(*MORE_NAMES):
        scheduler.add(request)
    for _ in range(3):
        assert pictures_of(scheduler.schedule(now=0.0)) == ["cat", "dog", "cow"]


def test_what_a_step_that_failed_ahead_was_to_encode_is_not_free_either():
    machine = Machine(make_config(**HALVES), runs_ahead=True)
    machine.add(*pictured_requests(*MORE_NAMES))
    failed = []

    def fail_once(batch):
        if batch.step == 2 and not failed:
            failed.append(pictures_of(batch))
            raise ValueError("no memory")
        machine.batches.append(batch)

    machine.runner._before_run = fail_once
    machine.step()
    machine.step()
    assert failed == [["cat", "dog", "cow", "pig", "hen", "fox"]]
    assert [pictures_of(batch) for batch in machine.batches[:2]] == [["cat", "dog", "cow"]] * 2
    machine.run()


def test_the_picture_of_a_row_that_failed_is_not_free_in_the_next_step():
    machine = Machine(make_config(**HALVES | {"long_prefill_token_threshold": 2}))
    first, *others = pictured_requests(*MORE_NAMES)
    machine.add(first, *others)
    machine.runner.script.failing_request_ids = {"cat"}
    machine.step()
    assert first.is_finished
    machine.runner.script.failing_request_ids = set()
    # Another one with that picture comes in before all that wait.
    (again,) = pictured_requests("cat", arrival=-1.0)
    machine.add(again)
    machine.step()
    assert pictures_of(machine.batches[-1]) == ["cat", "dog", "cow", "pig", "hen"]
    machine.run()


def test_requests_with_the_same_picture_compute_with_it_together():
    machine = machine_of(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    for name in ("a", "b", "c"):
        pictures = (make_picture("cat"),)
        machine.add(make_request(name, prompt=PROMPT, pictures=pictures))
    machine.step()
    assert [len(row.token_ids) for row in machine.batches[0].rows] == [6, 6, 6]


def test_a_picture_longer_than_a_step_is_computed_in_several():
    machine = machine_of(max_num_batched_tokens=6)
    machine.add(make_request("r", prompt=PROMPT, pictures=(make_picture("cat"),)))
    machine.run()
    assert machine.tokens("r") == expected(make_picture("cat"))


def test_a_decode_gets_its_token_in_every_step_and_text_goes_on_beside_a_picture_that_waits():
    machine = machine_of(max_num_batched_tokens=12, long_prefill_token_threshold=6)
    machine.add(make_request("decode", prompt=3, max_tokens=9))
    machine.step()
    for name in ("cat", "dog"):
        picture = make_picture(name, start=0, length=12)
        machine.add(make_request(name, prompt=[9] * 13, pictures=(picture,)))
    machine.add(make_request("text", prompt=8))
    # The picture of "dog" waits for one step, with a token kept for it.
    for expected_rows in (
        [("decode", 1), ("cat", 6), ("text", 4)],
        [("decode", 1), ("cat", 6), ("dog", 4), ("text", 1)],
    ):
        machine.step()
        rows = machine.batches[-1].rows
        assert [(row.request_id, len(row.token_ids)) for row in rows] == expected_rows
    machine.run()
    assert len(machine.tokens("decode")) == 9


def test_no_more_requests_wait_for_their_pictures_than_a_step_has_tokens():
    """Each keeps a token: with more of them, none would be left, and nobody would get on."""
    machine = machine_of(
        max_num_batched_tokens=16, max_prefill_tokens=3, long_prefill_token_threshold=1
    )
    for index in range(8):
        pictures = (make_picture(str(index), start=0, length=40),)
        machine.add(make_request(str(index), prompt=[9] * 42, pictures=pictures, max_tokens=2))
    machine.run()


def test_a_picture_that_the_model_cannot_read_is_refused():
    machine = Machine(make_config())
    with pytest.raises(RequestRejected, match="model reads no pictures") as refusal:
        machine.add(make_request(prompt=PROMPT, pictures=(make_picture("cat"),)))
    assert refusal.value.field == "pictures"


@pytest.mark.parametrize(
    ("places", "index"),
    [
        ([(5, 0)], 0),
        ([(-1, 3)], 0),
        ([(10, 8)], 0),
        ([(5, 4), (8, 4)], 1),
        ([(9, 4), (5, 4)], 1),
    ],
    ids=["empty", "before the prompt", "behind the prompt", "overlapping", "out of order"],
)
def test_pictures_outside_of_the_prompt_are_refused(places, index):
    pictures = tuple(make_picture("cat", start=start, length=length) for start, length in places)
    with pytest.raises(RequestRejected, match="its tokens are not in the prompt") as refusal:
        machine_of().add(make_request(prompt=PROMPT, pictures=pictures))
    assert refusal.value.field == f"pictures.{index}"
