"""What the progress of a run tells: counts, a rate, and what an earlier call has computed."""

import time

from quire.client import progress as progress_module
from quire.client.progress import Progress
from quire.testing import FakeQuire


def test_what_an_earlier_call_has_computed_is_counted_apart_and_not_in_the_rate(monkeypatch):
    told = []
    monkeypatch.setattr(
        progress_module, "_in_terminal", lambda: lambda now: told.append(now.counts)
    )
    with FakeQuire(answer=lambda request: request.body["prompt"]) as fake:
        fake.client().generate(["a", "b"], name="run")
        fake.client().generate(["a", "b", "c"], name="run")
    assert (told[0], told[-1]) == ("0/2 done", "3/3 done, 2 earlier")
    clock = iter([0.0, 10.0, 10.0, 10.0, 10.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock, 10.0))
    progress = Progress("run", 40, None)
    for is_earlier in [True] * 18 + [False] * 2:
        progress.has_ended(is_failed=False, is_earlier=is_earlier)
    assert progress.text == "20/40 done, 18 earlier, 0.2/s, 0:10, 1:40 left"
    progress.done = progress.earlier = 18
    assert progress.text == "18/40 done, 18 earlier, 0.0/s, 0:10"


def test_the_progress_tells_counts_rate_and_what_is_left():
    drawn = []
    progress = Progress("run", 4, lambda now: drawn.append((now.done, now.failed)))
    progress.has_ended(is_failed=False)
    progress.has_ended(is_failed=True)
    progress.show()
    assert drawn == [(1, 0), (2, 1)]
    assert progress.text.startswith("2/4 done, 1 failed, ")
    assert progress.text.endswith(" left")
