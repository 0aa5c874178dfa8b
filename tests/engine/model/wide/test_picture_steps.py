"""What one step encodes is bounded: others get their tokens and cancels count in between."""

from collections.abc import Iterator

import pytest

from engine.engine import Engine
from engine.model.wide.picture_reader import PictureReader
from tests.engine.model.builders import NUM_TOKENS, engine_over, generate, save_model
from tests.engine.model.wide.pictured import Prompt, Stage, config_of, whole_class

#: All come to their first picture in the same step, with rows of one token.
PROMPTS: dict[int, Prompt] = {
    5: (1, "e", 1, "f", 1, "g", 1),
    6: (1, "h", 1, "i", 1, "j", 1),
    7: (1, "k", 1, "e", 1, "l", 1),
    8: (1, "n", 1, "o", 1, "p", 1),
}
#: The tokens of a step: one for each of five requests.
BUDGET = 5


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    folder = tmp_path_factory.mktemp("model")
    model_class = whole_class("smolvlm")
    return Stage("smolvlm", save_model(config_of("smolvlm"), folder, model_class=model_class))


class CountingReader(PictureReader):
    """Knows by their number of outputs which pictures it has encoded."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.lengths: list[int] = []

    def _encode(self, pixels):
        outputs = super()._encode(pixels)
        self.lengths.append(len(outputs))
        return outputs


@pytest.fixture
def reader(stage: Stage) -> Iterator[CountingReader]:
    model = stage.runner.model
    before, model.picture_reader = model.picture_reader, CountingReader(model.model)
    yield model.picture_reader
    model.picture_reader = before


def requests(stage: Stage) -> list:
    """One that decodes soon, and those with pictures."""
    decode = stage.request(0, (1,))
    return [decode, *(stage.request(index, prompt) for index, prompt in PROMPTS.items())]


def engine_of(stage: Stage) -> Engine:
    return engine_over(
        stage.runner,
        reads_pictures=True,
        max_num_batched_tokens=BUDGET,
        long_prefill_token_threshold=1,
    )


def alone(stage: Stage) -> dict[str, list[int]]:
    return {
        one.request_id: generate(stage.runner, [one], reads_pictures=True).tokens[one.request_id]
        for one in requests(stage)
    }


def test_a_step_encodes_no_more_than_its_budget_and_every_request_says_what_it_says_alone(
    stage, reader
):
    expected, tokens, steps = alone(stage), {}, []
    reader._kept.clear()
    engine = engine_of(stage)
    for request in requests(stage):
        engine.add_request(request)
    while engine.has_work():
        reader.lengths.clear()
        outputs = engine.step(lambda: 0.0)
        for output in outputs:
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        steps.append((list(reader.lengths), {output.request_id for output in outputs}))
    assert tokens == expected
    lengths = [length for encoded, _ in steps for length in encoded]
    # One picture is in two prompts.
    assert len(lengths) == 11
    assert all(sum(encoded) - BUDGET < max(lengths) for encoded, _ in steps)
    # Together, the first pictures of the four prompts are far beyond it.
    assert sum(stage.num_placeholders(name, 3) for name in "ehkn") > BUDGET + max(lengths)
    # The request that decodes has waited for none of those that were encoded after it.
    assert all("0" in told for _, told in steps[:NUM_TOKENS])
    assert sum(bool(encoded) for encoded, _ in steps[:NUM_TOKENS]) > 1


def test_pictures_of_a_request_that_is_cancelled_in_the_meantime_are_not_encoded(stage, reader):
    engine = engine_of(stage)
    for request in requests(stage):
        engine.add_request(request)
    while not reader.lengths:
        engine.step(lambda: 0.0)
    begun = list(reader.lengths)
    # Of the four pictures that are to be encoded next.
    assert len(begun) == 2
    for index in PROMPTS:
        engine.abort(str(index))
    engine.step(lambda: 0.0)
    assert reader.lengths == begun
