"""The example of docs/reference/batches.md, as it stands there."""

import json
import re

from tests.service.batcher.builders import batcher_of, ended, line
from tests.service.builders import CHECKOUT

PAGE = CHECKOUT / "docs" / "reference" / "batches.md"


def test_the_example_of_the_page_runs(front, worker, tmp_path, monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    address = "http://127.0.0.1:10402/v1"
    assert address in example
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(json.dumps(line("row-1")) + "\n")
    # Its reader waits before it looks at the batch.
    begin, _, rest = example.replace(address, front.gateway.url).partition(
        "batch = client.batches.r"
    )
    names: dict[str, object] = {}
    exec(begin, names)
    with batcher_of(front.queue, front.folder):
        ended(front.openai, names["batch"].id)  # type: ignore[attr-defined]
    exec(f"batch = client.batches.r{rest}", names)
    assert json.loads(capsys.readouterr().out)["custom_id"] == "row-1"
    names["client"].close()  # type: ignore[attr-defined]
