"""What the callers of a schedule want and what is known of them, whichever process they live in."""

import random
from dataclasses import dataclass, field

from quire.wire.output import State
from quire.wire.protocol import GenerationRequest
from tests.chaos.audit import Entry, first_difference
from tests.chaos.clients import Confused, Departed, Ended, Event, Read, Rewound, Submitted, Task


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request of a plan, and the token indices at which its reader leaves and comes back."""

    request: GenerationRequest
    tokens: tuple[int, ...]
    text: str
    departures: tuple[int, ...]


@dataclass(slots=True)
class Notes:
    """What a caller has seen, through all its lives."""

    is_submitted: bool = False
    token_ids: list[int] = field(default_factory=list)
    prefix_hash: str = ""
    rewinds: int = 0
    departures: int = 0
    resubmits: int = 0
    ended: bool = False
    #: The code of the error the request ended with, empty when it completed.
    error: str = ""
    violations: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Cancellation:
    """What the broker answered to a call to cancel, and what the keys held right after it.

    From then on nobody claims the request, and where the answer is an end, its log is what it is
    for ever. Unless Redis loses what it knew: by then it had done so `num_losses` times.
    """

    answer: State
    entries: tuple[Entry, ...]
    #: The fields of the record that a claim would change.
    claims: tuple[bytes | None, ...]
    num_losses: int


class Caller:
    """One request as seen by its callers. Heard by one thread at a time; read by any."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.notes = Notes()
        #: What came of every call to cancel it.
        self.cancellations: list[Cancellation] = []

    @property
    def request_id(self) -> str:
        return self.wanted.request.id

    @property
    def is_through(self) -> bool:
        """Nothing more is to be heard of it."""
        return self.notes.ended or bool(self.notes.violations)

    @property
    def task(self) -> Task:
        """What the next client process has to know."""
        notes = self.notes
        return Task(
            self.wanted.request,
            is_submitted=notes.is_submitted,
            token_ids=tuple(notes.token_ids),
            prefix_hash=notes.prefix_hash,
            departures=self.wanted.departures[notes.departures :],
        )

    def hear(self, event: Event) -> None:
        """Takes note of what a client process says."""
        notes = self.notes
        match event:
            case Submitted(again=again):
                notes.is_submitted = True
                notes.resubmits += again
            case Read():
                self._read(event)
            case Rewound(kept=kept, prefix_hash=prefix_hash):
                # Whoever was told before a single token has nothing to forget.
                notes.rewinds += bool(notes.token_ids)
                del notes.token_ids[kept:]
                notes.prefix_hash = prefix_hash
            case Departed():
                notes.departures += 1
            case Ended(error=error):
                notes.error = error
                notes.ended = True
            case Confused(sentence=sentence):
                self._violation(sentence)

    def _read(self, chunk: Read) -> None:
        notes = self.notes
        if chunk.start != len(notes.token_ids):
            self._violation(f"reader at {len(notes.token_ids)} was given {chunk.start}")
        notes.token_ids += chunk.token_ids
        notes.prefix_hash = chunk.prefix_hash
        wrong = first_difference(notes.token_ids, self.wanted.tokens)
        if wrong is not None:
            self._violation(f"reader was shown a wrong token {wrong}")

    def _violation(self, sentence: str) -> None:
        # One that went wrong goes on going wrong: the first sentence says it all.
        if not self.notes.violations:
            self.notes.violations.append(f"{self.request_id}: {sentence}")


def draw_departures(random_: random.Random, *, num_tokens: int) -> tuple[int, ...]:
    """The indices after which a reader of this many tokens leaves: none, one or two."""
    count = random_.choice((0, 0, 1, 2))
    return tuple(sorted(random_.randrange(1, num_tokens + 1) for _ in range(count)))
