"""What the page on the client shows runs, and says again what it says again."""

import re

from quire import State
from quire.testing.in_memory import FakeQuire
from tests.service.builders import CHECKOUT

PAGE = (CHECKOUT / "docs" / "how-to" / "client.md").read_text()


def answer(request):
    prompt = request.body["prompt"]
    if "json_schema" not in request.body:
        return prompt
    first, _, second = prompt.strip("=").partition("+")
    return f'{{"value": {int(first) + int(second)}}}'


def test_what_the_page_on_the_client_shows_runs(capsys):
    column, program, loop_over_ends = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    with FakeQuire(answer=answer) as fake:
        shown = {"quire": fake.client(), "kept_cursor": ""}
        exec(column, shown)
        assert [one.value for one in shown["results"].parsed] == [46, 11]
        fake.requests.clear()
        exec(program, shown)
        exec(loop_over_ends.replace("timeout=5", "timeout=0"), shown)
        counts = shown["group"].counts()
        texts = {choice.result(timeout=30).text for choice in shown["choices"]}
        ids = [request.id for request in fake.requests]
    assert counts == {State.COMPLETED: 100}
    assert (len(shown["choices"]), texts) == (4, {"12+34="})
    assert ids.count("row-1") == 1 and len(ids) == 105
    assert "eval-7~" in capsys.readouterr().out
