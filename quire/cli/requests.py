"""The verbs for single requests: submit, tail, result, inspect."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from quire.cli.console import (
    Console,
    add_server,
    client_of,
    flags_of,
    json_map,
    not_negative,
    schema_file,
    text_file,
)
from quire.cli.exit_codes import EXIT_ERROR, EXIT_OK, EXIT_PARTIAL
from quire.client.client import Client, Handle
from quire.errors import BrokerUnavailable, InvalidRequest, ProtocolError, RequestFailed
from quire.queue.side import Side
from quire.wire.arguments import RequestArguments
from quire.wire.constraints import CONSTRAINTS
from quire.wire.json_values import plain
from quire.wire.output import Completion
from quire.wire.protocol import GenerationRequest
from quire.wire.sampling import SamplingParams

#: Flags of `submit` that are sampling parameters of the same name: their type and help.
_SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "longest output"),
    "min_tokens": (int, "shortest output"),
    "temperature": (float, "0 takes the most probable token; higher is more random"),
    "top_k": (int, "sample from the N most probable tokens; 0 for all"),
    "top_p": (float, "sample from the most probable tokens up to this total probability"),
    "min_p": (float, "drop tokens below this share of the highest probability"),
    "repetition_penalty": (float, "above 1 makes tokens of prompt and output less likely"),
    "presence_penalty": (float, "above 0 makes tokens of the output less likely"),
    "frequency_penalty": (float, "the same, multiplied by the number of occurrences"),
    "seed": (int, "seed of the sampling [a new one each time]"),
    "logprobs": (int, "return log-probabilities of each token and of the N likeliest"),
    "prompt_logprobs": (int, "the same of each token of the prompt"),
}


def add_submit(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire submit`."""
    from_stdin = "one request each; `-` reads one from stdin, without its last line end"
    parser.add_argument("prompt", nargs="+", help=from_stdin)
    parser.add_argument("--chat", action="store_true", help="send it as a chat message of a user")
    for name, (kind, help_) in _SAMPLING.items():
        default = SamplingParams.model_fields[name].default
        text = help_ if default is None else f"{help_} [{default}]"
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends the output; may be repeated"
    )
    _add_constraints(parser)
    parser.add_argument(
        "--priority", default="normal", help="low, normal, high or critical [normal]"
    )
    parser.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="end it after this time, done or not"
    )
    target = "how long it should take: ranks it under the policy adaptive, and never ends it"
    parser.add_argument("--target-latency", type=float, metavar="SECONDS", help=target)
    parser.add_argument("--delay", type=float, metavar="SECONDS", help="queue it after this time")
    parser.add_argument("--model", help="a worker with another model rejects the request")
    parser.add_argument("--adapter", metavar="NAME", help="adapter of the model to use")
    parser.add_argument("--tenant", help="tenant of the request [default]")
    id_help = "request id; repeating a request is harmless, another request with its id is refused"
    parser.add_argument("--id", metavar="ID", help=id_help)
    key = "if the tenant has used it before, the earlier request is returned"
    parser.add_argument("--idempotency-key", metavar="KEY", help=key)
    session = "requests of a tenant with the same session run one after the other"
    parser.add_argument("--session", metavar="NAME", help=session)
    parser.add_argument("--metadata", type=json_map, metavar="JSON", help="echoed in the result")
    trace = "W3C header; the worker logs its ids [TRACEPARENT]"
    context = os.environ.get("TRACEPARENT")
    parser.add_argument("--traceparent", default=context, metavar="HEADER", help=trace)
    wait = parser.add_mutually_exclusive_group()
    wait.add_argument(
        "--follow", action="store_true", help="print the output while it is generated"
    )
    wait.add_argument("--wait", action="store_true", help="print the output when it is complete")
    add_server(parser)


