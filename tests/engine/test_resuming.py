"""Published tokens that are not what this engine would have said: it takes them as they are."""

import pytest

from engine.output.detokenizer import Detokenizer
from engine.request import FinishReason
from tests.engine.builders import Machine, make_config, make_request


class Letters:
    """A TokenDecoder: every token is a letter."""

    def step(self, token_id: int) -> str:
        return chr(token_id)

    def rest(self) -> str:
        return ""


class Failing(Letters):
    """One that fails on a token."""

    def step(self, token_id: int) -> str:
        raise ValueError(f"no letter {token_id}")


def test_a_stop_string_before_the_last_published_token_ends_the_request():
    """As where the worker that published them had another tokenizer."""
    machine = Machine(make_config())
    text = Detokenizer(Letters(), stop=("cd",))
    machine.add(make_request("a", output=map(ord, "abcdef"), max_tokens=20, text=text))
    machine.run()
    assert (machine.finish_reason("a"), machine.tokens("a")) == (FinishReason.STOP, [])
    assert machine.batches == []


def test_a_request_that_cannot_be_replayed_leaves_nothing_behind():
    machine = Machine(make_config())
    request = make_request("a", output=[5], text=Detokenizer(Failing()), deadline=9.0)
    with pytest.raises(ValueError, match="no letter 5"):
        machine.add(request)
    assert not machine.engine.has_work()
    machine.add(make_request("a"))
    assert len(machine.run().tokens("a")) == 4
