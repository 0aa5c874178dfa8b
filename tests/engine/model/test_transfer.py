"""What the host may do while a device is still at what it was sent."""

import torch

from engine.model.transfer import Sender


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
    cuda, there = SlowCuda(), torch.zeros(2)
    sender = Sender(torch.zeros(3), cuda=cuda)
    sender.array()[:] = 1.0
    assert cuda.moments == []
    sender.send(there)
    assert there.tolist() == [1.0, 1.0]
    assert cuda.moments == ["sent"]
    sender.array()
    assert cuda.moments == ["sent", "read"]
