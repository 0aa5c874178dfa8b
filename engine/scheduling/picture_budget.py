"""Which pictures one step computes with. Knows no model, and not what an encoder remembers.

The encoder takes each picture whole and alone, however few of its tokens a step computes. Until the
step has ended, no request gets a token, and no cancel counts. So the tokens of a step do not bound
its time: 64 rows may each begin a picture with one token.
"""

from collections.abc import Sequence

from engine.batch import Batch
from engine.picture import Picture, pictures_between


class PictureBudget:
    """The pictures of the step being planned; each counts once, whichever rows have it.

    A step begins another picture only while those that it has begun are shorter than `num_tokens`
    in all. So it always has room for the first one, and is never longer than `num_tokens` by more
    than one picture. Those of the step before are free, if it was launched: they have just been
    encoded.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = self._left = num_tokens
        #: Of the pictures that are free now, and of those that the next plan has free.
        self._keys: set[bytes] = set()
        self._encoded: set[bytes] = set()

    def begin_step(self) -> "PictureBudget":
        """Begin to plan the next step; returns itself."""
        self._keys, self._encoded = self._encoded, set()
        self._left = self._num_tokens
        return self

    def end_step(self, batch: Batch) -> None:
        """Make the pictures of a launched step free in the next one.

        A plan that failed never comes here. Rows of requests that have ended do not count: they may
        have failed before anything was encoded.
        """
        self._encoded = {
            picture.key
            for row, request in zip(batch.catch_up_rows, batch.catch_up_requests, strict=True)
            if not request.is_finished
            for picture in pictures_between(row.pictures, row.start, row.end)
        }

    def reach(self, pictures: Sequence[Picture], start: int, end: int) -> int:
        """How far a row may go that would compute the tokens `start .. end - 1` of a prompt."""
        left = self._left
        for picture in pictures_between(pictures, start, end):
            if picture.key not in self._keys:
                if left <= 0:
                    return max(start, picture.start)
                left -= picture.length
        return end

    def take(self, pictures: Sequence[Picture], start: int, end: int) -> None:
        """Count the pictures of a planned row."""
        for picture in pictures_between(pictures, start, end):
            if picture.key not in self._keys:
                self._left -= picture.length
                self._keys.add(picture.key)
