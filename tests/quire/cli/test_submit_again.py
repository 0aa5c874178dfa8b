"""`quire submit` with an id says the same request again, or is told that it is another one."""

import pytest

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]


def test_the_same_prompt_under_the_same_id_is_the_same_request(quire):
    for _ in range(2):
        assert quire("submit", "x", "--id", "a") == (0, "a\n", "")


def test_another_prompt_under_a_known_id_is_exit_code_2_and_names_the_id(quire):
    quire("submit", "x", "--id", "a")
    code, out, err = quire("submit", "other prompt", "--id", "a", "--follow")
    assert (code, out) == (2, "")
    assert "request_id: a exists already and is a different request" in err
