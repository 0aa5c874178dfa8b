"""What a runner takes from its device where no setting says it."""

import pytest
import torch

from engine.model.load import load_runner as loading
from tests.engine.model.builders import make_runner


class Chosen(Exception):
    """Ends a load when it knows its limits."""


@pytest.mark.parametrize(
    ("device", "asked", "rows", "tokens"),
    [("cpu", None, 64, 256), ("cuda", None, 256, 2048), ("cuda", 64, 64, 2048)],
)
def test_how_many_requests_run_at_once_is_for_the_device_to_say(
    device, asked, rows, tokens, monkeypatch
):
    def choose(loaded, *, limits, **options):
        raise Chosen(limits)

    monkeypatch.setattr(loading, "choose", choose)
    with pytest.raises(Chosen) as raised:
        loading.load_runner(
            "nowhere", max_num_seqs=asked, device=device, load=lambda path, **options: None
        )
    (limits,) = raised.value.args
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (rows, tokens)


def test_products_on_a_device_round_their_sums_once(model_folder):
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    before = [getattr(matmul, name) for name in names]
    try:
        for name in names:
            setattr(matmul, name, True)
        make_runner(model_folder("llama"))
        assert [getattr(matmul, name) for name in names] == [False, False]
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)
