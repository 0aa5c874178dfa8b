"""A caller of a response in the background: follows its events from gateway to gateway."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from openai import OpenAI
from openai.types.responses import Response

from quire.openai.requests import OpenAIRequest
from quire.openai.responses.call import call_of
from service.gateway.queue import DEFAULT_TENANT
from service.gateway.responses.submitting import _identity
from tests.chaos.audit import Expected
from tests.chaos.schedules import text_after, tokens_under
from tests.chaos.sinks.caller import GatewayCaller
from tests.chaos.sinks.laws import LAST_EVENTS, event_violations
from tests.service.builders import byte_tokenizer
from tests.service.fake_model import render_chat

MODEL = "fake"
#: How often a caller goes to another gateway by itself, at each event.
LEAVES = 0.05


class ResponseCaller(GatewayCaller):
    """One response to `body`, which has no field of the call itself."""

    def __init__(
        self, name: str, body: Mapping[str, Any], gateways: Callable[[], Sequence[str]]
    ) -> None:
        super().__init__(name, gateways)
        self.response_id = ""
        self.events: list[Mapping[str, Any]] = []
        self.final: Response | None = None
        self._body = body
        self._random = random.Random(name)
        self._has_cancelled = False

    def expected(self) -> Expected:
        """What comes of its request when nothing goes wrong."""
        body = {"model": MODEL, "background": True, **self._body}
        name, digest = _identity(body, tenant=DEFAULT_TENANT, key=self._name)
        chat = call_of(body, name=name, context=()).chat
        parsed = OpenAIRequest("chat.completions", chat, digest).checked_body()
        assert parsed.messages is not None and parsed.sampling.seed is not None
        text = render_chat(parsed.messages)
        prompt = byte_tokenizer().encode(text, add_special_tokens=False).ids
        sampling = {"max_tokens": parsed.sampling.max_tokens, "seed": parsed.sampling.seed}
        tokens = tokens_under({}, prompt, **sampling)
        text = text_after(prompt, tokens)
        return Expected(self.response_id, tokens, text, may_be_cancelled=self.was_cancelled)

    def judged(self) -> Iterator[str]:
        """What is wrong with what it has read."""
        expected = self.expected()
        yield from event_violations(
            self._name, self.events, expected.text, was_cancelled=self.was_cancelled
        )
        said = "" if self.final is None else self.final.output_text
        deltas = "".join(event.get("delta", "") for event in self.events)
        if said != deltas:
            yield f"{self._name}: the response says {said!r:.60}, and its events another text"

    def _live(self) -> None:
        made = [self._call(self._create) for _ in range(2)]
        if made[0].id != made[1].id:
            self.violations.append(f"{self._name}: a second create made a second response")
        self.response_id = made[0].id
        while not self._has_ended:
            if self._is_to_cancel:
                self._call(lambda openai: openai.responses.cancel(self.response_id))
                self._has_cancelled = True
            self._call(self._follow)
        whole = self._call(lambda openai: list(self._events_after(openai, -1)))
        if whole != self.events:
            self.violations.append(f"{self._name}: whoever reads all events reads others")
        self.final = self._call(lambda openai: openai.responses.retrieve(self.response_id))

    def _create(self, openai: OpenAI) -> Response:
        return openai.responses.create(
            model=MODEL,
            background=True,
            extra_headers={"Idempotency-Key": self._name},
            **self._body,
        )

    @property
    def _is_to_cancel(self) -> bool:
        # Once only: it may end before that reaches the worker, and then each event would be a call.
        return self.was_cancelled and not self._has_cancelled

    @property
    def _has_ended(self) -> bool:
        return bool(self.events) and self.events[-1]["type"] in LAST_EVENTS

    def _follow(self, openai: OpenAI) -> None:
        """Takes the next events, until the stream ends or the caller goes elsewhere."""
        for event in self._events_after(openai, len(self.events) - 1):
            if event["type"] == "error":
                # This gateway cannot go on; the number is that of the event before.
                return
            self.events.append(event)
            if self._is_to_cancel or self._random.random() < LEAVES:
                return

    def _events_after(self, openai: OpenAI, number: int) -> Iterator[Mapping[str, Any]]:
        after = {} if number < 0 else {"starting_after": number}
        with openai.responses.retrieve(self.response_id, stream=True, **after) as stream:
            for event in stream:
                yield event.to_dict()
