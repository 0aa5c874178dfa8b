"""`quire submit` says what the output has to be, and from which adapter."""

import json

import pytest

from quire.wire.constraints import CONSTRAINTS

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture
def body_of(quire):
    """Submits with some flags; returns the body of the request that came of them."""

    def submit(*flags):
        code, out, err = quire("submit", "x", *flags)
        assert (code, err) == (0, "")
        return json.loads(quire("inspect", out.strip(), "--json")[1])["request"]["body"]

    return submit


def test_an_output_can_be_held_to_a_pattern_or_to_some_texts(body_of):
    assert body_of("--regex", "[0-9]+")["regex"] == "[0-9]+"
    assert body_of("--choice", "yes", "--choice", "no")["choice"] == ["yes", "no"]
    assert body_of("--json-object")["json_object"] is True


def test_a_schema_and_a_grammar_are_read_from_files(body_of, tmp_path):
    schema, grammar = tmp_path / "city.json", tmp_path / "sum.lark"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    grammar.write_text('start: "é"\n', encoding="utf-8")

    assert body_of("--json-schema", str(schema))["json_schema"] == SCHEMA
    assert body_of("--grammar", str(grammar))["grammar"] == 'start: "é"\n'


def test_no_constraint_is_asked_for_where_no_flag_says_so(body_of):
    assert not body_of().keys() & set(CONSTRAINTS)


def test_an_adapter_is_asked_for_by_its_name(body_of, quire):
    assert body_of("--adapter", "sql")["adapter"] == "sql"
    assert "adapter" not in body_of()
    code, out, err = quire("submit", "x", "--adapter", "a:b")
    assert (code, out) == (2, "") and "body.adapter" in err


def test_there_is_one_constraint_at_most(quire):
    code, out, err = quire("submit", "x", "--regex", "a", "--json-object")
    assert (code, out) == (2, "")
    assert "not allowed with" in err


@pytest.mark.parametrize("flag", ["--json-schema", "--grammar"])
def test_a_file_that_cannot_be_read_is_exit_code_2_and_one_sentence(quire, tmp_path, flag):
    (tmp_path / "latin").write_bytes(b'"\xe9"')
    for name in ("missing", "latin", "."):
        code, out, err = quire("submit", "x", flag, str(tmp_path / name))
        assert (code, out) == (2, "")
        assert f"argument {flag}: " in err and "Traceback" not in err


@pytest.mark.parametrize("text", ["{bad", "[]", "3", '{"a":' * 100_000])
def test_a_file_that_holds_no_schema_is_exit_code_2_and_one_sentence(quire, tmp_path, text):
    (tmp_path / "schema.json").write_text(text)
    code, out, err = quire("submit", "x", "--json-schema", str(tmp_path / "schema.json"))
    assert (code, out) == (2, "")
    assert "argument --json-schema: not" in err
