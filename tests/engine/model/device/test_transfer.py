"""What the host may do while a device is still at what it was sent."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.device.transfer import Sender, index_on


class Event:
    """A moment of a device that nothing is known of until somebody waits for it."""

    def __init__(self, moments: list[str]) -> None:
        self._moments = moments

    def record(self) -> None:
        self._moments.append("sent")

    def synchronize(self) -> None:
        self._moments.append("read")


class SlowCuda:
    """Its moments in the order in which the host learns of them."""

    def __init__(self) -> None:
        self.moments: list[str] = []

    def Event(self) -> Event:  # noqa: N802 - torch's name.
        return Event(self.moments)


def test_what_a_device_may_still_have_to_read_is_not_written_before_it_has():
    cuda, there = SlowCuda(), torch.zeros(2, 1)
    sender = Sender(torch.zeros(3), cuda=cuda)
    sender.array(2, 1)[:] = 1.0
    assert cuda.moments == []
    sender.send(there)
    assert there.tolist() == [[1.0], [1.0]]
    assert cuda.moments == ["sent"]
    sender.array(1, 3)
    assert cuda.moments == ["sent", "read"]


class Journeys(TorchDispatchMode):
    """The sizes of what goes to another device, and whether it goes in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        source = args[1] if func.overloadpacket is torch.ops.aten.copy_ else args[0]
        if result.device != source.device:
            self.seen.append((source.numel(), source.is_contiguous() and result.is_contiguous()))
        return result


def test_part_of_every_row_goes_in_one_piece_and_without_the_rest():
    there = torch.zeros(8, 1000, device="meta")
    sender = Sender(torch.zeros(there.numel()))
    with Journeys() as journeys:
        sender.send(there[:5, :7])
    assert journeys.seen == [(5 * 7, True)]


def test_part_of_every_row_comes_where_it_belongs():
    there = torch.zeros(3, 4)
    sender = Sender(torch.zeros(12))
    sender.array(2, 3)[:] = [[1, 2, 3], [4, 5, 6]]
    sender.send(there[:2, :3])
    assert there.tolist() == [[1, 2, 3, 0], [4, 5, 6, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    "indices", [[3, 1], [[0, 3], [2, 1]], []], ids=["rows", "rows and tokens", "none"]
)
def test_an_index_is_of_whole_numbers_even_where_there_are_none(indices):
    index = index_on(indices, torch.device("cpu"))
    assert (index.dtype, index.tolist()) == (torch.int64, indices)
