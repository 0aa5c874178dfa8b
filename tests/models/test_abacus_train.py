"""Training abacus: interruptions leave no trace, and only answers are trained on."""

from pathlib import Path

import pytest
import torch

from models.abacus import train
from models.abacus.architecture import EOS_ID
from models.abacus.tasks import Example

SEED = 3
STEPS = 4


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "DOCUMENTS_PER_STEP", 8)


def test_an_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = train.Run.start(SEED)
    for _ in range(STEPS):
        train.train_step(whole, SEED, STEPS)

    interrupted = train.Run.start(SEED)
    for _ in range(STEPS // 2):
        train.train_step(interrupted, SEED, STEPS)
    interrupted.save(tmp_path / "checkpoint.pt")
    resumed = train.Run.start(SEED + 1)
    resumed.load(tmp_path / "checkpoint.pt")
    for _ in range(STEPS // 2):
        train.train_step(resumed, SEED, STEPS)

    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_a_step_changes_the_weights() -> None:
    run = train.Run.start(SEED)
    before = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    train.train_step(run, SEED, STEPS)
    after = run.model.state_dict()
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_the_labels_are_the_answer_and_the_end_and_nothing_else() -> None:
    (batch,) = train.micro_batches([Example("12+34=", "46")])
    trained = batch.labels[batch.labels != train.IGNORED]
    assert trained.tolist() == [*b"46", EOS_ID]


def test_each_label_is_the_token_after_its_position() -> None:
    examples = [Example("12+34=", "46"), Example("reverse: quire=", "eriuq")]
    for batch in train.micro_batches(examples):
        rows, columns = (batch.labels != train.IGNORED).nonzero(as_tuple=True)
        assert torch.equal(batch.labels[rows, columns], batch.ids[rows, columns + 1])


def test_every_example_lands_in_exactly_one_micro_batch() -> None:
    examples = [Example(f"reverse: {'a' * length}=", "a" * length) for length in range(2, 60)]
    batches = list(train.micro_batches(examples))
    assert len(batches) > 1
    assert sum(len(batch.ids) for batch in batches) == len(examples)
