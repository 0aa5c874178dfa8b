"""A few pictures of `make test-pictures ENGINE=vllm`."""

import pytest

from quire import LocalRedis

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` has it")

from tests.pictures.run import score_of


@pytest.mark.timeout(900)
def test_vllm_gives_the_tokens_of_transformers_and_goes_on_for_the_native_engine() -> None:
    with LocalRedis.start() as redis:
        score = score_of("smolvlm", 4, redis_url=redis.url, engine="vllm")
    assert score.fault == ""
    assert score.is_good and score.refused > 80
