"""Every code that a caller may meet is told on a page, and no page tells of another."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from quire.batch.lines import CANCELLED, EXPIRED
from service.shared.families import DEAD_REASONS

ROOT = Path(__file__).parents[2]
#: What makes an error, and at which place of its arguments the code stands.
OF_REQUESTS = {"ErrorInfo": 0, "short_error": 0, "_ending": None}
OF_LINES = {"BadLine": 2, "WrongField": 0, "bad": 0, "_fail": 1, "_fail_answer": 1}
MAKERS = OF_REQUESTS | OF_LINES


def codes(*makers: str) -> set[str]:
    """The literal codes given to these makers in the contract and in the service."""
    return {
        code
        for room in ("quire", "service")
        for path in (ROOT / room).rglob("*.py")
        for maker, code in codes_in(ast.parse(path.read_text()))
        if maker in makers
    }


def codes_in(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        maker = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
        place = MAKERS.get(maker)
        given = [word.value for word in node.keywords if word.arg == "code"]
        if place is not None:
            given += node.args[place : place + 1]
        for argument in given if maker in MAKERS else ():
            if isinstance(argument, ast.Constant):
                yield maker, argument.value


def rows(page: str, heading: str) -> set[str]:
    """The codes in the first column of the table below a heading, or whose head it is."""
    text = (ROOT / "docs" / page).read_text().partition(heading)[2].partition("\n#")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return {code for cell in cells for code in re.findall(r"`(\w+)`", cell)}


def test_every_code_of_a_request_is_in_the_document_of_the_protocol():
    # Intake gives the reasons of its dead letters as codes.
    of_requests = codes(*OF_REQUESTS) | set(DEAD_REASONS)
    assert len(of_requests) > 10
    assert rows("reference/protocol.md", "## Error codes") == of_requests - {"result_expired"}
    assert "`result_expired`" in (ROOT / "docs" / "reference" / "protocol.md").read_text()


def test_every_code_of_a_line_is_in_the_document_of_batches():
    of_lines = codes(*OF_LINES) | {EXPIRED, CANCELLED}
    assert len(of_lines) > 8
    assert rows("how-to/batch.md", "| code in the error file |") == of_lines


def test_a_code_that_is_made_anywhere_would_be_found():
    tree = ast.parse("f(ErrorInfo('a', 'm')); _ending(s, r, code='b'); self._fail(line, 'c', 'm')")
    assert set(codes_in(tree)) == {("ErrorInfo", "a"), ("_ending", "b"), ("_fail", "c")}
