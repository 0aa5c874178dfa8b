"""OpenAI's own client against the gateway: what it parses, what it raises, what it repeats."""

import contextlib
import socket
import socketserver
import threading

import openai
import pytest
from openai import OpenAI

from quire.errors import RequestFailed
from service.gateway import streaming as streams
from tests.service.builders import eventually
from tests.service.gateway.builders import openai_client

MESSAGES = [{"role": "user", "content": "hello"}]


def test_a_chat_is_parsed(client, fake):
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, n=2, max_completion_tokens=16, seed=3,
        logprobs=True, top_logprobs=1, extra_body={"top_k": 5},
    )  # fmt: skip
    assert [choice.message.content for choice in answer.choices] == ["one two three"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].token == "o"
    assert answer.usage.total_tokens == 5 + 26
    assert answer._request_id == answer.id
    assert fake.requests[0].body["top_k"] == 5


def test_a_list_of_prompts_is_parsed_as_one_answer_and_as_a_stream(client, script):
    script.pieces = [lambda request: f"to {request.body['prompt']}"]
    answer = client.completions.create(model="fake", prompt=["a", "b"], n=2)
    told = ["to a", "to a", "to b", "to b"]
    assert [choice.text for choice in answer.choices] == told
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 16)
    texts = [""] * 4
    for chunk in client.completions.create(model="fake", prompt=["a", "b"], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == told
    answer = client.completions.create(model="fake", prompt=[[1, 2], [3]])
    assert [choice.text for choice in answer.choices] == ["to [1, 2]", "to [3]"]


def test_a_streamed_chat_is_parsed_with_its_usage(client):
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    told = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(told) == "one two three"
    assert chunks[-1].usage.completion_tokens == 13


def test_the_clients_own_accumulation_of_a_stream_comes_to_the_same(client):
    with client.chat.completions.stream(model="fake", messages=MESSAGES) as stream:
        completion = stream.get_final_completion()
    assert completion.choices[0].message.content == "one two three"


def test_models_are_parsed(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "quire"


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (openai.BadRequestError, {"extra_body": {"best_of_all": 1}}),
        (openai.NotFoundError, {"model": "other"}),
        (openai.APITimeoutError, {"timeout": 0.2}),
    ],
)
def test_errors_are_of_the_class_that_callers_catch(client, script, error, options):
    script.pieces = [None]
    arguments = {"model": "fake", "prompt": "x"} | options
    with pytest.raises(error):
        client.completions.create(**arguments)


def test_a_stranger_a_full_queue_and_a_failure_are_of_their_classes(start, fake, script, tmp_path):
    (tmp_path / "keys").write_text("sk-search-7fc1e2b0 search\n")
    strict = start(max_backlog=1, keys_file=tmp_path / "keys")

    def ask(api_key, **options):
        with OpenAI(base_url=strict.url, api_key=api_key, max_retries=0) as client:
            return client.completions.create(model="fake", prompt="x", **options)

    with pytest.raises(openai.AuthenticationError):
        ask("sk-wrong-0000000000")
    with pytest.raises(openai.PermissionDeniedError):
        ask("sk-search-7fc1e2b0", extra_headers={"X-Quire-Priority": "critical"})
    script.pieces = [RequestFailed("engine_error", "the device is gone")]
    with pytest.raises(openai.InternalServerError, match="the device is gone"):
        ask("sk-search-7fc1e2b0")
    fake.broker.pause("a test fills it")
    with pytest.raises(openai.RateLimitError):
        ask("sk-search-7fc1e2b0", n=2)


def test_a_stream_that_fails_in_the_middle_raises(client, script):
    script.pieces = ["one ", RequestFailed("engine_error", "the device is gone")]
    with pytest.raises(openai.APIError, match="the device is gone"):
        list(client.completions.create(model="fake", prompt="x", stream=True))


@pytest.mark.parametrize("pieces", [[None, "one ", "two"], ["one ", None, "two"]])
def test_a_long_silence_is_no_event_to_the_client(client, script, monkeypatch, pieces):
    monkeypatch.setattr(streams, "FIRST_EVENT_SECONDS", 0.02)
    monkeypatch.setattr(streams, "COMMENT_SECONDS", 0.02)
    silences = []
    plain = streams.EventStream._send

    def send(self, body, send):
        if body.startswith(b":"):
            silences.append(body)
            # The answer goes on behind some of them.
            if len(silences) == 3:
                script.release.set()
        return plain(self, body, send)

    monkeypatch.setattr(streams.EventStream, "_send", send)
    script.pieces = pieces
    told = client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == "one two"
    assert len(silences) >= 3


def test_a_deadline_that_passed_is_not_repeated(gateway, script):
    script.pieces = [None]
    soon = {"X-Quire-Deadline": "0.05"}
    with (
        openai_client(gateway.url, max_retries=2) as client,
        pytest.raises(openai.InternalServerError, match="deadline"),
    ):
        client.completions.create(model="fake", prompt="x", extra_headers=soon)
    name = "quire_gateway_responses_total"
    assert gateway.metric(name, route="completions", status="504") == 1


def test_a_call_that_the_client_repeats_is_one_generation_where_it_has_a_key(gateway, fake, script):
    script.pieces = [None, "one"]

    def release_after_a_hang_up():
        gateway.wait_for_hang_up("left")
        script.release.set()

    releasing = threading.Thread(target=release_after_a_hang_up)
    releasing.start()
    with openai_client(gateway.url, max_retries=50, timeout=0.3) as client:
        answer = client.completions.create(
            model="fake", prompt="x", extra_headers={"Idempotency-Key": "k"}
        )
    releasing.join()
    assert answer.choices[0].text == "one"
    assert len(fake.requests) == 1


class Balancer(socketserver.ThreadingTCPServer):
    """Takes each new connection to the gateway it is told."""

    daemon_threads = True

    def __init__(self, gateway):
        super().__init__(("127.0.0.1", 0), Relay)
        self.gateway = gateway
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Relay(socketserver.BaseRequestHandler):
    """One connection, in both directions until either end has ended."""

    def handle(self):
        with socket.create_connection(("127.0.0.1", self.server.gateway.port)) as there:
            back = threading.Thread(target=copy, args=(there, self.request))
            back.start()
            copy(self.request, there)
            back.join()


def copy(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_gateway_breaks_off_is_got_from_another_without_a_word(
    start, fake, script, patient_status, stream
):
    script.pieces = [None, "one"]
    first, second = start(drain_seconds=0.0), start()
    told = []

    def ask():
        with openai_client(balancer.url) as client:
            made = client.chat.completions.create(model="fake", messages=MESSAGES, stream=stream)
            if stream:
                told.extend(chunk.choices[0].delta.content or "" for chunk in made)
            else:
                told.append(made.choices[0].message.content)

    with Balancer(first) as balancer:
        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: fake.requests, "the request runs")
        balancer.gateway = second
        first.stop()
        first.join()
        script.release.set()
        asking.join()
    assert "".join(told) == "one"
    assert len(fake.requests) == 1
