"""Keywords that are written as other ones allow what they allow themselves, by another program."""

import json

import jsonschema
import pytest

from tests.service.constraints.judged import Judge


@pytest.mark.parametrize(
    "names",
    [
        {"pattern": "^[a-c]+$"},
        {"enum": ["b", "cab", 3]},
        {"const": "b"},
        {"minLength": 1, "maxLength": 3},
        {"enum": ["b", "x", "abcd"], "pattern": "^[a-c]+$"},
        {"$ref": "#/$defs/names"},
    ],
)
@pytest.mark.parametrize("beside", [{}, {"properties": {"b": {"const": 1}, "x": {}}}])
def test_names_that_their_schema_excludes_do_not_come(names, beside):
    schema = {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "propertyNames": names,
        "$defs": {"names": {"type": "string", "title": "N", "enum": ["b", "abcd"]}},
    } | beside
    judge, validator = Judge(schema), jsonschema.Draft202012Validator(schema)
    for name in ("", "b", "cab", "abcd", "x"):
        for value in (1, 2, None):
            is_valid = validator.is_valid({name: value})
            assert judge.lets(json.dumps({name: value})) == is_valid, (name, value)
