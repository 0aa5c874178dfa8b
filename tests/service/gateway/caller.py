"""A caller in a process of its own, which can be killed: it prints what it has, event by event.

`python -m tests.service.gateway.caller PORT PATH [LAST_EVENT_ID]` with the body of a call on stdin;
without one it comes back. A line is the id of an event and its tokens, as JSON.
"""

import json
import sys

from tests.service.gateway.front import Front, Stream


def main() -> None:
    port, path, *last = sys.argv[1:]
    body = json.loads(sys.stdin.read() or "null")
    headers = {"Last_Event_ID": last[0]} if last else {}
    if body is not None:
        headers["Idempotency_Key"] = body.pop("key")
    method = "GET" if body is None else "POST"
    with Stream(Front(int(port)).send(method, path, body, **headers)) as stream:
        print(json.dumps([stream.request_id, []]), flush=True)
        for event in stream:
            if event.data == "[DONE]":
                print(json.dumps([event.id, ["[DONE]"]]), flush=True)
                continue
            if "error" in event.body:
                print(json.dumps([event.id, [event.body["error"]["code"]]]), flush=True)
                continue
            told = event.choice["logprobs"]
            print(json.dumps([event.id, told["tokens"] if told else []]), flush=True)


if __name__ == "__main__":
    main()
