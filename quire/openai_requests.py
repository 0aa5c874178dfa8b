"""What is asked in OpenAI's words, as requests of ours; for batch files and for the gateway.

Pure: JSON in, messages out. Which fields a body may have, and what they mean, is sampling.py's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.choices import check_number, choice_of
from quire.errors import InvalidRequest
from quire.protocol import GenerationRequest, Kind
from quire.sampling import validated

#: The paths of OpenAI's API that are served, and the kind of request each means.
KINDS: dict[str, Kind] = {
    "/v1/chat/completions": "chat.completions",
    "/v1/completions": "completions",
}


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """One call of OpenAI's API; it asks for as many requests of ours as it asks for choices.

    `digest` is hexadecimal, 47 digits at least. What brings no seed gets one that is made of it, so
    that the same digest is the same generation.
    """

    kind: Kind
    body: Mapping[str, Any]
    digest: str

    @property
    def num_choices(self) -> int:
        """How many answers are asked for; not checked yet."""
        n: int | None = self.body.get("n")
        return 1 if n is None else n

    def request(self, request_id: str, choice: int = 0, **envelope: Any) -> GenerationRequest:
        """The message to submit for one choice, see choices.py for its id.

        InvalidRequest for a body that cannot be right.
        """
        check_number(self.num_choices, field="body.n")
        body = {name: value for name, value in self.body.items() if name != "n"}
        if body.get("seed") is None:
            body["seed"] = int(self.digest[32:47], 16)
        fields = {"id": request_id, "kind": self.kind, "body": body}
        request = validated(GenerationRequest, fields | envelope)
        request.parse_body()
        # The cap is looked at here, too: over it, one message would stop its whole submit.
        request.encode()
        return choice_of(request, choice, n=self.num_choices)


def parse_object(text: str | bytes) -> dict[str, Any]:
    """The object that is written there. InvalidRequest for any other text."""
    try:
        value = json.loads(text)
    # Nesting without end is an error of its own kind.
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("body", "is not an object")
    return value
