"""The record of a call, kept in the metadata of its first request, where every gateway finds it.

Each choice for each prompt of a call is a request of its own. The id of the first request is that
of the call, whatever the number of choices is. So one record describes the call, and an idempotency
key that is reused with another number of choices still finds that record.
"""

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.errors import InvalidRequest, ProtocolError
from quire.openai.answers import Heading
from quire.openai.likelihoods import LikelihoodForm, likelihood_form_from
from quire.openai.metadata import metadata_from
from quire.openai.prompts import prompt_fields, prompt_use_from
from quire.openai.requests import OpenAIRequest, most_choices
from quire.openai.scores import ScoreForm, field_of, form_of
from quire.openai.tools.argument_types import argument_types_from
from quire.openai.tools.reasoning import (
    ReasoningSetting,
    reasoning_fields,
    reasoning_use_from,
)
from quire.openai.vectors import encoding_of
from quire.wire.choices import CHOICE_SEPARATOR
from quire.wire.codec import pack, unpack_map
from quire.wire.message import Message
from quire.wire.pooling import is_pooled
from quire.wire.protocol import Kind

#: The key in the request's metadata.
METADATA_KEY = "openai"

#: The prefix of call ids.
ID_PREFIX = "req-"

#: Most bytes of all requests of one call together: each of them holds the whole prompt.
MAX_CALL_BYTES = 8 << 20

#: Most log-probabilities of one complete answer, top tokens included: the caller gets some 40 MiB,
#: and writing them takes 250 MiB in the gateway. A stream may have any number.
MAX_COMPLETE_LOGPROBS = 1 << 19

#: Fields of a record -> their most bytes in the metadata, which also has the names of functions.
#: Longer ones are kept with the request, and the metadata has this word in their place.
MOST_BYTES: Mapping[str, int] = {"types": 4096, "metadata": 2048}
_KEPT = "kept"

#: Fields of a body that change how the answer is sent and not what is generated.
_RESPONSE_FIELDS = ("stream", "stream_options")


@dataclass(frozen=True, slots=True)
class CallRecord(Heading):
    """One call: the heading of its answer, and what tells its requests apart.

    `digest` tells whether two calls with the same idempotency key are equal; see `call_of`.
    `num_choices` counts the choices of all prompts together; every prompt has equally many. What it
    `lacks` are the fields that are kept with the request.
    """

    num_choices: int = 1
    num_prompts: int = 1
    digest: str = ""
    lacks: tuple[str, ...] = ()

    @property
    def member_ids(self) -> list[str]:
        """The ids of the requests, one for each choice."""
        first = self.id
        return [first, *(f"{first}{CHOICE_SEPARATOR}{n}" for n in range(1, self.num_choices))]

    def to_metadata(self) -> dict[str, Any]:
        """The metadata for the record of the first choice."""
        fields: dict[str, Any] = {
            "kind": self.kind,
            "choices": self.num_choices,
            "prompts": self.num_prompts,
            "model": self.model,
            "created": self.created,
            "digest": self.digest,
        }
        if self.tools:
            fields["tools"] = list(self.tools)
        if self.form:
            fields |= {"form": self.form, "top_n": self.top_n}
        if self.likelihoods is not None:
            fields["likelihoods"] = self.likelihoods.fields()
        fields |= {name: value for name, value in self._long().items() if value}
        fields |= dict.fromkeys(self._kept_fields(), _KEPT)
        if self.has_token_ids:
            fields["token_ids"] = True
        if self.encoding != "float":
            fields["encoding"] = self.encoding
        fields |= reasoning_fields(self.reasoning) | prompt_fields(self.prompt)
        return {METADATA_KEY: fields}

    def kept(self) -> bytes:
        """What to keep with the request, for the metadata has no room; empty if it has all.

        InvalidRequest if the functions have more types of arguments than can be kept.
        """
        fields = self._kept_fields()
        if not fields:
            return b""
        data = pack(fields, field="body.tools")
        try:
            unpack_map(data)
        except ProtocolError as error:
            raise InvalidRequest("body.tools", f"has types that cannot be kept: {error}") from error
        return data

    def with_kept(self, data: bytes) -> "CallRecord":
        """The record with what is kept with its request. ProtocolError."""
        fields = unpack_map(data)
        return replace(
            self,
            types=argument_types_from(fields["types"]) if "types" in fields else self.types,
            metadata=metadata_from(fields["metadata"]) if "metadata" in fields else self.metadata,
            lacks=(),
        )

    def _long(self) -> dict[str, Any]:
        """The fields that may be long, as they are written."""
        types = {name: dict(letters) for name, letters in self.types.items()}
        return {"types": types, "metadata": dict(self.metadata)}

    def _kept_fields(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self._long().items()
            if len(pack(value, field="body.tools")) > MOST_BYTES[name]
        }

    @classmethod
    def from_metadata(
        cls, request_id: str, metadata: Mapping[str, Any], created: int
    ) -> "CallRecord":
        """Read the record back from the metadata of a request.

        A request that was not submitted by a gateway counts as a completion with one choice. So
        does one with metadata that no gateway writes: every client may write metadata.
        """
        match metadata.get(METADATA_KEY):
            case {
                "kind": "chat.completions" | "completions" | "embeddings" | "scores" as kind,
                "choices": num_choices,
                "model": str(model),
                "created": int(stamp),
                "digest": str(digest),
            } if type(num_choices) is int and 1 <= num_choices <= most_choices(kind):
                prompts = metadata[METADATA_KEY].get("prompts")
                # Earlier versions do not write this field: their calls had one prompt each.
                num_prompts = prompts if type(prompts) is int and 0 < prompts <= num_choices else 1
                tools = metadata[METADATA_KEY].get("tools")
                top_n = metadata[METADATA_KEY].get("top_n")
                names = tuple(map(str, tools)) if isinstance(tools, list) else ()
                return cls(
                    request_id,
                    kind,
                    stamp,
                    model,
                    num_choices=num_choices,
                    num_prompts=num_prompts,
                    digest=digest,
                    tools=names,
                    reasoning=reasoning_use_from(metadata[METADATA_KEY]),
                    has_token_ids=metadata[METADATA_KEY].get("token_ids") is True,
                    encoding=encoding_of(metadata[METADATA_KEY].get("encoding")),
                    types=argument_types_from(metadata[METADATA_KEY].get("types")),
                    metadata=metadata_from(metadata[METADATA_KEY].get("metadata")),
                    lacks=tuple(
                        name for name in MOST_BYTES if metadata[METADATA_KEY].get(name) == _KEPT
                    ),
                    form=form_of(metadata[METADATA_KEY].get("form")),
                    top_n=top_n if type(top_n) is int and top_n > 0 else 0,
                    likelihoods=likelihood_form_from(
                        metadata[METADATA_KEY].get("likelihoods"),
                        num_choices=num_choices // num_prompts,
                    ),
                    prompt=prompt_use_from(metadata[METADATA_KEY]),
                )
        return cls(request_id, "completions", created=created)


