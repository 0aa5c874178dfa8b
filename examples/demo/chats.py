"""The demo's chats for a real model: each answer is compared with that of an undisturbed run.

Nobody knows the right answers, so the same chats with the same seeds are answered twice: first by
workers that nobody disturbs, then by workers one of which is killed. Both must be equal.
"""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.demo.audit import Ended
from examples.demo.follower import Followed
from examples.demo.report import figures
from examples.demo.stage import Stage
from quire import Client

Chat = Sequence[Mapping[str, str]]

CHATS: Sequence[Chat] = (
    *(
        [{"role": "user", "content": question}]
        for question in (
            "How does a lighthouse work?",
            "Explain what a message queue is, to a child.",
            "Write a short story about a fox and a river.",
            "What should I see in Lisbon in two days?",
            "Write a Python function that counts the words of a file.",
            "Why is the sky blue, and why is a sunset red?",
            "Give me a recipe for vegetable soup.",
            "Erzähle mir etwas über Wien.",
            "Quels sont les avantages du vélo en ville ?",
            "List five habits of people who sleep well, and say why each helps.",
        )
    ),
    [
        {"role": "system", "content": "You are a sailor, and you answer like one."},
        {"role": "user", "content": "What do you do in a storm?"},
    ],
    [
        {"role": "user", "content": "My name is Mira, and I teach physics."},
        {"role": "assistant", "content": "Nice to meet you, Mira! What can I do for you?"},
        {"role": "user", "content": "Write a welcome to my new class, with my name."},
    ],
)
MAX_TOKENS = 160
#: Of every second chat; the others are greedy.
TEMPERATURE = 0.7
#: Characters of a passage on each side of the kill.
PASSAGE_CHARACTERS = 50


GOOD = "each answer is the undisturbed one, across the kill: no token lost, repeated or changed"


def run(stage: Stage, *, max_tokens: int = MAX_TOKENS, kill_after: float = 0.5) -> dict[str, Any]:
    """Answer the chats undisturbed, then with a kill, and compare; returns the figures.

    They are those of the second run. `correct` counts the answers that are those of the first run,
    `changed_answers` the others. `kill_after` is the share of all tokens that the kill waits for.
    """
    print("first the answers of workers that nobody disturbs", file=sys.stderr)
    requests = submit_all(stage.client, max_tokens=max_tokens)
    undisturbed = Undisturbed.of(stage.play(requests, kill_at=None).follower.requests.values())
    print("now the same chats, and a kill in mid-sentence", file=sys.stderr)
    requests = submit_all(stage.client, max_tokens=max_tokens)
    played = stage.play(requests, kill_at=int(undisturbed.num_tokens * kill_after))
    verdict = stage.audit(played.follower, is_right=undisturbed.is_same)
    for line in passages(played.follower.requests.values()):
        print(line, file=sys.stderr)
    for line in [*changes(undisturbed, verdict.wrong), *stage.whole_answer(played)]:
        print(line, file=sys.stderr)
    killed = len(stage.fleet.killed)
    values = figures(played.follower, verdict, killed=killed, seconds=played.seconds)
    return values | {"changed_answers": values["submitted"] - verdict.correct}


def is_good(values: Mapping[str, Any]) -> bool:
    """Whether the figures are as promised."""
    return bool(
        values["killed_workers"] >= 1
        and values["resumed_requests"] >= 1
        and values["completed"] == values["submitted"]
        and values["lost_tokens"] == values["repeated_tokens"] == values["changed_answers"] == 0
    )


def submit_all(client: Client, *, max_tokens: int = MAX_TOKENS) -> list[Followed]:
    """Submit every chat. The seeds are fixed, so that a second run has the same answers."""
    requests = [
        {
            "messages": chat,
            "sampling": {
                "max_tokens": max_tokens,
                "temperature": TEMPERATURE * (index % 2),
                "seed": index,
            },
        }
        for index, chat in enumerate(CHATS)
    ]
    handles = client.submit_many(requests)
    now = time.monotonic()
    return [
        Followed(handle.request_id, chat[-1]["content"], submitted=now)
        for handle, chat in zip(handles, CHATS, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """The token ids and the text of each answer of the undisturbed run, by its question."""

    answers: Mapping[str, tuple[tuple[int, ...], str]]

    @classmethod
    def of(cls, requests: Iterable[Followed]) -> "Undisturbed":
        return cls({each.prompt: (tuple(each.token_ids), each.text) for each in requests})

    @property
    def num_tokens(self) -> int:
        return sum(len(token_ids) for token_ids, _ in self.answers.values())

    def is_same(self, ended: Ended) -> bool:
        """Whether an answer has the tokens and the text of the undisturbed one."""
        return self.answers.get(ended.prompt) == (ended.token_ids, ended.text)


def passages(requests: Iterable[Followed]) -> list[str]:
    """Where the answers were taken over: the words before and after, with `|` between them."""
    lines = []
    for request in requests:
        if request.resumed_at is not None:
            token, character = request.resumed_at
            before = request.text[:character][-PASSAGE_CHARACTERS:]
            after = request.text[character:][:PASSAGE_CHARACTERS]
            line = f"token {token:>3} of {request.prompt!r}: …{before}|{after}…"
            lines.append(line.replace("\n", " "))
    return lines


def changes(undisturbed: Undisturbed, wrong: Iterable[Ended]) -> list[str]:
    """A line for each answer that is not that of the undisturbed run, with the first difference."""
    lines = []
    for ended in wrong:
        expected, _ = undisturbed.answers[ended.prompt]
        pairs = zip(expected, ended.token_ids, strict=False)
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        at = min(len(expected), len(ended.token_ids)) if same is None else same
        lines.append(
            f"{ended.prompt!r} ended as {ended.completion.state}, and differs from the undisturbed "
            f"answer at token {at}"
        )
    return lines
