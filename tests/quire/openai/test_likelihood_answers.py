"""What a body with choices asks for, and the answer from the log-probabilities of their tokens."""

import json
import math

import pytest

from quire.errors import InvalidRequest
from quire.openai.answers import Heading, response, written_response
from quire.openai.likelihoods import (
    MAX_LABEL_LENGTH,
    MAX_LABELS_BYTES,
    LikelihoodForm,
    likelihood_entries,
    likelihood_form_from,
    likelihood_form_of,
)
from quire.openai.logprobs import TOKENS_PER_PART
from quire.openai.scores import field_of, must_be_scores, scores_body
from quire.wire.output import Completion, FinishReason, State
from quire.wire.pooling import bytes_of


def ended(*logprobs: float) -> Completion:
    return Completion("r", State.COMPLETED, FinishReason.STOP, vector=bytes_of(logprobs))


#: Two inputs with three choices each.
ENDED = [
    ended(-1.0), ended(-0.25, -0.25, -0.25), ended(-4.0),
    ended(-2.0), ended(-1.0, -1.0), ended(-8.0, -8.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("normalize", "labels", "logprobs"),
    [
        ("sum", ["b", "a"], [[-1.0, -0.75, -4.0], [-2.0, -2.0, -16.0]]),
        ("mean", ["b", "b"], [[-1.0, -0.25, -4.0], [-2.0, -1.0, -8.0]]),
    ],
)
def test_the_likeliest_choice_is_the_label_of_its_input(normalize, labels, logprobs):
    found = list(likelihood_entries(LikelihoodForm(("a", "b", "c"), normalize), ENDED))
    assert [one["index"] for one in found] == [0, 1]
    assert [one["label"] for one in found] == labels
    assert [one["logprobs"] for one in found] == logprobs
    assert [one["num_tokens"] for one in found] == [[1, 3, 1], [1, 2, 2]]
    assert {one["num_classes"] for one in found} == {3}
    for one, row in zip(found, logprobs, strict=True):
        whole = sum(map(math.exp, row))
        assert one["probs"] == pytest.approx([math.exp(number) / whole for number in row])


def test_unlikely_choices_have_finite_numbers():
    form = LikelihoodForm((None, None))
    (entry,) = likelihood_entries(form, [ended(-1e6), ended(-math.inf, -1.0)])
    assert entry["logprobs"] == [-9999.0, -10_000.0]
    assert entry["probs"][0] == pytest.approx(1 / (1 + math.exp(-1)))
    assert entry["label"] is None


def test_a_sum_may_be_lower_than_every_number_of_one_token():
    (entry,) = likelihood_entries(LikelihoodForm((None, None)), [ended(*[-2.0] * 6000), ended(-1)])
    assert entry["logprobs"] == [-12_000.0, -1.0]
    assert entry["probs"] == [0.0, 1.0]


def test_an_answer_without_log_probabilities_is_refused():
    form = LikelihoodForm((" a", " b", " c"))
    must_be_scores("classify", ENDED, likelihoods=form)
    with pytest.raises(InvalidRequest) as refused:
        must_be_scores("classify", [*ENDED[1:], ended()], likelihoods=form)
    assert refused.value.field == "body.model"


def test_labels_are_the_texts_as_far_as_all_have_room():
    def labels(*choices):
        form = likelihood_form_of({"choices": list(choices)})
        assert form is not None
        return form.labels

    assert labels(" a", " b") == (" a", " b")
    assert labels([1], [2]) == (None, None)
    assert labels("x" * 300, "y") == ("x" * MAX_LABEL_LENGTH, "y")
    many = labels(*["\N{GRINNING FACE}" * 300] * 64)
    assert set(many) == {"\N{GRINNING FACE}" * (MAX_LABELS_BYTES // 64 // 4)}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"choices": "a"}, "body.choices"),
        ({"choices": []}, "body.choices"),
        ({"choices": [" a"]}, "body.choices"),
        ({"choices": [" a"] * 65}, "body.choices"),
        ({"choices": [" a", 1]}, "body.choices.1"),
        ({"choices": [" a", [1]]}, "body.choices.1"),
        ({"choices": ["", " a"]}, "body.choices.0"),
        ({"choices": [" a", " b"], "input": [1, 2]}, "body.choices.0"),
        ({"choices": [[1], []], "input": [1, 2]}, "body.choices.1"),
        ({"choices": [[1], [2]], "input": [[1], []]}, "body.input.1"),
        ({"choices": [[1], [2]], "input": [1, -2]}, "body.input"),
        ({"choices": [[1], [2]], "input": [[1], "a"]}, "body.input.1"),
        ({"choices": [" a", " b"], "input": []}, "body.input"),
        ({"choices": [" a", " b"], "normalize": "max"}, "body.normalize"),
        ({"choices": [" a", " b"], "normalize": 1}, "body.normalize"),
        ({"normalize": "sum"}, "body.normalize"),
        ({"input": [1, 2]}, "body.input.0"),
    ],
)
def test_a_wrong_body_is_refused_by_the_name_of_its_field(body, field):
    with pytest.raises(InvalidRequest) as refused:
        scores_body("classify", {"input": "a"} | body)
    assert refused.value.field == field


@pytest.mark.parametrize("form", ["score", "rerank"])
def test_only_classify_knows_choices(form):
    with pytest.raises(InvalidRequest) as refused:
        scores_body(form, {"choices": [" a", " b"]})
    assert refused.value.field == "body.choices"


def test_the_form_is_read_back_from_its_fields_and_from_nothing_else():
    form = LikelihoodForm(("a", None), "mean")
    assert likelihood_form_from(form.fields(), num_choices=2) == form
    for fields, num_choices in (
        (form.fields(), 3),
        (form.fields() | {"normalize": "max"}, 2),
        (form.fields() | {"labels": ["a", 1]}, 2),
        (form.fields() | {"labels": "ab"}, 2),
        ({"labels": []}, 0),
        (None, 2),
    ):
        assert likelihood_form_from(fields, num_choices=num_choices) is None


def test_the_choice_of_a_request_has_the_callers_name():
    assert field_of("classify", "body.choice.1") == "body.choices.1"
    assert field_of("classify", "body.input.1") == "body.input.1"
    assert field_of("", "body.choice") == "body.choice"


def test_an_answer_of_many_inputs_is_made_and_written_in_parts():
    """Each part is made when its turn comes: the numbers of one call may be millions."""
    made = []

    class Ended(Completion):
        @property
        def embedding(self):
            made.append(self.request_id)
            return [-1.0, -2.0]

    ends = [
        Ended(f"{n}", State.COMPLETED, FinishReason.STOP, vector=b"12345678") for n in range(80)
    ]
    form = LikelihoodForm(("a", "b"))
    heading = Heading("req-1", "scores", 1, "m", form="classify", likelihoods=form)
    parts = written_response(heading, ends, num_prompts=40)
    text = next(parts)
    while not made:
        text += next(parts)
    assert len(made) <= 2 * TOKENS_PER_PART
    text += "".join(parts)
    assert len(made) == 80
    assert json.loads(text) == response(heading, ends, num_prompts=40)
