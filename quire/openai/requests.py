"""What is asked in OpenAI's words, as requests of ours; for batch files and for the gateway.

Pure: JSON in, messages out. Which fields a body may have, and what they mean, is sampling.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequest
from quire.wire.choices import MAX_CHOICES, check_number, choice_of, id_of
from quire.wire.json_text import read_object
from quire.wire.protocol import MAX_REQUEST_ID_LENGTH, GenerationRequest, Kind
from quire.wire.sampling import validated

#: The paths of OpenAI's API that are served, and the kind of request each means.
KINDS: dict[str, Kind] = {
    "/v1/chat/completions": "chat.completions",
    "/v1/completions": "completions",
}

#: What takes the most bytes of what a request is given beside its body.
LONGEST_ID = "x" * MAX_REQUEST_ID_LENGTH
LONGEST_ENVELOPE: Mapping[str, Any] = {"tenant": "x" * 64, "deadline_ms": (1 << 53) - 1}


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """One call of OpenAI's API; it asks for as many requests of ours as it asks for choices.

    Completions may have a list of prompts, and each of them gets the choices that `n` says.

    `digest` is hexadecimal, 47 digits at least. What brings no seed gets one that is made of it, so
    that the same digest is the same generation.
    """

    kind: Kind
    body: Mapping[str, Any]
    digest: str

    @property
    def num_prompts(self) -> int:
        """How many prompts there are; a chat has one."""
        return len(self._prompts)

    @property
    def num_choices(self) -> int:
        """How many answers are asked for, to all prompts. InvalidRequest if they cannot be."""
        n = self._choices_of_each
        if n * self.num_prompts > MAX_CHOICES:
            message = f"asks for {n * self.num_prompts} choices; at most {MAX_CHOICES} are allowed"
            raise InvalidRequest("body.prompt", message)
        return n * self.num_prompts

    def begins_prompt(self, choice: int) -> bool:
        """Whether this choice is the first one of its prompt."""
        return choice % self._choices_of_each == 0

    def check(self) -> None:
        """InvalidRequest if the message for any choice cannot be right, or not be sent.

        Whatever its id, its tenant and its deadline will be: these are as long as they can be.
        """
        num_choices, each = self.num_choices, self._choices_of_each
        longest = LONGEST_ID[len(id_of("", num_choices - 1, n=num_choices)) :]
        for choice in range(each - 1, num_choices, each):
            self.request(longest, choice, **LONGEST_ENVELOPE)

    def request(self, request_id: str, choice: int = 0, **envelope: Any) -> GenerationRequest:
        """The message to submit for one choice, see choices.py for its id.

        Choices are counted through: all of the first prompt, then all of the second. With a seed in
        the body each prompt is answered as in a call of its own; otherwise no two choices share
        one. InvalidRequest for a body that cannot be right.
        """
        num_choices = self.num_choices
        prompt, choice_of_prompt = divmod(choice, self._choices_of_each)
        body = {name: value for name, value in self.body.items() if name != "n"}
        if self._is_list:
            body["prompt"] = self._prompts[prompt]
        seeded_as = choice_of_prompt
        if body.get("seed") is None:
            body["seed"] = int(self.digest[32:47], 16)
            seeded_as = choice
        fields = {"id": request_id, "kind": self.kind, "body": body}
        request = validated(GenerationRequest, fields | envelope)
        try:
            request.parse_body()
            request = choice_of(request, choice, n=num_choices, seeded_as=seeded_as)
            # The cap is looked at here, too: over it, one message would stop its whole submit.
            request.encode()
        except InvalidRequest as error:
            if self._is_list and error.field == "body.prompt":
                raise InvalidRequest(f"body.prompt.{prompt}", error.message) from None
            raise
        return request

    @property
    def _choices_of_each(self) -> int:
        """How many answers each prompt gets. InvalidRequest."""
        n = self.body.get("n")
        if n is None:
            return 1
        check_number(n, field="body.n")
        assert isinstance(n, int)
        return n

    @property
    def _prompts(self) -> Sequence[Any]:
        return self.body["prompt"] if self._is_list else [self.body.get("prompt")]

    @property
    def _is_list(self) -> bool:
        """Whether the prompt is a list of prompts: of texts, or of arrays of token ids.

        InvalidRequest if it is one of both. An array that begins with anything else is one prompt,
        if any.
        """
        prompt = self.body.get("prompt")
        if self.kind != "completions" or not isinstance(prompt, list) or not prompt:
            return False
        kind = type(prompt[0])
        if kind not in (str, list):
            return False
        if not all(type(one) is kind for one in prompt):
            raise InvalidRequest("body.prompt", "must have texts only, or arrays of token ids only")
        return True


def parse_body(text: str | bytes) -> dict[str, Any]:
    """The body that is written there. InvalidRequest for any other text.

    What JSON does not allow in it (see `json_text`) is named by its path: `body.logit_bias.52`.
    """
    body, fault = read_object(text)
    if fault is not None:
        raise InvalidRequest(f"body.{fault.path}", fault.message)
    return body
