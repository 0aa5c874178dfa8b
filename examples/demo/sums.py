"""The demo's tasks for abacus, the embedded model: each has one right answer."""

import json
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from examples.demo.audit import Ended, Verdict
from examples.demo.follower import Followed
from examples.demo.report import figures
from examples.demo.stage import Stage
from examples.make_requests import REQUESTS_FILE
from models.abacus.tasks import answer, check
from quire import Client, State

MIN_CORRECT_SHARE = 0.99
GOOD = "every token is there once, across the kill: none lost, none repeated"


def run(stage: Stage) -> dict[str, Any]:
    """Submit all tasks, kill a worker half-way, and judge every answer; returns the figures."""
    requests = submit_all(stage.client)
    played = stage.play(requests, kill_at=half_of_the_tokens(requests))
    verdict = stage.audit(played.follower, is_right=is_right)
    for line in [*mistakes(verdict), *stage.whole_answer(played)]:
        print(line, file=sys.stderr)
    killed = len(stage.fleet.killed)
    return figures(played.follower, verdict, killed=killed, seconds=played.seconds)


def is_good(values: Mapping[str, Any]) -> bool:
    """Whether the figures are as promised."""
    return bool(
        values["killed_workers"] == 1
        and values["completed"] == values["submitted"]
        and values["lost_tokens"] == values["repeated_tokens"] == 0
        and values["correct"] >= MIN_CORRECT_SHARE * values["submitted"]
    )


def submit_all(client: Client) -> list[Followed]:
    """Submit every line of examples/requests.jsonl."""
    lines = [json.loads(line) for line in REQUESTS_FILE.read_text().splitlines()]
    requests = [
        {
            "prompt": line["prompt"],
            "sampling": {"max_tokens": line["max_tokens"], "temperature": 0.0},
            "priority": line["priority"],
            "metadata": {"custom_id": line["custom_id"]},
        }
        for line in lines
    ]
    handles = client.submit_many(requests)
    now = time.monotonic()
    return [
        Followed(handle.request_id, line["prompt"], submitted=now)
        for handle, line in zip(handles, lines, strict=True)
    ]


def half_of_the_tokens(requests: Iterable[Followed]) -> int:
    """Half of the tokens of all right answers; a token is a byte, and each answer has an end."""
    return sum(len(answer(request.prompt)) + 1 for request in requests) // 2


def is_right(ended: Ended) -> bool:
    """Whether the text is the answer."""
    return check(ended.prompt, ended.text)


def mistakes(verdict: Verdict) -> list[str]:
    """A line for each answer that is not right, which says whose mistake it is."""
    lines = []
    for request in verdict.wrong:
        if request.completion.state is not State.COMPLETED:
            lines.append(f"{request.prompt!r} ended as {request.completion.state}")
            continue
        lines.append(
            f"{request.prompt!r} was answered {request.text!r}, and {answer(request.prompt)!r} is "
            "right"
        )
    if any(request.completion.state is State.COMPLETED for request in verdict.wrong):
        lines.append(
            "  wrong answers are the model's: it is small and errs on a few of a thousand "
            "(models/abacus/README.md)"
        )
    if lines and not verdict.lost_tokens and not verdict.repeated_tokens:
        lines.append("  their streams are whole all the same: no token was lost or repeated")
    return lines
