"""A few pictures of `make test-pictures`, and what its judgement must notice."""

from dataclasses import replace

import pytest

from quire import LocalRedis
from tests.pictures.run import MOST_SECONDS, score_of


@pytest.mark.timeout(300)
def test_pictures_get_the_tokens_of_transformers_and_hostile_ones_are_refused() -> None:
    with LocalRedis.start() as redis:
        score = score_of("smolvlm", 3, redis_url=redis.url)
    assert score.fault == ""
    assert score.is_good and score.refused > 80
    for wrong in (
        *({"equal": 2}, {"resumed": 0}, {"odd_equal": 0}, {"refused": 0}, {"accepted_hostile": 1}),
        *({"asked_inside": 1}, {"slowest_seconds": MOST_SECONDS}),
    ):
        assert not replace(score, **wrong).is_good
