"""Makes the tables of docs/explanation/benchmarks.md from the committed results.

python -m benchmarks.common.table            print them
python -m benchmarks.common.table --write    write them between the two markers of that page
"""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.cases import CASES
from benchmarks.common.results import FILES, read_cells
from benchmarks.peers.register import OURS_DEQUANTIZED, PEERS, ROOT

PAGE = ROOT / "docs" / "explanation" / "benchmarks.md"
BEGIN = "<!-- benchmarks: made by `python -m benchmarks.common.table --write` -->"
END = "<!-- benchmarks: end -->"

#: Workload -> the figure to show, its unit, and the key of our ratios to the peers.
METRICS = {
    "W1": ("output_tokens_per_second", "tok/s", "ratio"),
    "W2": ("inter_token_ms", "ms between tokens", "inter_token_ratio"),
    "W3": ("output_tokens_per_second", "tok/s", "ratio"),
    "W4": ("output_tokens_per_second", "tok/s", "ratio"),
}

Cells = Mapping[str, Mapping[str, Mapping[str, Any]]]


def table(cells: Cells) -> str:
    """A Markdown table with a row for each measured case and workload, a column for each engine."""
    found = [cells[workload][case] for workload in cells for case in cells[workload]]
    names = [name for name in PEERS if any(name in cell[METRICS["W1"][0]] for cell in found)]
    titles = ["", *(PEERS[name].title for name in names), "against the best"]
    lines = [_row(titles), _row(["---"] * len(titles))]
    for case in CASES:
        for workload, (metric, unit, ratio) in METRICS.items():
            cell = cells.get(workload, {}).get(case)
            if cell is not None:
                shown = [_figure(cell[metric].get(name)) for name in names]
                title = f"{case.replace('-', ' ')} {workload}, {unit}"
                lines.append(_row([title, *shown, _against_the_best(cell[ratio], ratio)]))
    return "\n".join(lines)


def section(cells: Cells) -> str:
    """The table, and a sentence with the machine."""
    found = [cells[workload][case] for workload in cells for case in cells[workload]]
    machines = sorted(
        {f"{cell['machine']['cores']} cores, {cell['machine']['processor']}" for cell in found}
    )
    failed = sorted(
        f"{case} {workload}"
        for workload in cells
        for case, cell in cells[workload].items()
        if not cell["correct"]
    )
    lines = [table(cells), "", f"Measured on: {'; '.join(machines)}."]
    if failed:
        lines.append(f"The gate was not passed by: {', '.join(failed)}.")
    return "\n".join(lines)


def sections(paths: Iterable[Path]) -> str:
    """The sections of several files, in order."""
    return "\n\n".join(section(read_cells(path)) for path in paths)


def put_between_the_markers(text: str, content: str) -> str:
    """Replaces the content between the markers in a text. ValueError without markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks the two markers of the table")
    return f"{before}{begin}\n{content}\n{end}{after}"


def _against_the_best(ratios: Mapping[str, float], kind: str) -> str:
    """How many times as fast as the best peer we are. For latencies, smaller ratios are faster."""
    of_peers = [value for name, value in ratios.items() if name != OURS_DEQUANTIZED]
    if not of_peers:
        return ""
    times = min(of_peers) if kind == "ratio" else 1.0 / max(of_peers)
    return f"{times:.2f} times"


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"change {PAGE.name}")
    parser.add_argument("--results", type=Path, nargs="+", default=FILES)
    arguments = parser.parse_args()
    content = sections(arguments.results)
    if arguments.write:
        PAGE.write_text(put_between_the_markers(PAGE.read_text(), content))
    else:
        print(content)


if __name__ == "__main__":
    main()