@dataclass(frozen=True, slots=True)
class Call:
    """A call to submit. `is_streamed` says whether the caller wants its answer as a stream.

    `kept` is stored with the first request for as long as the results. If it `is_response`,
    its stream ends with the whole answer. With `counts_only` workers only count its prompts.
    """

    record: CallRecord
    request: OpenAIRequest
    is_streamed: bool
    kept: bytes = b""
    is_response: bool = False
    counts_only: bool = False

    async def messages(self, **envelope: Any) -> list[Message]:
        """The messages of all choices, which are sent as they are. InvalidRequest.

        A long request takes some milliseconds to build, so this yields to the event loop between
        two of them.
        """
        messages: list[Message] = []
        num_bytes = 0
        if self.counts_only:
            envelope |= {"counts_only": True}
        try:
            if self.is_response or not self.is_streamed:
                envelope |= {"answer_limit": self._answer_limit()}
            for choice, own_id in enumerate(self.record.member_ids):
                if choice:
                    await asyncio.sleep(0)
                first = {} if choice else {"metadata": self.record.to_metadata()}
                message = self.request.message("", choice, id=own_id, **first, **envelope)
                if num_alike := self.request.num_alike(choice):
                    # Checked before the other choices of this prompt are built.
                    num_bytes += num_alike * len(message.data)
                    self._check_bytes(num_bytes)
                messages.append(message)
        except InvalidRequest as error:
            raise InvalidRequest(field_of(self.record.form, error.field), error.message) from None
        finally:
            # A checked body takes many times the memory of its text, and the call is kept until its
            # answer has come.
            self.request.forget_checked()
        return messages

    def _answer_limit(self) -> int | None:
        """How long each output may be at most if the call does not say it; None for no limit.

        InvalidRequest if the answer may have more log-probabilities than a whole one holds.
        """
        sampling, of_token, of_prompts = self.request.checked_body().sampling, 0, 0
        if sampling.logprobs is not None:
            of_token = self.record.num_choices * (1 + sampling.logprobs)
        if sampling.prompt_logprobs is not None or self.record.has_token_ids:
            # The ids of a prompt take as much as one log-probability of each.
            of_prompts = self.request.num_known_tokens * (1 + (sampling.prompt_logprobs or 0))
        of_output = of_token * (sampling.max_tokens or 1)
        most = of_output + of_prompts
        if most > MAX_COMPLETE_LOGPROBS:
            kind = "a response" if self.is_response else "an answer that is not streamed"
            advice = "ask for fewer" if self.is_response else "ask for fewer, or for a stream"
            message = (
                f"this call may need {most} log-probabilities (choices times max_tokens times one "
                f"more than the alternatives of each token, and those of the prompts); {kind} may "
                f"have {MAX_COMPLETE_LOGPROBS}: {advice}"
            )
            has_logprobs = sampling.prompt_logprobs is not None
            of_prompt = "body.prompt_logprobs" if has_logprobs else "body.return_token_ids"
            field = "body.logprobs" if of_output >= of_prompts else of_prompt
            raise InvalidRequest(self.record.prompt.field(field) or field, message)
        if sampling.max_tokens is not None or not of_token:
            return None
        return (MAX_COMPLETE_LOGPROBS - of_prompts) // of_token

    def _check_bytes(self, num_bytes: int) -> None:
        if self.record.num_choices > 1 and num_bytes > MAX_CALL_BYTES:
            message = f"the requests of this call take more than {MAX_CALL_BYTES} bytes together"
            field = "body.n" if self.record.num_prompts == 1 else "body.prompt"
            field = "body.input" if is_pooled(self.record.kind) else field
            raise InvalidRequest(field, message)


