"""Judges what concerns several requests: the turns of a session, and the stream of ends."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a session as its record holds it, in milliseconds of Redis.

    `claimed_ms` is the first claim, None if there was none; `finished_ms` is None before the end.
    """

    request_id: str
    session: str
    claimed_ms: int | None
    finished_ms: int | None

    def is_done_before(self, other: "Turn") -> bool:
        """It had ended when `other` was claimed first, or one of them never ran."""
        if self.claimed_ms is None or other.claimed_ms is None:
            return True
        return self.finished_ms is not None and self.finished_ms <= other.claimed_ms


def turn_violations(turns: Iterable[Turn]) -> Iterator[str]:
    """Two turns of one session that were open at workers at the same time."""
    for one, other in combinations(turns, 2):
        if one.session != other.session:
            continue
        if not one.is_done_before(other) and not other.is_done_before(one):
            yield f"{one.request_id} and {other.request_id}: turns that ran at the same time"


def told_violations(told: Iterable[tuple[str, str]], ended: Mapping[str, str]) -> Iterator[str]:
    """What the stream of ends tells that is not so, or not at all, or more than once.

    `told` are the id and the state of each of its entries, `ended` the state of each request that
    has ended, by id.
    """
    entries = list(told)
    times = Counter(request_id for request_id, _ in entries)
    for request_id in ended:
        if times[request_id] != 1:
            yield f"{request_id}: its end was told {times[request_id]} times"
    for request_id, state in entries:
        if ended.get(request_id) != state:
            yield f"{request_id}: told as {state}, and it is {ended.get(request_id, 'open')}"


@dataclass(frozen=True, slots=True)
class OrderPlant:
    """A scene in which one of these laws is broken, and the words of the audit for it."""

    found: Callable[[], Iterator[str]]
    words: str

    @property
    def is_found(self) -> bool:
        """The audit names what is broken."""
        return any(self.words in sentence for sentence in self.found())


#: Three turns, one after the other; the last was cancelled before any worker had it.
SOUND_TURNS = (
    Turn("first", "talk", 10, 20),
    Turn("second", "talk", 20, 35),
    Turn("third", "talk", None, 30),
    Turn("elsewhere", "other", 12, 40),
)
SOUND_ENDS = (("first", "completed"), ("second", "failed"))

ORDER_PLANTS: dict[str, OrderPlant] = {
    "a turn before its time": OrderPlant(
        lambda: turn_violations((*SOUND_TURNS, Turn("fourth", "talk", 34, 50))),
        "second and fourth: turns that ran at the same time",
    ),
    "an end that is not told": OrderPlant(
        lambda: told_violations(SOUND_ENDS[:1], dict(SOUND_ENDS)),
        "second: its end was told 0 times",
    ),
    "an end told twice": OrderPlant(
        lambda: told_violations((*SOUND_ENDS, SOUND_ENDS[0]), dict(SOUND_ENDS)),
        "first: its end was told 2 times",
    ),
    "an end told as another": OrderPlant(
        lambda: told_violations(SOUND_ENDS, {**dict(SOUND_ENDS), "second": "completed"}),
        "second: told as failed, and it is completed",
    ),
}
