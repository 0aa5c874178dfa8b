"""The file of results: `{workload: {case: cell}}`. Several calls may add to it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parents[1] / "results"
#: The committed files, one for each kind of processor; the tables of the docs are made from them.
COMMITTED = tuple(
    _FOLDER / name for name in ("peers.json", "peers-amx.json", "peers-small-cache.json")
)
#: The same for hybrid models, and for files with quantized weights, which have other peers.
HYBRID = _FOLDER / "peers-hybrid.json"
QUANTIZED = _FOLDER / "peers-quantized.json"
#: In the order of the tables.
FILES = (*COMMITTED, HYBRID, QUANTIZED)


def read_cells(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """All cells of a file; empty if it does not exist."""
    if not path.exists():
        return {}
    cells: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text())
    return cells


def write_cells(path: Path, case: str, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the cells of a case, workload -> cell, to a file."""
    content = read_cells(path)
    for workload, cell in cells.items():
        content.setdefault(workload, {})[case] = dict(cell)
    ordered = {workload: dict(sorted(content[workload].items())) for workload in sorted(content)}
    path.write_text(json.dumps(ordered, indent=2) + "\n")
