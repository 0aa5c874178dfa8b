"""The page of clients is run as it stands, and an example that fails is told."""

import sys

import pytest

from tests.clients import __main__ as runner
from tests.clients.page import PAGE, Example, examples

TEXT = PAGE.read_text()


def test_every_code_of_the_page_is_an_example_and_names_gateway_and_model() -> None:
    found = examples(TEXT)
    assert len(found) == TEXT.count("```js\n") + TEXT.count("```python\n") > 5
    for one in found:
        program = one.program("http://127.0.0.1:1", "some-model")
        assert "10402" in one.code and "10402" not in program
        assert "my-model" in one.code and "my-model" not in program


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print('so', 'my-model')", "ok"),
        ("print('no')", "failed"),
        ("print('so'); raise SystemExit(1)", "failed"),
    ],
)
def test_an_example_is_ok_if_it_prints_what_the_page_says_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, code: str, result: str
) -> None:
    monkeypatch.setattr(runner, "in_python", lambda: (sys.executable, "-c"))
    runner.FOLDER.mkdir(parents=True, exist_ok=True)
    one = runner.outcome_of(Example("c", "w", "so", "python", code), "http://127.0.0.1:1")
    assert one.result == result


def test_what_cannot_be_installed_is_skipped_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> tuple[str, ...]:
        raise runner.NotInstalled("no network")

    monkeypatch.setattr(runner, "in_node", refuse)
    one = runner.outcome_of(Example("c", "w", "so", "js", "1"), "http://127.0.0.1:1")
    assert (one.result, one.reason) == ("skipped", "no network")
    with pytest.raises(runner.NotInstalled):
        runner._install([sys.executable, "-c", "raise SystemExit('no wheel')"])


def test_the_model_of_the_run_knows_functions() -> None:
    from service.worker.model.text import ModelTokenizer

    model = ModelTokenizer.load(str(runner.model_folder()))
    tools = [{"type": "function", "function": {"name": "weather"}}]
    asked = [{"role": "user", "content": "12+34="}]
    plain = model.encode_chat(asked, created_ms=0).token_ids
    assert len(model.encode_chat(asked, created_ms=0, tools=tools).token_ids) > len(plain)
