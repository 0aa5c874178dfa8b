"""What has come back for a line of a batch: one answer, of as many choices as it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.batch.lines import BatchLine
from quire.client.following import Following, joined
from quire.openai.answers import naming_prompt
from quire.wire.output import Completion, TokenChunk


@dataclass(slots=True)
class Answer:
    """The choices of a line that have completed, until all have or one has failed."""

    line: BatchLine
    completed: dict[int, Completion] = field(default_factory=dict)
    has_failed: bool = False

    @property
    def choices(self) -> list[Completion] | None:
        """All of them in their order; None as long as one is missing."""
        if len(self.completed) < self.line.num_choices:
            return None
        return [self.completed[choice] for choice in range(self.line.num_choices)]

    def named(self, completion: Completion, choice: int) -> Completion:
        """The end of a choice, with the place of its prompt among several where it refuses that."""
        line = self.line
        return naming_prompt(
            completion, choice, num_choices=line.num_choices, num_prompts=line.asked.num_prompts
        )


@dataclass(slots=True)
class OpenChoice:
    """A choice whose request is on its way, and what was read of it."""

    answer: Answer
    choice: int
    following: Following
    attempt: int = 0
    losses: int = 0
    #: An earlier run has submitted it, so an end that somebody asked for may be that run's.
    is_inherited: bool = False
    #: When there was news of it last, by the clock of the run.
    heard: float = 0.0
    chunks: list[TokenChunk] = field(default_factory=list)

    def complete(self, completion: Completion) -> list[Completion] | None:
        """Takes the end of this choice; returns those of all choices if it was the last."""
        self.answer.completed[self.choice] = joined(completion, self.chunks)
        return self.answer.choices


def open_choices(line: BatchLine) -> list[OpenChoice]:
    """The choices of a line that is begun."""
    answer = Answer(line)
    return [
        OpenChoice(answer, choice, Following(line.request_id(choice)))
        for choice in range(line.num_choices)
    ]
