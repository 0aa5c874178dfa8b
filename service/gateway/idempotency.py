"""What a call asks for, kept in the metadata of its first request, where every gateway finds it.

Each choice of a call, for each of its prompts, is a request of its own. The first has the id of the
call, however many there are. So one record describes the call, and an idempotency key that is
reused with another number of choices still finds that record.
"""

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidRequest
from quire.openai.answers import Heading
from quire.openai.requests import OpenAIRequest
from quire.wire.choices import CHOICE_SEPARATOR, MAX_CHOICES
from quire.wire.protocol import GenerationRequest, Kind

#: The key in the request's metadata.
METADATA_KEY = "openai"

#: The prefix of call ids.
ID_PREFIX = "req-"

#: Most bytes of all requests of one call together: each of them holds the whole prompt.
MAX_CALL_BYTES = 8 << 20

#: Most log-probabilities of one whole answer, top tokens included: some 40 MiB for its caller, and
#: 250 MiB in the gateway while it is written. A stream may have any number.
MAX_WHOLE_LOGPROBS = 1 << 19

#: Fields of a body that say how the answer is to be sent, not what is to be generated.
_ABOUT_TELLING = ("stream", "stream_options")


@dataclass(frozen=True, slots=True)
class Asked:
    """One call: its id, and what its answer looks like. `digest` covers all that it asks for.

    `num_choices` counts the choices for all prompts; each prompt has the same number of them.
    """

    request_id: str
    kind: Kind
    num_choices: int = 1
    num_prompts: int = 1
    model: str = ""
    created: int = 0
    digest: str = ""

    @property
    def heading(self) -> Heading:
        """The fields that all parts of its answer share."""
        return Heading(self.request_id, self.kind, self.created, self.model)

    @property
    def member_ids(self) -> list[str]:
        """The ids of the requests of its choices."""
        first = self.request_id
        return [first, *(f"{first}{CHOICE_SEPARATOR}{n}" for n in range(1, self.num_choices))]

    def metadata(self) -> dict[str, Any]:
        """The metadata for the record of the first choice."""
        return {
            METADATA_KEY: {
                "kind": self.kind,
                "choices": self.num_choices,
                "prompts": self.num_prompts,
                "model": self.model,
                "created": self.created,
                "digest": self.digest,
            }
        }

    @classmethod
    def from_metadata(cls, request_id: str, metadata: Mapping[str, Any], created: int) -> "Asked":
        """Reads it back; a request that no gateway submitted is a completion with one choice.

        So is one whose metadata says what no gateway writes: anybody who submits may write there.
        """
        match metadata.get(METADATA_KEY):
            case {
                "kind": "chat.completions" | "completions" as kind,
                "choices": num_choices,
                "model": str(model),
                "created": int(stamp),
                "digest": str(digest),
            } if type(num_choices) is int and 1 <= num_choices <= MAX_CHOICES:
                prompts = metadata[METADATA_KEY].get("prompts")
                # Earlier versions do not write it: their calls had one prompt each.
                num_prompts = prompts if type(prompts) is int and 0 < prompts <= num_choices else 1
                return cls(request_id, kind, num_choices, num_prompts, model, stamp, digest)
        return cls(request_id, "completions", created=created)


@dataclass(frozen=True, slots=True)
class Call:
    """A call to submit; `is_whole` unless it is to be answered as a stream."""

    asked: Asked
    request: OpenAIRequest
    is_whole: bool

    async def members(self, **envelope: Any) -> list[GenerationRequest]:
        """The requests of its choices. InvalidRequest for an invalid body.

        A long one takes some ten milliseconds to make; between two the event loop gets a turn.
        """
        ids = self.asked.member_ids
        members: list[GenerationRequest] = []
        num_bytes = 0
        for choice, member_id in enumerate(ids):
            if choice:
                await asyncio.sleep(0)
            metadata = {} if choice else {"metadata": self.asked.metadata()}
            one = self.request.request(ids[0], choice, **metadata, **envelope)
            if not choice and self.is_whole:
                self._check_logprobs(one)
            if self.request.begins_prompt(choice):
                # Checked before the other choices of this prompt are made.
                num_bytes += len(ids) // self.asked.num_prompts * len(one.encode())
                self._check_bytes(num_bytes)
            members.append(one.model_copy(update={"id": member_id}))
        return members

    def _check_logprobs(self, first: GenerationRequest) -> None:
        sampling = first.parse_body().sampling
        if sampling.logprobs is None:
            return
        most = self.asked.num_choices * sampling.max_tokens * (1 + sampling.logprobs)
        if most > MAX_WHOLE_LOGPROBS:
            message = (
                f"choices times max_tokens, with the likeliest tokens of each, may come to {most}; "
                f"{MAX_WHOLE_LOGPROBS} are the most of a whole answer: ask for fewer, or a stream"
            )
            raise InvalidRequest("body.logprobs", message)

    def _check_bytes(self, num_bytes: int) -> None:
        if self.asked.num_choices > 1 and num_bytes > MAX_CALL_BYTES:
            message = f"so many requests of this length take more than {MAX_CALL_BYTES} bytes"
            field = "body.n" if self.asked.num_prompts == 1 else "body.prompt"
            raise InvalidRequest(field, message)


def call_of(
    kind: Kind,
    body: Mapping[str, Any],
    *,
    tenant: str,
    key: str | None,
    model: str,
    is_whole: bool = False,
) -> Call:
    """The call that a body asks for.

    With an idempotency key its id is a function of tenant and key, so that every gateway finds the
    same request; without one it is random. A body without a seed gets one derived from the digest,
    which with a key covers the body. `model` is the name that answers will show.
    """
    if key is None:
        digest = secrets.token_hex(32)
        name = digest
    else:
        about_tokens = {k: v for k, v in body.items() if k not in _ABOUT_TELLING}
        digest = _sha256([tenant, key, kind, about_tokens])
        name = _sha256([tenant, key])
    request = OpenAIRequest(kind, body, digest)
    asked = Asked(
        request_id=f"{ID_PREFIX}{name[:32]}",
        kind=kind,
        num_choices=request.num_choices,
        num_prompts=request.num_prompts,
        model=model,
        created=int(time.time()),
        digest=digest[:32],
    )
    return Call(asked, request, is_whole)


def _sha256(value: object) -> str:
    try:
        written = json.dumps(value, sort_keys=True)
    # What could just be parsed may be too deep to serialize, which recurses further.
    except RecursionError as error:
        raise InvalidRequest("body", "is nested too deep") from error
    return hashlib.sha256(written.encode()).hexdigest()
