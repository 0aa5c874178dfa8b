"""Batches in front of several queues: the model of their lines decides where they go."""

import pytest

from tests.service.batcher.builders import (
    batcher_of,
    create,
    ended,
    expected_text,
    line,
    results_of,
)
from tests.service.builders import Queue, WorkerThread


@pytest.fixture
def other(queue: Queue):
    """A second queue, whose worker is the only one of this test."""
    other = Queue(queue.connection, url=queue.url)
    with WorkerThread(other.settings(max_num_seqs=16)):
        yield other


@pytest.fixture
def table(queue, other, tmp_path):
    path = tmp_path / "models.toml"
    path.write_text(
        f'[models.idle]\nqueue = "{queue.name}"\n'
        f'[models.fake]\nqueue = "{other.name}"\naliases = ["best"]\n'
    )
    return path


def test_a_batch_goes_to_the_queue_of_its_model(front, other, table):
    made = create(front.openai, *(line(f"row-{n}", model="best") for n in range(5)))
    with batcher_of(front.queue, front.folder, models_file=table):
        batch = ended(front.openai, made.id)
    assert batch.status == "completed"
    assert results_of(front.openai, batch) == {f"row-{n}": expected_text() for n in range(5)}
    assert batch.model == "best"
    told = [front.queue.connection.xlen(one.keys.ends) for one in (other, front.queue)]
    assert told == [5, 1], "the requests end in their queue, and the batch in that of its record"


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([line("a", model="best"), line("b", model="idle")], "mismatched_model"),
        ([line("a", model="bset")], "model_not_found"),
        ([line("a")], "model_not_found"),
    ],
)
def test_lines_that_have_no_queue_in_common_fail_the_batch(front, table, lines, code):
    made = create(front.openai, *lines)
    with batcher_of(front.queue, front.folder, models_file=table):
        batch = ended(front.openai, made.id)
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == [code]
