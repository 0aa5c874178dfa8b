"""What callers send beside the chat: tiers, token ids; and methods that ask about a path."""

from typing import Any

import pytest

from quire.wire.protocol import Priority
from tests.service.gateway.builders import GatewayThread, openai_client
from tests.service.gateway.front import CHAT, KEY

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("tier", "priority"),
    [("flex", Priority.LOW), ("priority", Priority.HIGH), ("auto", Priority.NORMAL),
     ("default", Priority.NORMAL)],
)  # fmt: skip
def test_a_tier_is_a_priority(
    gateway: GatewayThread, fake: Any, tier: str, priority: Priority
) -> None:
    assert gateway.ask("POST", CHAT, ASK | {"service_tier": tier}).status == 200
    assert fake.requests[-1].priority is priority


def test_a_tier_agrees_with_the_header_or_is_refused(gateway: GatewayThread, fake: Any) -> None:
    body = ASK | {"service_tier": "flex"}
    assert gateway.ask("POST", CHAT, body, X_Quire_Priority="low").status == 200
    reply = gateway.ask("POST", CHAT, body, X_Quire_Priority="high")
    assert (reply.status, reply.error["param"]) == (400, "service_tier")
    reply = gateway.ask("POST", CHAT, ASK | {"service_tier": ["flex"]})
    assert (reply.status, reply.error["param"]) == (400, "service_tier")
    usual = ASK | {"service_tier": "default"}
    assert gateway.ask("POST", CHAT, usual, X_Quire_Priority="high").status == 200
    assert fake.requests[-1].priority is Priority.HIGH


def test_a_key_limits_the_tier(start: Any, tmp_path: Any) -> None:
    (tmp_path / "keys").write_text("sk-7fc1e2b0d94a4c5f8e6a search normal\n")
    gateway = start(keys_file=tmp_path / "keys")
    headers = {"Authorization": "Bearer sk-7fc1e2b0d94a4c5f8e6a"}
    reply = gateway.ask("POST", CHAT, ASK | {"service_tier": "priority"}, **headers)
    assert (reply.status, reply.error["code"]) == (403, "priority_not_allowed")


@pytest.mark.parametrize("more", [{}, {"include_reasoning": False}])
def test_token_ids_come_with_choices_and_with_every_chunk(
    gateway: GatewayThread, script: Any, more: dict[str, Any]
) -> None:
    """Also with chunks that add nothing to the message yet."""
    script.pieces = ["<thi", "nk>a", "</think>", "b"]
    body = ASK | {"return_token_ids": True} | more
    reply = gateway.ask("POST", CHAT, body)
    ids = reply.body["choices"][0]["token_ids"]
    assert len(ids) == reply.body["usage"]["completion_tokens"]
    with gateway.resume(reply.request_id) as again:
        events = [event.choice for event in again.rest() if event.data not in ("", "[DONE]")]
    assert [one for event in events for one in event.get("token_ids", [])] == ids
    assert "token_ids" not in gateway.ask("POST", CHAT, ASK).body["choices"][0]
    completed = gateway.complete(return_token_ids=True)
    assert completed.body["choices"][0]["token_ids"] == ids


def test_options_tells_the_methods_of_a_path(gateway: GatewayThread) -> None:
    for path, allowed in ((CHAT, {"POST"}), ("/v1/models", {"GET", "HEAD"})):
        reply = gateway.ask("OPTIONS", path)
        assert (reply.status, reply.text) == (204, "")
        assert set(reply.headers["Allow"].split(", ")) == {*allowed, "OPTIONS"}
    assert gateway.ask("OPTIONS", "/nowhere").status == 404


def test_head_is_taken_where_the_answer_is_known_at_once(gateway: GatewayThread) -> None:
    request_id = gateway.ask("POST", CHAT, ASK).request_id
    reply = gateway.ask("HEAD", "/v1/models")
    assert (reply.status, reply.text) == (200, "")
    for path in (CHAT, f"/v1/requests/{request_id}", f"/v1/requests/{request_id}/events"):
        reply = gateway.ask("HEAD", path)
        assert (reply.status, reply.text) == (405, "")
        assert reply.headers["Allow"] in ("GET", "POST")


METADATA = {"row": "7", "experiment": "a"}


def test_metadata_is_kept_with_the_call_and_shown_by_every_gateway_but_not_to_the_worker(
    client: Any, start: Any, fake: Any
) -> None:
    chats = client.chat.completions
    created = chats.create(model="fake", **ASK, metadata=METADATA, store=True)
    assert created.metadata == METADATA
    assert not {"metadata", "store"} & fake.requests[-1].body.keys()
    with openai_client(start().url) as other:
        assert other.chat.completions.retrieve(created.id) == created
    assert "metadata" not in chats.create(model="fake", **ASK, store=False).to_dict()
    with fake.client() as queue:
        assert queue.result(created.id).metadata["openai"]["metadata"] == METADATA


def test_a_stream_keeps_its_metadata_for_the_whole_answer(client: Any) -> None:
    chats = client.chat.completions
    chunks = list(chats.create(model="fake", **ASK, metadata=METADATA, stream=True))
    assert all("metadata" not in chunk.to_dict() for chunk in chunks)
    assert chats.retrieve(chunks[0].id).metadata == METADATA


def test_the_most_metadata_is_kept_in_any_script_beside_the_types_of_many_functions(
    gateway: GatewayThread, start: Any
) -> None:
    metadata = {f"{n:02}" + "\U0001f642" * 62: "\U0001f642" * 512 for n in range(16)}
    properties = {f"argument_{n}": {"type": "integer"} for n in range(30)}
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"f{n}" + "x" * 60,
                "parameters": {"type": "object", "properties": properties},
            },
        }
        for n in range(100)
    ]
    reply = gateway.ask("POST", CHAT, ASK | {"metadata": metadata, "tools": tools})
    assert (reply.status, reply.body["metadata"]) == (200, metadata)
    assert start().ask("GET", f"{CHAT}/{reply.request_id}").body["metadata"] == metadata


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": ["a"]}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {"a" * 65: "x"}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"store": "yes"}, "store"),
        ({"store": 1}, "store"),
    ],
)
def test_other_metadata_and_another_store_are_refused_by_name(
    gateway: GatewayThread, fields: dict[str, Any], param: str
) -> None:
    reply = gateway.ask("POST", CHAT, ASK | fields)
    assert (reply.status, reply.error["param"]) == (400, param)


def test_a_repeated_call_with_other_metadata_is_another_call(gateway: GatewayThread) -> None:
    body = ASK | {"metadata": METADATA}
    first = gateway.ask("POST", CHAT, body, **KEY)
    again = gateway.ask("POST", CHAT, body, **KEY)
    assert (again.body, again.body["metadata"]) == (first.body, METADATA)
    assert gateway.ask("POST", CHAT, ASK | {"metadata": {"row": "8"}}, **KEY).status == 422


def test_only_chats_are_found_among_the_chats(gateway: GatewayThread) -> None:
    request_id = gateway.complete().request_id
    assert gateway.ask("GET", f"/v1/requests/{request_id}").status == 200
    assert gateway.ask("GET", f"{CHAT}/{request_id}").status == 404