def call_of(
    kind: Kind,
    body: Mapping[str, Any],
    *,
    tenant: str,
    key: str | None,
    model: str,
    is_streamed: bool = True,
    reasoning: ReasoningSetting = "auto",
    form: ScoreForm = "",
    top_n: int = 0,
    likelihoods: LikelihoodForm | None = None,
    given: Mapping[str, Any] | None = None,
) -> Call:
    """The call that a body describes.

    With an idempotency key its id is a function of tenant and key, so that every gateway finds the
    same request; without one the id is random. A body without a seed gets a seed derived from the
    digest. With a key the digest is a hash of tenant, key, kind and body, and without one it is
    random. It is that of the body as it was `given`, if something was fetched for it.
    `model` is the name that answers will show. `reasoning` says which formats of
    reasoning count. A call for scores has a `form`, and `top_n` results; 0 for all.
    With choices it has the form of their `likelihoods`.
    """
    if key is None:
        digest = secrets.token_hex(32)
        name = digest
    else:
        asked = body if given is None else given
        content_fields = {k: v for k, v in asked.items() if k not in _RESPONSE_FIELDS}
        answer: list[object] = [form, top_n] if form else []
        answer += [likelihoods.normalize] if likelihoods is not None else []
        digest = _sha256([tenant, key, kind, content_fields, *answer])
        name = _sha256([tenant, key])
    request = OpenAIRequest(kind, body, digest)
    record = CallRecord(
        id=f"{ID_PREFIX}{name[:32]}",
        kind=kind,
        num_choices=request.num_choices,
        num_prompts=request.num_prompts,
        model=model,
        created=int(time.time()),
        digest=digest[:32],
        tools=request.tool_names,
        types=request.argument_types,
        encoding=encoding_of(body.get("encoding_format")),
        reasoning=request.reasoning(reasoning),
        has_token_ids=body.get("return_token_ids") is True,
        form=form,
        top_n=top_n,
        likelihoods=likelihoods,
        prompt=request.prompt_use,
        metadata=request.metadata,
    )
    # JSON: together the prompts may be longer than a message of msgpack.
    kept = json.dumps(request.kept_prompts).encode() if record.prompt.is_kept else b""
    # No call has both: only chats have functions and metadata, and no chat has an `echo`.
    return Call(record, request, is_streamed, kept or record.kept())


def kept_prompts(data: bytes) -> list[str]:
    """The texts of the prompts that `call_of` kept. ProtocolError for anything else."""
    try:
        prompts = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("what is kept of a call is not its prompts") from error
    if not isinstance(prompts, list) or not all(isinstance(one, str) for one in prompts):
        raise ProtocolError("what is kept of a call is not its prompts")
    return prompts


def _sha256(value: object) -> str:
    try:
        written = json.dumps(value, sort_keys=True)
    # A body that could be parsed may still be nested too deep to serialize: that recurses further.
    except RecursionError as error:
        raise InvalidRequest("body", "is nested too deep") from error
    return hashlib.sha256(written.encode()).hexdigest()
