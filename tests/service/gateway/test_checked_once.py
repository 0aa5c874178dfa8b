"""Between socket and Redis a body is checked once, and each of its requests packed once."""

import asyncio
import threading
from collections import Counter

import pytest

from quire.openai import requests
from quire.wire import protocol, sampling
from quire.wire.protocol import GenerationRequest
from service.gateway.idempotency import call_of
from tests.service.gateway.front import CHAT, COMPLETIONS

TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
ASK = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}


@pytest.fixture
def counts(gateway, monkeypatch):
    """How often the thread of the gateway does each of these; the worker checks for itself."""
    found = Counter()

    def count(owner, name, what):
        original = getattr(owner, name)

        def counted(*arguments, **options):
            if threading.current_thread().name == "gateway under test":
                found[what] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    count(requests, "check_body", "checked")
    count(protocol, "parse_body", "checked")
    count(sampling, "tool_use_of", "functions")
    count(GenerationRequest, "encode", "packed")
    return found


@pytest.mark.parametrize("more", [{}, {"stream": True}])
def test_a_chat_is_checked_and_packed_once(gateway, counts, more):
    assert gateway.ask("POST", CHAT, {**ASK, **more}).status == 200
    assert counts == {"checked": 1, "functions": 1, "packed": 1}


def test_so_is_a_response(gateway, counts):
    tools = [{"type": "function", "name": "now", "parameters": {"type": "object"}}]
    assert gateway.ask("POST", "/v1/responses", {"input": "x", "tools": tools}).status == 200
    assert counts == {"checked": 1, "functions": 1, "packed": 1}


def test_the_choices_of_a_prompt_are_checked_together(gateway, counts):
    body = {"prompt": ["x", "y"], "n": 3, "max_tokens": 2}
    assert gateway.ask("POST", COMPLETIONS, body).status == 200
    assert (counts["checked"], counts["packed"]) == (2, 6)


def test_a_call_with_a_key_is_checked_once(gateway, counts):
    assert gateway.ask("POST", CHAT, ASK, Idempotency_Key="k").status == 200
    assert counts == {"checked": 1, "functions": 1, "packed": 1}


def test_a_call_that_waits_for_its_answer_does_not_keep_its_checked_body(monkeypatch):
    checks = []

    def check(kind, body):
        checks.append(kind)
        return sampling.parse_body(kind, body)

    monkeypatch.setattr(requests, "check_body", check)
    call = call_of("chat.completions", ASK, tenant="default", key=None, model="fake")
    asyncio.run(call.messages())
    assert len(checks) == 1
    call.request.checked_body()
    assert len(checks) == 2
