"""Converts calls of OpenAI's API to Quire's requests, for batch files and for the gateway.

Pure functions from JSON to messages. sampling.py defines which fields a body may have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from quire.errors import InvalidRequest
from quire.openai.metadata import metadata_of
from quire.openai.prompts import ANSWERED, PromptUse, prompt_use_of, without_echo
from quire.openai.tools.argument_types import argument_types
from quire.openai.tools.reasoning import (
    NO_REASONING,
    ReasoningSetting,
    ReasoningUse,
    reasoning_use_of,
)
from quire.wire.choices import MAX_CHOICES, check_number, id_of, seed_of
from quire.wire.compact_json import with_whitespace
from quire.wire.json_text import read_object
from quire.wire.logprobs import MAX_PROMPT_LOGPROBS
from quire.wire.message import Message
from quire.wire.pictures import taken_out
from quire.wire.pooling import MAX_INPUTS, is_pooled
from quire.wire.protocol import MAX_REQUEST_ID_LENGTH, GenerationRequest, Kind
from quire.wire.refusals import validated
from quire.wire.sampling import ParsedBody
from quire.wire.sampling import parse_body as check_body
from quire.wire.tools import ToolUse

#: The supported paths of OpenAI's API -> the kind of request.
KINDS: dict[str, Kind] = {
    "/v1/chat/completions": "chat.completions",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
}

#: The longest values of all fields of a request other than its body.
LONGEST_ID = "x" * MAX_REQUEST_ID_LENGTH
LONGEST_ENVELOPE: Mapping[str, Any] = {"tenant": "x" * 64, "deadline_ms": (1 << 53) - 1}


#: More tokens than any tokenizer puts before a prompt.
MAX_ADDED_TOKENS = 8


@dataclass(frozen=True)
class OpenAIRequest:
    """One call of OpenAI's API. It becomes one request of ours for each choice.

    The body of a prompt is checked once, however many choices the prompt has.

    Completions may have a list of prompts; each prompt gets `n` choices. Embeddings may have a list
    of inputs, which count as prompts with one choice each. Scores may have a list of choices, which
    are the choices of each input; see likelihoods.py.

    `digest` has at least 47 hexadecimal digits. If the body has no seed, the seed is derived from
    the digest, so that equal digests give the same generation.
    """

    kind: Kind
    body: Mapping[str, Any]
    digest: str

    @property
    def num_prompts(self) -> int:
        """The number of prompts; a chat has one."""
        return len(self._prompts)

    @property
    def num_choices(self) -> int:
        """The number of choices of all prompts together. InvalidRequest if there are too many."""
        number, most = self._choices_per_prompt * self.num_prompts, most_choices(self.kind)
        if number > most:
            message = f"needs {number} choices; at most {most} are allowed"
            raise InvalidRequest(f"body.{self._field}", message)
        return number

    @property
    def tool_names(self) -> tuple[str, ...]:
        """The names of the functions that the output may call. InvalidRequest."""
        return self._tools.names if self._tools is not None else ()

    @property
    def argument_types(self) -> dict[str, dict[str, str]]:
        """The types of the arguments of these functions. InvalidRequest."""
        return argument_types(self._tools.tools) if self._tools is not None else {}

    def reasoning(self, setting: ReasoningSetting = "auto") -> ReasoningUse:
        """The reasoning that the output may have; `setting` says which formats count."""
        if self.kind != "chat.completions":
            return NO_REASONING
        return reasoning_use_of(self.body, setting=setting)

    def num_alike(self, choice: int) -> int:
        """How many requests have the length of this one's, if it is the first of them; else 0."""
        if is_pooled(self.kind):
            return 1
        each = self._choices_per_prompt
        return 0 if choice % each else each

    @property
    def metadata(self) -> dict[str, str]:
        """What the caller of a chat gave it, to be shown with its answer. InvalidRequest.

        Also for a wrong `store`, which changes nothing: answers are always kept for a while.
        """
        if self.kind != "chat.completions":
            return {}
        if not isinstance(self.body.get("store"), bool | None):
            raise InvalidRequest("body.store", "must be true or false")
        return metadata_of(self.body.get("metadata"))

    @property
    def prompt_use(self) -> PromptUse:
        """What the answer has of its prompts. InvalidRequest."""
        return prompt_use_of(self.kind, self.body)

    @property
    def kept_prompts(self) -> tuple[str, ...]:
        """The texts of the prompts that must be kept for the answer; none if it can do without."""
        if not self.prompt_use.is_kept:
            return ()
        return tuple(one for one in self._prompts if isinstance(one, str))

    @property
    def num_known_tokens(self) -> int:
        """How many tokens all prompts of token ids have; the others are as long as a worker says.

        Each prompt counts for each of its choices.
        """
        longest = self.body.get("truncate_prompt_tokens")
        lengths = [len(one) for one in self._prompts if isinstance(one, list)]
        if type(longest) is int:
            lengths = [min(length, longest) for length in lengths]
        return self._choices_per_prompt * sum(lengths)

    @property
    def most_prompt_logprobs(self) -> int:
        """The most log-probabilities, and ids, that the answer can have of its prompts.

        A token has at least one byte of its text, but for the few that begin a prompt.
        InvalidRequest.
        """
        number: int | None = without_echo(self.kind, self.body).get("prompt_logprobs")
        has_ids = self.body.get("return_token_ids") is True
        if number is None and not has_ids:
            return 0
        if self.kind == "chat.completions":
            return MAX_PROMPT_LOGPROBS
        lengths = [
            len(one.encode()) + MAX_ADDED_TOKENS if isinstance(one, str) else len(one)
            for one in self._prompts
        ]
        if longest := self.body.get("truncate_prompt_tokens"):
            lengths = [min(length, longest) for length in lengths]
        of_prompts = sum(lengths) if has_ids else 0
        if number is not None:
            of_prompts += sum(min(MAX_PROMPT_LOGPROBS, one * (1 + number)) for one in lengths)
        return self._choices_per_prompt * of_prompts

    def check(self) -> None:
        """InvalidRequest if the message of any choice is invalid or cannot be sent.

        Checks with the longest id, tenant and deadline, so that the result holds for all others.
        """
        num_choices, _ = self.num_choices, self.metadata
        each = 1 if is_pooled(self.kind) else self._choices_per_prompt
        longest = LONGEST_ID[len(id_of("", num_choices - 1, n=num_choices)) :]
        for choice in range(each - 1, num_choices, each):
            self.message(longest, choice, **LONGEST_ENVELOPE)

    def checked_body(self, choice: int = 0) -> ParsedBody:
        """The body of the request for a choice. InvalidRequest."""
        return self._of_choice(choice)[1]

    def message(self, request_id: str, choice: int = 0, **envelope: Any) -> Message:
        """The message to submit for one choice; see choices.py for its id.

        Choices are numbered across prompts: all of the first prompt, then all of the second. With a
        seed in the body, each prompt gets the same seeds as in a call of its own; without one, no
        two choices share a seed. InvalidRequest if it is invalid, or too long to be sent.
        """
        body, parsed = self._of_choice(choice)
        fields = {"id": id_of(request_id, choice, n=self.num_choices), "kind": self.kind}
        request = validated(GenerationRequest, fields | {"body": body} | envelope)
        with self._naming(choice):
            return Message.of(request, parsed)

    def forget_checked(self) -> None:
        """Frees the body that was checked last. It is checked again if it is needed."""
        self._last.clear()

    def _of_choice(self, choice: int) -> tuple[dict[str, Any], ParsedBody]:
        """The body of the request for a choice, as it is sent and as it was checked."""
        prompt, choice_of_prompt = divmod(choice, self._choices_per_prompt)
        with self._naming(choice):
            body, parsed = self._checked((prompt, choice_of_prompt if self._has_choices else 0))
            if is_pooled(self.kind):
                return body, parsed
            told = body.keys() & {"prompt_logprobs", "return_token_ids"}
            if self.kind == "chat.completions" and choice and told:
                # The answer has those of the first choice: all have one prompt.
                body = {name: value for name, value in body.items() if name not in told}
                parsed = replace(check_body(self.kind, body), pictures=parsed.pictures)
        if self.num_choices == 1:
            return body, parsed
        has_seed = self.body.get("seed") is not None
        seed = seed_of(body["seed"], choice_of_prompt if has_seed else choice)
        sampling = parsed.sampling.model_copy(update={"seed": seed})
        return body | {"seed": seed}, replace(parsed, sampling=sampling)

    def _checked(self, key: tuple[int, int]) -> tuple[dict[str, Any], ParsedBody]:
        """The body for a prompt, and for one of its choices if it has them. InvalidRequest."""
        if key not in self._last:
            body, pictures = self._body(*key), dict[str, bytes]()
            if self.kind == "chat.completions":
                body["messages"], pictures = taken_out(body.get("messages"), is_openai=True)
            self._last.clear()
            body, parsed = with_whitespace(body, check_body(self.kind, body))
            self._last[key] = body, replace(parsed, pictures=pictures)
        return self._last[key]

    def _body(self, prompt: int, choice_of_prompt: int) -> dict[str, Any]:
        # A request for a vector knows no `n` and no seed, and refuses them.
        hides = set[str]() if is_pooled(self.kind) else {"n"}
        if self.kind == "chat.completions":
            hides |= ANSWERED[self.kind]
        body = {name: value for name, value in self.body.items() if name not in hides}
        if self._is_list:
            body[self._field] = self._prompts[prompt]
        if self.kind == "scores" and isinstance(body.get("pair"), list):
            # Each input has a pair of its own; see scores.py.
            body["pair"] = body["pair"][prompt]
        if self._has_choices:
            body["choice"] = body["choice"][choice_of_prompt]
        body = without_echo(self.kind, body)
        if body.get("seed") is None and not is_pooled(self.kind):
            body["seed"] = int(self.digest[32:47], 16)
        return body

    @contextlib.contextmanager
    def _naming(self, choice: int) -> Iterator[None]:
        """Gives errors the caller's names of the fields of the request for this choice."""
        try:
            yield
        except InvalidRequest as error:
            field = self._named(error.field, *divmod(choice, self._choices_per_prompt))
            raise InvalidRequest(field, error.message) from None

    @cached_property
    def _last(self) -> dict[tuple[int, int], tuple[dict[str, Any], ParsedBody]]:
        """The body that was checked last. More would take the memory of all prompts twice."""
        return {}

    @property
    def _tools(self) -> ToolUse | None:
        return self.checked_body().tools if self.kind == "chat.completions" else None

    def _named(self, field: str, prompt: int, choice_of_prompt: int) -> str:
        """The caller's name of a field of the request for this choice of a prompt."""
        if self._is_list and field == f"body.{self._field}":
            return f"{field}.{prompt}"
        if self._has_choices and field == "body.choice":
            return f"{field}.{choice_of_prompt}"
        return self.prompt_use.field(field) or field

    @property
    def _choices_per_prompt(self) -> int:
        """The number of choices of each prompt. InvalidRequest if `n` is invalid."""
        if self._has_choices:
            return len(self.body["choice"])
        n = self.body.get("n")
        if n is None or is_pooled(self.kind):
            return 1
        check_number(n, field="body.n")
        assert isinstance(n, int)
        return n

    @property
    def _has_choices(self) -> bool:
        """Whether the body has the choices of each input; see scores.py."""
        return self.kind == "scores" and isinstance(self.body.get("choice"), list)

    @property
    def _prompts(self) -> Sequence[Any]:
        prompt = self.body.get(self._field)
        return prompt if self._is_list else [prompt]  # type: ignore[return-value]

    @property
    def _field(self) -> str:
        """The field with the prompts."""
        return "input" if is_pooled(self.kind) else "prompt"

    @property
    def _is_list(self) -> bool:
        """Whether the prompt is a list of prompts: all texts, or all arrays of token ids.

        InvalidRequest if it mixes them. An array that begins with anything else is read as one
        prompt of token ids.
        """
        prompt = self.body.get(self._field)
        if self.kind == "chat.completions" or not isinstance(prompt, list) or not prompt:
            return False
        kind = type(prompt[0])
        if kind not in (str, list):
            return False
        if not all(type(one) is kind for one in prompt):
            message = "must have texts only, or arrays of token ids only"
            raise InvalidRequest(f"body.{self._field}", message)
        return True


def most_choices(kind: Kind) -> int:
    """The most requests that one call of this kind may become."""
    return MAX_INPUTS if is_pooled(kind) else MAX_CHOICES


def parse_body(text: str | bytes) -> dict[str, Any]:
    """Reads a body from JSON text. InvalidRequest if it is not a JSON object.

    The error names the path of what JSON does not allow, such as `body.logit_bias.52`; see
    `json_text`.
    """
    body, fault = read_object(text)
    if fault is not None:
        raise InvalidRequest(f"body.{fault.path}", fault.message)
    return body
