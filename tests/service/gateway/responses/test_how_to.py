"""The examples of docs/how-to/responses.md run as they are."""

import re
import subprocess
import sys

from service.gateway import settings
from tests.service.builders import CHECKOUT

PAGE = (CHECKOUT / "docs" / "how-to" / "responses.md").read_text()


def test_the_examples_run(gateway, fake, script):
    fake.broker.beat_worker("w", "ready", {}, model="abacus")
    script.pieces = ["4", "6"]
    examples = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    assert str(settings.GATEWAY_PORT) in examples
    code = examples.replace(str(settings.GATEWAY_PORT), str(gateway.port))
    code += "\nprint(response.status, len(list(events)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["46", "completed 3", "completed 0"]
