"""The order of swaps against computations, by streams that note who waits for whom."""

import contextlib

import pytest
import torch

from engine.batch import BlockCopy
from engine.model.device.copy_lane import CudaLane
from engine.model.device.kv_pool import KVPool, LayerShape


class RecordedStreams:
    """`torch.cuda` as far as the lane uses it; notes who waits for whom."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.current = RecordedStream("computing", self.events)

    def Stream(self):  # noqa: N802  The name is torch's.
        return RecordedStream("copying", self.events)

    def current_stream(self):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        self.events.append(f"enter {stream.name}")
        yield
        self.events.append(f"leave {stream.name}")


class RecordedStream:
    def __init__(self, name, events) -> None:
        self.name = name
        self._events = events

    def wait_stream(self, other) -> None:
        self._events.append(f"{self.name} waits for {other.name}")


def test_swaps_begin_after_what_was_computed_and_end_before_what_will_be():
    streams = RecordedStreams()
    pool = KVPool(
        (LayerShape(1, 4, 4),), num_blocks=2, block_size=2, dtype=torch.float32,
        num_host_blocks=1, lane=CudaLane(streams),
    )  # fmt: skip
    pool.swap_out([])
    assert streams.events == []
    pool.swap_out([BlockCopy(1, 0)])
    assert streams.events == [
        "copying waits for computing",
        "enter copying",
        "leave copying",
        "computing waits for copying",
    ]


def test_a_failed_swap_still_holds_the_computations_back():
    streams = RecordedStreams()
    lane = CudaLane(streams)
    with pytest.raises(RuntimeError, match="lost"), lane.copying():
        raise RuntimeError("the copy was lost")
    assert streams.events[-1] == "computing waits for copying"
