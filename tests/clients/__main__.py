"""Runs every example of docs/how-to/clients.md, and prints a table: `make test-clients`.

Installs the libraries into build/clients, never into the environment of the project. What cannot be
installed is skipped, with the reason. Exits with 1 if an example fails.

The model is the embedded one with a chat template that knows functions. It has not learned to call
any: the calls are enforced. What needs no functions also runs with SmolLM2, if it can be fetched.
An EventSource in Chromium follows an answer of each model, over cut connections (browser.mjs).
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from models.fetch import MODELS, fetch
from quire import LocalRedis
from tests.clients.page import PAGE, Example, examples
from tests.service.builders import CHECKOUT, eventually
from tests.service.processes import LoggedProcess

FOLDER = CHECKOUT / "build" / "clients"
MODEL = "abacus-with-tools"
#: What npm and pip install.
NODE = ("openai", "ai", "@ai-sdk/openai-compatible", "zod", "puppeteer-core@24.43.1")
#: What the examples do that need no functions: those of the real model.
WITHOUT_FUNCTIONS = ("a stream goes on after an event", "text, streamed")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PYTHON = ("openai", "langchain-openai", "instructor", "litellm", "lm_eval[api]", "transformers")
INSTALL_SECONDS = 600
EXAMPLE_SECONDS = 120
START_SECONDS = 300
#: The last characters of a reason that are printed.
REASON_LENGTH = 300

TEMPLATE = (
    "{{- bos_token -}}{%- for tool in tools or [] -%}{{- tool.function.name -}}{%- endfor -%}"
    "{%- for message in messages -%}{{- message.content -}}"
    "{%- for call in message.tool_calls or [] -%}{{- call.function.name -}}{%- endfor -%}"
    "{%- endfor -%}"
)


class NotInstalled(Exception):
    """Why a library is not there."""


@dataclass(frozen=True)
class Outcome:
    """What became of one example: ok, failed or skipped, and why."""

    example: Example
    result: str
    reason: str = ""


def main() -> int:
    """The command; returns its exit code."""
    found = examples(PAGE.read_text())
    with gateway(model_folder()) as url:
        outcomes = [outcome_of(one, url) for one in (*found, in_browser(MODEL))]
    outcomes += outcomes_of_real_model([one for one in found if one.what in WITHOUT_FUNCTIONS])
    widths = [max(len(one.example.client) for one in outcomes)]
    widths.append(max(len(one.example.what) for one in outcomes))
    for one in outcomes:
        cells = (one.example.client.ljust(widths[0]), one.example.what.ljust(widths[1]))
        print(*cells, one.result, one.reason, sep="  ")
    return int(any(one.result == "failed" for one in outcomes))


def outcome_of(example: Example, url: str) -> Outcome:
    """Run one example."""
    try:
        command = {"js": in_node, "browser": in_chromium, "python": in_python}[example.language]()
    except NotInstalled as error:
        return Outcome(example, "skipped", str(error))
    program = example.program(url, MODEL)
    try:
        done = subprocess.run(
            [*command, program],
            capture_output=True,
            text=True,
            timeout=EXAMPLE_SECONDS,
            cwd=FOLDER,
        )
    except subprocess.TimeoutExpired:
        return Outcome(example, "failed", f"takes more than {EXAMPLE_SECONDS} s")
    if done.returncode == 0 and example.prints in done.stdout:
        return Outcome(example, "ok", " ".join(done.stdout.split())[:60])
    told = " ".join((done.stderr or done.stdout).split())
    return Outcome(example, "failed", told[-REASON_LENGTH:])


def in_browser(model: str) -> Example:
    """The example of the browser, with a model of this name."""
    code = Path(__file__).with_name("browser.mjs").read_text()
    code = code.replace("the-browser", browser_path() or "the-browser")
    return Example("Chromium", f"EventSource, {model}", "the same text", "browser", code)


def outcomes_of_real_model(chosen: Sequence[Example]) -> list[Outcome]:
    """These examples, and that of the browser, with SmolLM2."""
    named = [replace(one, what=f"{one.what}, SmolLM2") for one in chosen]
    every = [*named, in_browser("SmolLM2")]
    try:
        file = fetch(MODELS["smollm2"])
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        return [Outcome(one, "skipped", str(error)[-REASON_LENGTH:]) for one in every]
    with gateway(file) as url:
        return [outcome_of(one, url) for one in every]


def browser_path() -> str | None:
    """The program of a browser; None if there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


def in_chromium() -> tuple[str, ...]:
    """As `in_node`. NotInstalled, also without a browser."""
    if browser_path() is None:
        raise NotInstalled("there is no Chromium; name one in CHROMIUM")
    return in_node()


@cache
def in_node() -> tuple[str, ...]:
    """The command that runs a module of JavaScript beside the packages. NotInstalled."""
    if not shutil.which("node") or not shutil.which("npm"):
        raise NotInstalled("there is no node and npm on this machine")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "package.json").write_text(json.dumps({"private": True, "type": "module"}))
    _install(["npm", "install", "--no-audit", "--no-fund", *NODE])
    return ("node", "--input-type=module", "--eval")


@cache
def in_python() -> tuple[str, ...]:
    """The command that runs Python code with the packages. NotInstalled."""
    environment = FOLDER / "python"
    python = environment / "bin" / "python"
    if not python.exists():
        _install([sys.executable, "-m", "venv", str(environment)])
    _install([str(python), "-m", "pip", "install", "--quiet", *PYTHON])
    return (str(python), "-c")


def _install(command: list[str]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    # The constraints of the project are not those of other libraries.
    environ = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    environ.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            cwd=FOLDER,
            env=environ,
        )
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{command[0]} takes more than {INSTALL_SECONDS} s") from None
    if done.returncode:
        raise NotInstalled(" ".join(done.stderr.split())[-REASON_LENGTH:])


@contextmanager
def gateway(model: Path) -> Iterator[str]:
    """A server of Redis, a worker with this model, and a gateway; the address of the gateway."""
    with LocalRedis.start() as redis:
        where = ("--redis-url", redis.url, "--queue", "clients")
        worker_flags = (
            *where,
            "--model",
            str(model),
            "--served-model-name",
            MODEL,
            "--publish-share",
            "1",
        )
        with (
            LoggedProcess("service", *worker_flags) as worker,
            LoggedProcess("service.gateway", *where) as front,
        ):
            port = front.wait_for_event("gateway ready")["http_port"]
            # A real model is converted and rehearsed first.
            eventually(lambda: is_ready(worker), "worker ready", seconds=START_SECONDS)
            yield f"http://127.0.0.1:{port}"


def is_ready(worker: LoggedProcess) -> bool:
    """Whether the worker serves; fails if it has ended."""
    assert worker.process.poll() is None, "".join(worker.raw_log)
    return any(line["event"] == "worker ready" for line in worker.log)


def model_folder() -> Path:
    """A copy of the embedded model, with a chat template that knows functions."""
    folder, source = FOLDER / "model", CHECKOUT / "models" / "abacus"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(source / name, folder / name)
    facts = json.loads((source / "tokenizer_config.json").read_text())
    written = json.dumps(facts | {"chat_template": TEMPLATE})
    (folder / "tokenizer_config.json").write_text(written)
    return folder


if __name__ == "__main__":
    sys.exit(main())
