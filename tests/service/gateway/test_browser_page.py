"""The page of examples/browser runs in node, with the parts of a browser replaced."""

import re
import shutil
import subprocess
from urllib.request import Request, urlopen

import pytest

from service.gateway.settings import GATEWAY_PORT
from tests.service.builders import CHECKOUT

PAGE = (CHECKOUT / "examples" / "browser" / "index.html").read_text()
ORIGIN = "http://127.0.0.1:8000"
#: A page's elements, and an EventSource that reads until the end of the stream.
BROWSER = """
const elements = {"#output": {textContent: ""}, "#prompt": {value: "12+34="}, form: {}};
globalThis.document = {querySelector: (name) => elements[name]};
const kept = {};
globalThis.sessionStorage = {setItem: (k, v) => { kept[k] = v; }, getItem: (k) => kept[k]};
let closed;
const finished = new Promise((resolve) => { closed = resolve; });
globalThis.EventSource = class {
  constructor(url) { this.read(url); }
  close() { closed(); }
  async read(url) {
    const text = await (await fetch(url)).text();
    for (const line of text.split("\\n")) {
      if (line.startsWith("data: ")) this.onmessage({data: line.slice(6)});
    }
  }
};
"""
ASK = """
await elements.form.onsubmit({preventDefault() {}});
await finished;
console.log(elements["#output"].textContent);
"""


def test_the_page_shows_the_whole_answer(gateway, script):
    if shutil.which("node") is None:
        pytest.skip("no node on this machine")
    script.pieces = ["4", "6"]
    (program,) = re.findall(r'<script type="module">\n(.*?)</script>', PAGE, re.DOTALL)
    assert str(GATEWAY_PORT) in program
    program = program.replace(str(GATEWAY_PORT), str(gateway.port))
    command = ["node", "--input-type=module", "--eval", BROWSER + program + ASK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "46\n"


def test_the_page_may_read_the_id_of_its_request(start):
    gateway = start(allowed_origins=(ORIGIN,))
    headers = {"Origin": ORIGIN, "Content-Type": "application/json", "Idempotency-Key": "k"}
    call = Request(f"{gateway.url}/completions", b'{"prompt": "12+34="}', headers)
    with urlopen(call, timeout=60) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
        assert "X-Request-ID" in answer.headers["Access-Control-Expose-Headers"]
