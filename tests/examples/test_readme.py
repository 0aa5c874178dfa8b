"""What the README and the tutorials show can be typed as it stands, and prints what they say."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from quire.batch import run_batch
from quire.cli.verbs import VERBS
from quire.testing.in_memory import FakeQuire
from quire.wire.protocol import GenerationRequest
from service.worker.settings.config import Settings
from tests.house.test_documents import parser_of
from tests.service.builders import CHECKOUT

README = (CHECKOUT / "README.md").read_text()
WORKER_PAGE = (CHECKOUT / "docs" / "how-to" / "worker.md").read_text()
TUTORIALS = {
    path.stem: path.read_text() for path in sorted((CHECKOUT / "docs" / "tutorials").glob("*.md"))
}
PAGES = "\n".join([README, WORKER_PAGE, *TUTORIALS.values()])

#: The address in every example.
ADDRESS = "redis://127.0.0.1:6379/0"


def lines_that_begin_with(command: str, text: str = PAGES) -> list[list[str]]:
    """The arguments of each command line in a block, without the remark behind it."""
    found = re.findall(rf"^{re.escape(command)} (.*)$", text, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


@pytest.mark.parametrize("arguments", lines_that_begin_with("quire"), ids=" ".join)
def test_a_command_line_is_understood(arguments):
    assert parser_of(arguments[0]).parse_args(arguments[1:])


def test_every_verb_of_the_command_is_named():
    block = next(
        block for block in WORKER_PAGE.split("```") if block.lstrip().startswith("quire submit")
    )
    assert {verb.name for verb in VERBS} <= set(re.findall(r"[a-z-]+", block))


def extras_of(requirement):
    return requirement.removeprefix("quire-inference[").removesuffix("]").split(",")


def test_the_environment_of_the_demo_has_what_the_readme_goes_on_to_use():
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (whole,) = [each for each in extras["demo"] if each.startswith("quire-inference[")]
    (of_worker,) = [each for each in extras["worker"] if each.startswith("quire-inference[")]
    for command, extra in (
        *(("quire serve", extra) for extra in ("worker", "gateway", "console", "local")),
        ("schema=", "grammars"),
    ):
        assert command in README
        assert extra in (*extras_of(whole), *extras_of(of_worker))
    assert '-e ".[demo]"' in (CHECKOUT / "Makefile").read_text()


def test_the_worker_is_started_by_flags_it_has():
    for text, count in ((README, 1), (WORKER_PAGE, 1), (TUTORIALS["first-job"], 2)):
        commands = lines_that_begin_with("quire worker", text)
        assert len(commands) == count
        assert {Settings.parser().parse_args(one).redis_url for one in commands} == {ADDRESS}


def test_the_batch_of_the_tutorial_prints_what_it_says(tmp_path, monkeypatch, capsys):
    write, read = re.findall(r"```python\n(.*?)```", TUTORIALS["a-batch"], flags=re.DOTALL)
    (said,) = re.findall(r"It prints `2000 (.*?)`", TUTORIALS["a-batch"])
    monkeypatch.chdir(tmp_path)
    # Fewer lines: the queue in memory takes milliseconds for each.
    assert "range(2000)" in write
    exec(write.replace("range(2000)", "range(100)"), {})

    def answer(request: GenerationRequest) -> str:
        left, right = request.body["prompt"].removesuffix("=").split("+")
        return str(int(left) + int(right))

    with FakeQuire(answer=answer) as fake:
        summary = run_batch(fake.client(), Path("in.jsonl"), Path("out.jsonl"))
    assert summary.completed == 100
    exec(read, {})
    assert capsys.readouterr().out == f"100 {said}\n"


def test_the_scripts_of_the_browser_tutorial_are_those_of_the_page():
    page = (CHECKOUT / "examples" / "browser" / "index.html").read_text()
    blocks = re.findall(r"```js\n(.*?)```", TUTORIALS["stream-to-a-browser"], flags=re.DOTALL)
    assert len(blocks) == 2
    assert [block for block in blocks if block not in page] == []
