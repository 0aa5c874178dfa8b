"""The answer to one line of a batch: the outputs of all its choices."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.batch.lines import BatchLine
from quire.client.following import Following, joined
from quire.openai.answers import naming_prompt
from quire.wire.output import Completion, TokenChunk


@dataclass(slots=True)
class LineAnswer:
    """Collects the completed choices of a line, until all have completed or one has failed."""

    line: BatchLine
    completed: dict[int, Completion] = field(default_factory=dict)
    has_failed: bool = False

    @property
    def choices(self) -> list[Completion] | None:
        """All choices in order; None while one is missing."""
        if len(self.completed) < self.line.num_choices:
            return None
        return [self.completed[choice] for choice in range(self.line.num_choices)]

    def named(self, completion: Completion, choice: int) -> Completion:
        """The end of a choice. If one of several prompts was refused, the error has its index."""
        line = self.line
        return naming_prompt(
            completion,
            choice,
            num_choices=line.num_choices,
            num_prompts=line.call.num_prompts,
            form=line.form,
            use=line.call.prompt_use,
        )


@dataclass(slots=True)
class OpenChoice:
    """A choice whose request has not ended, and the part of its output that was read."""

    answer: LineAnswer
    choice: int
    following: Following
    attempt: int = 0
    losses: int = 0
    #: An earlier run submitted it. So if it is cancelled or expires, that run may be the cause.
    is_inherited: bool = False
    #: Monotonic time, in seconds, at which its log last had something new.
    heard: float = 0.0
    chunks: list[TokenChunk] = field(default_factory=list)

    def complete(self, completion: Completion) -> list[Completion] | None:
        """Stores the end of this choice; returns those of all choices if it was the last one."""
        self.answer.completed[self.choice] = joined(completion, self.chunks)
        return self.answer.choices


def open_choices(line: BatchLine) -> list[OpenChoice]:
    """The choices of a line, none of them submitted yet."""
    answer = LineAnswer(line)
    return [
        OpenChoice(answer, choice, Following(line.request_id(choice)))
        for choice in range(line.num_choices)
    ]
