"""Tries the installed package in an environment that has nothing else.

Arguments: the version, and the number of Lua scripts.
"""

import sys
from importlib import import_module, metadata, resources, util

import quire


def main(version: str, num_scripts: int) -> None:
    """AssertionError if a file, a public name or a schema is missing, or a module is too much."""
    assert metadata.version("quire-inference") == version
    package = resources.files("quire")
    assert str(package).startswith(sys.prefix), f"this is another quire: {package}"
    assert package.joinpath("py.typed").is_file()
    for name in quire.__all__:
        assert getattr(quire, name) is not None, name
    scripts = [path for path in _files(package) if path.name.endswith(".lua")]
    assert len(scripts) == num_scripts > 0, f"{len(scripts)} of {num_scripts} scripts"
    assert all(script.read_text("utf-8").strip() for script in scripts)
    for module in ("engine", "service", "models", "tests", "torch"):
        assert util.find_spec(module) is None, f"the environment has {module}, too"
    request = import_module("quire").GenerationRequest
    assert request.model_json_schema()["title"] == "GenerationRequest"


def _files(folder):
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