def run_submit(arguments: argparse.Namespace, console: Console) -> int:
    """Prints the ids, or with --follow and --wait the output."""
    prompts = [_from_stdin() if text == "-" else text for text in arguments.prompt]
    named = arguments.id is not None or arguments.idempotency_key is not None
    if named and len(prompts) > 1:
        raise InvalidRequest("id", "an id or an idempotency key allows only one prompt")
    requests = [_request_of(arguments, prompt) for prompt in prompts]
    client = client_of(arguments)
    handles = client.submit_many(requests)
    if not (arguments.follow or arguments.wait):
        for handle in handles:
            console.data({"request_id": handle.request_id}, handle.request_id)
        return EXIT_OK
    show, flags = _tail if arguments.follow else _result, flags_of(arguments)
    good = []
    for number, handle in enumerate(handles):
        try:
            good.append(show(handle, console, flags=flags))
        except (BrokerUnavailable, KeyboardInterrupt):
            for other in handles[number + 1 :]:
                _print_continuation(f"quire result {other.request_id}{flags}")
            raise
    return _exit_code(good)


def add_tail(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire tail`."""
    parser.add_argument("id", help="id of the request")
    parser.add_argument("--after", type=int, default=0, metavar="N", help="skip N tokens")
    add_server(parser)


def run_tail(arguments: argparse.Namespace, console: Console) -> int:
    """Prints chunks; with --json one record for each, and a last one for the end."""
    client = client_of(arguments)
    handle, flags = _known(client, arguments.id), flags_of(arguments)
    return _exit_code([_tail(handle, console, after=arguments.after, flags=flags)])


def add_result(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire result`."""
    parser.add_argument("id", help="id of the request")
    parser.add_argument("--timeout", type=not_negative, metavar="SECONDS", help="give up waiting")
    add_server(parser)


def run_result(arguments: argparse.Namespace, console: Console) -> int:
    """Prints the text, or the whole completion with --json."""
    client = client_of(arguments)
    handle, flags = _known(client, arguments.id), flags_of(arguments)
    return _exit_code([_result(handle, console, timeout=arguments.timeout, flags=flags)])


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Arguments of `quire inspect`."""
    parser.add_argument("id", help="id of the request")
    parser.add_argument("--content", action="store_true", help="print prompt and output, too")
    add_server(parser)


def run_inspect(arguments: argparse.Namespace, console: Console) -> int:
    """Prints the record, the request while it is kept, the completion, and a summary of the log."""
    broker = client_of(arguments).broker_of(arguments.id)
    found = _everything(broker, arguments.id, content=arguments.content)
    if console.is_json:
        console.data(found)
    else:
        rows = [(name, value) for name, value in found.items() if value not in (None, {}, [])]
        console.table(("field", "value"), [(n, _cell(v)) for n, v in rows])
    return EXIT_OK


def _add_constraints(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for constraints: sampling parameters of the same name, at most one."""
    one = parser.add_mutually_exclusive_group()
    json_text = "the output is JSON that matches the schema in FILE"
    one.add_argument("--json-schema", type=schema_file, metavar="FILE", help=json_text)
    object_text = "the output is a JSON object"
    one.add_argument("--json-object", action="store_const", const=True, help=object_text)
    one.add_argument("--regex", metavar="PATTERN", help="the whole output matches it")
    choice_text = "the output is exactly this text; repeated, exactly one of these texts"
    one.add_argument("--choice", action="append", metavar="TEXT", help=choice_text)
    grammar_text = "the output follows the Lark grammar in FILE"
    one.add_argument("--grammar", type=text_file, metavar="FILE", help=grammar_text)
    space_text = (
        "white space in JSON: `none` but single spaces as json.dumps writes, or `any` [none]"
    )
    parser.add_argument("--json-whitespace", choices=("none", "any"), help=space_text)


def _from_stdin() -> str:
    """The text of stdin without its last line end (LF, or CR and LF).

    `echo` and editors add that line end; it is not part of the prompt.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Otherwise Python would replace each CR by LF.
        sys.stdin.reconfigure(newline="")
    text = sys.stdin.read()
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def _request_of(arguments: argparse.Namespace, prompt: str) -> RequestArguments:
    sampling = {
        name: getattr(arguments, name)
        for name in (*_SAMPLING, "stop", "json_whitespace", *CONSTRAINTS)
        if getattr(arguments, name) is not None
    }
    subject: RequestArguments = {"prompt": prompt}
    if arguments.chat:
        subject = {"messages": [{"role": "user", "content": prompt}]}
    subject |= {
        "sampling": sampling,
        "priority": arguments.priority,
        "deadline": arguments.deadline,
        "target_latency_seconds": arguments.target_latency,
        "delay_seconds": arguments.delay,
        "model": arguments.model,
        "adapter": arguments.adapter,
        "tenant": arguments.tenant,
        "request_id": arguments.id,
        "idempotency_key": arguments.idempotency_key,
        "session_id": arguments.session,
        "metadata": arguments.metadata,
        "headers": {"traceparent": arguments.traceparent} if arguments.traceparent else None,
    }
    return subject


def _known(client: Client, request_id: str) -> Handle:
    """A request that is there: of no other could be said that it continues. UnknownRequest."""
    handle = client.attach(request_id)
    handle.status()
    return handle


def _tail(handle: Handle, console: Console, *, after: int = 0, flags: str) -> bool:
    ends_line, seen = True, after
    try:
        for chunk in handle.stream(after=after):
            if console.is_json:
                console.data({"request_id": handle.request_id} | plain(chunk))
            else:
                console.piece(chunk.text)
                ends_line = chunk.text.endswith("\n")
            seen = chunk.end
    except (BrokerUnavailable, KeyboardInterrupt):
        if not ends_line:
            console.piece("\n")
        _print_continuation(f"quire tail {handle.request_id} --after {seen}{flags}")
        raise
    except RequestFailed as error:
        if not ends_line:
            console.piece("\n")
        _report(handle, error, console)
        return False
    if not ends_line:
        console.piece("\n")
    if console.is_json:
        console.data({"request_id": handle.request_id, "state": str(handle.status().state)})
    return True


def _result(handle: Handle, console: Console, *, timeout: float | None = None, flags: str) -> bool:
    try:
        completion = handle.result(timeout=timeout)
    except (BrokerUnavailable, KeyboardInterrupt):
        _print_continuation(f"quire result {handle.request_id}{flags}")
        raise
    except RequestFailed as error:
        _report(handle, error, console)
        return False
    console.data(completion, completion.text)
    return True


def _print_continuation(command: str) -> None:
    """Prints the command that follows the request; its id may not have been printed before."""
    sys.stderr.write(f"the request continues; to see the rest: {command}\n")


def _report(handle: Handle, error: RequestFailed, console: Console) -> None:
    if console.is_json and error.completion is not None:
        console.data(error.completion)
    console.complain(f"{handle.request_id}: {error}")


def _exit_code(good: Iterable[bool]) -> int:
    outcomes = list(good)
    if all(outcomes):
        return EXIT_OK
    return EXIT_PARTIAL if any(outcomes) else EXIT_ERROR


def _everything(broker: Side, request_id: str, *, content: bool) -> dict[str, Any]:
    status = broker.status(request_id)
    found: dict[str, Any] = plain(status)
    connection = broker.connection
    record, body_key, output = broker.keys.of_request(request_id)
    if data := connection.get(body_key):
        try:
            request = GenerationRequest.decode(data)  # type: ignore[arg-type]
        except (ProtocolError, InvalidRequest) as error:
            found["request"] = f"unreadable: {error}"
        else:
            # Not pydantic's dump: it fails for bytes that are not UTF-8 and for deep nesting.
            shown = {name: plain(value) for name, value in request if value is not None}
            shown["priority"] = int(request.priority)
            found["request"] = shown if content else _without_content(shown)
    found["log_entries"] = connection.xlen(output)
    expires_ms: Any = connection.pttl(record)
    found["expires_seconds"] = expires_ms / 1000
    text, seen = "", 0
    completion: Completion | None = None
    while read := broker.read_output({request_id: seen}).get(request_id):
        for item in read:
            if isinstance(item, Completion):
                completion = item
            else:
                text, seen = text + item.text, item.end
        if completion is not None:
            break
    found["completion"] = _without_output(completion)
    if content:
        found["text"] = text
    return found


def _without_output(completion: Completion | None) -> dict[str, Any] | None:
    """The completion without output that it does not have: the log has it, in chunks."""
    if completion is None:
        return None
    empty = {name for name in ("text", "token_ids") if not getattr(completion, name)}
    return {name: value for name, value in plain(completion).items() if name not in empty}


def _without_content(request: dict[str, Any]) -> dict[str, Any]:
    """The request without its prompt, which may be confidential; --content shows it."""
    body = {k: v for k, v in request["body"].items() if k not in ("prompt", "messages")}
    return request | {"body": body}


def _cell(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
