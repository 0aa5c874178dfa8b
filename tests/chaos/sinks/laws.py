"""The laws of batches over HTTP and of webhooks, as sentences for each violation."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.sinks.receiver import Hook

#: The code of a line that the end of a cancelled batch has interrupted.
CANCELLED = "batch_cancelled"

#: The last event of each response.
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")

#: What has ended, and how: the type of its webhook, and its id.
End = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Result:
    """A line of a result file: its text, or the code of its error."""

    custom_id: str
    said: str
    is_error: bool = False


def result_violations(
    wanted: Mapping[str, str], results: Sequence[Result], *, was_cancelled: bool = False
) -> Iterator[str]:
    """What is wrong with the results of one batch. `wanted`: custom_id -> text, or code."""
    times = Counter(result.custom_id for result in results)
    for name in wanted:
        if times[name] != 1:
            yield f"line {name} has {times[name]} results"
    for name in sorted(set(times) - set(wanted)):
        yield f"line {name} is in the results, and not in the input"
    for result in results:
        may_be_cancelled = was_cancelled and result.is_error and result.said == CANCELLED
        if result.said != wanted.get(result.custom_id, result.said) and not may_be_cancelled:
            yield f"line {result.custom_id} says {result.said!r:.60}, not what it has to"


def told_once(ended: Iterable[End], told: Sequence[End]) -> Iterator[str]:
    """What the stream of ends tells that is not so, or not once."""
    times, known = Counter(told), set(ended)
    for kind, name in known:
        if times[kind, name] != 1:
            yield f"{name}: its end ({kind}) was told {times[kind, name]} times"
    for kind, name in sorted(set(told) - known):
        yield f"{name}: told as {kind}, and did not end so"


def hook_violations(told: Iterable[End], hooks: Sequence[Hook]) -> Iterator[str]:
    """What is wrong with the webhooks of these ends."""
    ids: dict[End, set[str]] = {}
    bodies: dict[str, set[str]] = {}
    ends: dict[str, set[End]] = {}
    for hook in hooks:
        ids.setdefault(hook.end, set()).add(hook.webhook_id)
        bodies.setdefault(hook.webhook_id, set()).add(hook.body)
        ends.setdefault(hook.webhook_id, set()).add(hook.end)
    known = set(told)
    for kind, name in known:
        if (kind, name) not in ids:
            yield f"{name}: its end ({kind}) was posted by no webhook"
    for (kind, name), found in ids.items():
        if len(found) > 1:
            yield f"{name}: its end ({kind}) was posted under {len(found)} ids"
        if (kind, name) not in known:
            yield f"{name}: posted as {kind}, which was not told"
    for webhook_id, found_ends in ends.items():
        if len(found_ends) > 1:
            yield f"{webhook_id}: one id for {len(found_ends)} ends"
        elif len(bodies[webhook_id]) > 1:
            yield f"{webhook_id}: posted with {len(bodies[webhook_id])} bodies"


def event_violations(
    name: str, events: Sequence[Mapping[str, Any]], text: str, *, was_cancelled: bool = False
) -> Iterator[str]:
    """What is wrong with the events that a caller has collected from all gateways."""
    numbers = [event["sequence_number"] for event in events]
    if numbers != list(range(len(events))):
        yield f"{name}: its events have the numbers {numbers}"
    said = "".join(
        event["delta"] for event in events if event["type"] == "response.output_text.delta"
    )
    if said != text and not (was_cancelled and text.startswith(said)):
        yield f"{name}: its events say {said!r:.60}, not what they have to"
    if not events or events[-1]["type"] not in LAST_EVENTS:
        yield f"{name}: its last event is none"


@dataclass(frozen=True, slots=True)
class SinkPlant:
    """A scene in which one of these laws is broken, and the words of the audit for it."""

    found: Callable[[], Iterator[str]]
    words: str

    @property
    def is_found(self) -> bool:
        """The audit names what is broken."""
        return any(self.words in sentence for sentence in self.found())


SOUND_WANTED = {"row-0": "abc", "row-1": "de", "bad": "invalid_request"}
SOUND_RESULTS = (
    Result("row-1", "de"),
    Result("bad", "invalid_request", is_error=True),
    Result("row-0", "abc"),
)
SOUND_TOLD = (("request.completed", "r0"), ("batch.completed", "b"))


def hook_of(end: End, webhook_id: str, *, mark: str = "") -> Hook:
    """A webhook of this end."""
    return Hook(webhook_id, f'{{"type": "{end[0]}", "data": {{"id": "{end[1]}"}}{mark}}}')


#: The first was posted twice.
SOUND_HOOKS = (
    hook_of(SOUND_TOLD[0], "m0"),
    hook_of(SOUND_TOLD[1], "m1"),
    hook_of(SOUND_TOLD[0], "m0"),
)

SOUND_TEXT = "abc"
SOUND_EVENTS: tuple[Mapping[str, Any], ...] = (
    {"sequence_number": 0, "type": "response.created"},
    {"sequence_number": 1, "type": "response.output_text.delta", "delta": "a"},
    {"sequence_number": 2, "type": "response.output_text.delta", "delta": "bc"},
    {"sequence_number": 3, "type": "response.completed"},
)

SINK_PLANTS: dict[str, SinkPlant] = {
    "an event of a response lost": SinkPlant(
        lambda: event_violations("r", (*SOUND_EVENTS[:1], *SOUND_EVENTS[2:]), SOUND_TEXT),
        "have the numbers [0, 2, 3]",
    ),
    "an event of a response twice": SinkPlant(
        lambda: event_violations("r", (*SOUND_EVENTS[:2], *SOUND_EVENTS[1:]), SOUND_TEXT),
        "have the numbers [0, 1, 1, 2, 3]",
    ),
    "another text of a response": SinkPlant(
        lambda: event_violations("r", SOUND_EVENTS, "abd"), "not what they have to"
    ),
    "a response without an end": SinkPlant(
        lambda: event_violations("r", SOUND_EVENTS[:-1], SOUND_TEXT), "its last event is none"
    ),
    "a line without a result": SinkPlant(
        lambda: result_violations(SOUND_WANTED, SOUND_RESULTS[1:]), "line row-1 has 0 results"
    ),
    "a line in output and errors": SinkPlant(
        lambda: result_violations(
            SOUND_WANTED, (*SOUND_RESULTS, Result("row-0", CANCELLED, is_error=True))
        ),
        "line row-0 has 2 results",
    ),
    "a line that nobody sent": SinkPlant(
        lambda: result_violations(SOUND_WANTED, (*SOUND_RESULTS, Result("other", "x"))),
        "and not in the input",
    ),
    "a wrong answer": SinkPlant(
        lambda: result_violations(SOUND_WANTED, (Result("row-1", "dx"), *SOUND_RESULTS[1:])),
        "not what it has to",
    ),
    "a line cut off in a batch that nobody cancelled": SinkPlant(
        lambda: result_violations(
            SOUND_WANTED, (Result("row-1", CANCELLED, is_error=True), *SOUND_RESULTS[1:])
        ),
        "not what it has to",
    ),
    "an end of a batch not told": SinkPlant(
        lambda: told_once(SOUND_TOLD, SOUND_TOLD[:1]), "was told 0 times"
    ),
    "an end of a batch told twice": SinkPlant(
        lambda: told_once(SOUND_TOLD, (*SOUND_TOLD, SOUND_TOLD[1])), "was told 2 times"
    ),
    "an end told as another": SinkPlant(
        lambda: told_once(SOUND_TOLD, (SOUND_TOLD[0], ("batch.failed", "b"))), "did not end so"
    ),
    "an end without a webhook": SinkPlant(
        lambda: hook_violations(SOUND_TOLD, SOUND_HOOKS[:1]), "was posted by no webhook"
    ),
    "an end under two ids": SinkPlant(
        lambda: hook_violations(SOUND_TOLD, (*SOUND_HOOKS, hook_of(SOUND_TOLD[1], "m2"))),
        "was posted under 2 ids",
    ),
    "one id for two ends": SinkPlant(
        lambda: hook_violations(SOUND_TOLD, (*SOUND_HOOKS, hook_of(SOUND_TOLD[1], "m0"))),
        "one id for 2 ends",
    ),
    "a webhook with another body": SinkPlant(
        lambda: hook_violations(
            SOUND_TOLD, (*SOUND_HOOKS, hook_of(SOUND_TOLD[0], "m0", mark=', "x": 1'))
        ),
        "posted with 2 bodies",
    ),
    "a webhook of what did not end": SinkPlant(
        lambda: hook_violations(SOUND_TOLD[:1], SOUND_HOOKS), "which was not told"
    ),
}
