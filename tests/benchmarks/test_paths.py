"""The gate of the benchmark of the paths: no figures for other tokens than those of the model."""

import pytest

from benchmarks.bench_paths import pass_gate, small_batch
from benchmarks.common.gate import Agreement


def test_in_float32_every_token_of_both_paths_is_the_reference_s():
    right, wrong = Agreement(100, 100), Agreement(99, 100)
    pass_gate({"fast": right, "wide": right}, exact=True)
    for fast, wide in ((wrong, right), (right, wrong), (wrong, wrong)):
        with pytest.raises(SystemExit, match="other tokens than transformers"):
            pass_gate({"fast": fast, "wide": wide}, exact=True)


def test_in_bfloat16_the_fast_path_is_right_at_least_as_often():
    pass_gate({"fast": Agreement(90, 100), "wide": Agreement(90, 100)}, exact=False)
    with pytest.raises(SystemExit, match="agrees less often"):
        pass_gate({"fast": Agreement(89, 100), "wide": Agreement(90, 100)}, exact=False)


def test_the_batch_is_always_the_same_and_has_the_sizes_asked_for():
    options = {"requests": 3, "prompt_tokens": 5, "output_tokens": 7, "vocab_size": 50}
    batch = small_batch(**options)
    assert batch == small_batch(**options)
    assert [len(item.prompt_token_ids) for item in batch.items] == [5, 5, 5]
    assert {item.num_output_tokens for item in batch.items} == {7}
    assert len({item.prompt_token_ids for item in batch.items}) == 3
