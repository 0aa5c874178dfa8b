"""A few generations of `make test-tools`, and what its judgement must notice."""

import json
from typing import Any

import pytest

from quire import LocalRedis
from tests.service.worker.constraints.called import FAMILIES
from tests.tools.formats import FORMATS, PLAIN
from tests.tools.judging import fault_of
from tests.tools.run import score_of

WEATHER = {"city": "Rome", "remark": "1"}


@pytest.mark.parametrize(("name", "seeds"), [("GLM 4.5", (3, 6, 7)), (PLAIN, (0, 2))])
def test_calls_are_valid_and_cuts_do_not_show(name: str, seeds: tuple[int, ...]) -> None:
    """The seeds of GLM begin calls."""
    with LocalRedis.start() as redis:
        score = score_of(FORMATS[name], seeds, redis_url=redis.url, queue="sample")
    assert score.fault == ""
    assert (score.valid, score.calling) == (len(seeds), len(seeds))
    assert score.cuts == score.equal > len(seeds)
    assert score.controls == score.caught > 0


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_as_its_family_writes_it_is_right_and_no_other_one(name: str) -> None:
    """The parser of transformers, which the run judges by, reads every format."""
    one = FORMATS[name]

    def told(values: dict[str, Any]) -> dict[str, Any]:
        function = {"name": "weather", "arguments": json.dumps(values)}
        return {"tool_calls": [{"function": function}]}

    text = one.family.write("weather", WEATHER)
    assert fault_of(one, text, told(WEATHER)) == ""
    assert "the gateway tells" in fault_of(one, text, told(WEATHER | {"remark": "2"}))
    assert "the gateway tells" in fault_of(one, text, {})
    wrong = {"city": "Paris", "remark": ""}
    assert "ValidationError" in fault_of(one, one.family.write("weather", wrong), told(wrong))


def test_every_family_has_a_row() -> None:
    assert {one.family.template for one in FORMATS.values()} >= {
        one.template for name, one in FAMILIES.items() if name != "seed"
    }
