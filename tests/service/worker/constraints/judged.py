"""Judges whole texts by the constraint of a schema, and reads what it is refused with."""

from typing import Any

import pytest

from quire.errors import InvalidRequest
from quire.wire.constraints import Constraint
from tests.service.walks import compiled, pair_tokenizer


class Judge:
    """Whether whole texts are outputs that a schema's constraint lets come."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._matcher = compiled().compile(Constraint("json_schema", schema, "body.json_schema"))

    def lets(self, text: str) -> bool:
        matcher = self._matcher.deep_copy()
        # Gives the lexer, which the copies share, as much work again as one step may do.
        matcher.compute_bitmask()
        tokens = pair_tokenizer().encode(text).ids
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def refusal_of(schema: dict[str, Any]) -> str:
    with pytest.raises(InvalidRequest) as refused:
        compiled().compile(Constraint("json_schema", schema, "body.json_schema"))
    assert refused.value.field == "body.json_schema"
    assert "\n" not in refused.value.message
    return refused.value.message
