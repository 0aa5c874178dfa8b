"""docs/reference/protocol.md is enough to write a client and a worker, with redis-py and msgpack.

Nothing of the package is imported here except by the tests that compare it with the document.
"""

import re
import secrets
import shlex
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "reference" / "protocol.md").read_text()
SCRIPTS = {
    file.stem: file.read_text()
    for file in (ROOT / "quire" / "queue").rglob("*.lua")
    if file.parent.name != "batches"
}

#: transition -> the files it is made of, from the table of the document.
FILES = {
    name: files.split()
    for name, files in re.findall(r"^\| `(\w+)` \| (common[\w ]*) \|", DOCUMENT, re.MULTILINE)
}

#: (base, prime) of the hash, from the document.
HASHES = [
    (int(base), int(prime)) for base, prime in re.findall(r"\((\d{5,}), (\d{5,})\)", DOCUMENT)
]


def done_message(state: str, reason: str, *, error: str | None = None) -> bytes:
    return msgpack.packb({
        "state": state, "finish_reason": reason, "usage": {"prompt_tokens": 3},
        "error": {"code": error, "message": error, "field": None} if error else None,
    })  # fmt: skip


SETTINGS = [
    10_000, 86_400_000, 3_600_000, 5, 0,
    done_message("cancelled", "cancelled", error="cancelled"),
    done_message("expired", "deadline", error="deadline_exceeded"),
    done_message("expired", "deadline", error="queue_timeout"),
    done_message("failed", "error", error="attempts_spent"),
]  # fmt: skip


class Foreign:
    """A client and a worker that know the document only."""

    def __init__(self, connection, queue: str) -> None:
        self.redis = connection
        self.prefix = f"quire:{{{queue}.0}}"

    def key(self, *parts: str) -> str:
        return ":".join((self.prefix, *parts))

    def run(self, transition: str, request_ids, *arguments):
        queue = ["open", "counts", "delay", "control", "wait", "in:0", "in:1", "in:2", "in:3"]
        queue += ["position", "rank:0", "rank:1", "rank:2", "rank:3", "arrival"]
        queue += ["fair:0", "fair:1", "fair:2", "fair:3", "rate", "turn", "turns", "ends"]
        if transition == "expire":
            queue.append("lease")
        elif transition not in ("submit", "cancel"):
            queue += ["lease", "dead"]
        keys = [self.key(name) for name in queue]
        for request_id in request_ids:
            keys += [self.key(kind, request_id) for kind in "rbo"]
            if "~" in request_id:
                group = request_id.partition("~")[0]
                keys += [self.key(kind, group) for kind in ("g", "gm", "ge")]
        return self.eval(transition, keys, *arguments)

    def eval(self, transition: str, keys, *arguments):
        source = "\n".join(SCRIPTS[file] for file in FILES[transition])
        return self.redis.eval(source, len(keys), *keys, *SETTINGS, *arguments)

    def submit(self, request_id: str, *, not_before: int = 0, metadata=None, asked=()):
        body = {"prompt": [1, 2, 3], "max_tokens": 16, "seed": 7}
        request = {
            "v": 1, "id": request_id, "kind": "tokens", "body": body, "tenant": "default",
            "priority": 2, "created_ms": 0, "metadata": metadata or {},
        }  # fmt: skip
        packed = msgpack.packb(metadata) if metadata else b""
        return self.run(
            "submit", [request_id], request_id, 2, "default", 0, packed, msgpack.packb(request),
            "", not_before, 19, *asked,
        )  # fmt: skip

    def read(self, request_id: str):
        """All tokens, the text and the end, checking places and hashes on the way."""
        tokens, text, hashed = [], "", [0, 0]
        while True:
            entries = self.redis.xread({self.key("o", request_id): f"{len(tokens)}-0"}, count=1)
            ((_, ((entry_id, fields),)),) = entries
            place = int(entry_id.partition(b"-")[0])
            if b"done" in fields:
                assert place == len(tokens)
                assert fields[b"prefix"].decode() == "{}.{}".format(*hashed)
                return tokens, text, msgpack.unpackb(fields[b"done"]), fields
            assert int(fields[b"from"]) == len(tokens)
            told = msgpack.unpackb(fields[b"ids"])
            ids = [id_of(token) for token in (told["tokens"] if isinstance(told, dict) else told)]
            tokens, text = tokens + ids, text + fields[b"text"].decode()
            hashed = hash_of(ids, hashed)
            assert place == len(tokens) - 1
            assert fields[b"prefix"].decode() == "{}.{}".format(*hashed)

    def claim(self):
        heads = [
            (rank, name)
            for level in range(4)
            for name, rank in self.redis.zrange(self.key("rank", str(level)), 0, 0, withscores=True)
        ]
        request_id, owner = min(heads)[1].decode(), secrets.token_hex(16)
        reply = self.run("claim", [request_id], request_id, owner, "")
        assert reply[0] == b"claimed", reply
        return request_id, int(reply[1]), owner, msgpack.unpackb(reply[2])

    def extend(self, fence, log, ids):
        request_id, epoch, owner = fence
        places, hashed = [], [0, 0]
        for tokens in (log, ids):
            hashed = hash_of(tokens, hashed)
            prefix = "{}.{}".format(*hashed)
            count = len(log) + (len(ids) if places else 0)
            places.append(f"epoch {epoch} owner {owner} tokens {count} hash {prefix}")
        # The only transition whose keys do not begin with those of the queue.
        keys = [self.key("position"), self.key("o", request_id)]
        return self.eval(
            "extend", keys, request_id, *places, len(log), f"{count - 1}-{epoch}",
            msgpack.packb(ids), text_of(ids), "", prefix,
        )  # fmt: skip

    def commit(
        self,
        fence,
        start: int,
        tokens,
        *,
        done: bytes = b"",
        state: str = "",
        fingerprint: str = "",
        prompt=None,
    ):
        ids = [id_of(token) for token in tokens]
        first, second = hash_of(ids, [0, 0])
        request_id, epoch, owner = fence
        line = f"{start} {start + len(ids)} {first} {second} {state or '-'}"
        line += f" {epoch} {owner} {request_id}" + (f" {fingerprint}" if fingerprint else "")
        return self.run(
            "commit", [request_id], f"{line}\n",
            msgpack.packb({"prompt": prompt, "tokens": tokens} if prompt else tokens),
            text_of(ids), "", *([done] if state else []),
        )  # fmt: skip


def id_of(token):
    """A token is its id, or an array that begins with it."""
    return token[0] if isinstance(token, list) else token


def text_of(ids):
    return "".join(chr(97 + token % 26) for token in ids)


def hash_of(ids, before):
    after = list(before)
    for token in ids:
        after = [(h * b + token + 1) % p for h, (b, p) in zip(after, HASHES, strict=True)]
    return after


@pytest.fixture
def foreign(connection, broker):
    return Foreign(connection, broker.keys.queue)


def test_a_foreign_client_submits_and_reads_what_a_foreign_worker_commits(foreign):
    assert foreign.submit("hello", metadata={"row": 7}) == [b"created", b"hello", b"queued"]
    assert foreign.submit("hello") == [b"known", b"hello", b"queued", b""]
    *fence, request = foreign.claim()
    assert (request["body"]["prompt"], request["metadata"]) == ([1, 2, 3], {"row": 7})
    hashed = "{}.{}".format(*hash_of([5, 6, 70_000], [0, 0])).encode()
    first = {"start": 0, "tokens": [5, 6, 70_000]}
    assert foreign.commit(fence, **first, fingerprint="engine a=1") == b"ok 3 0 " + hashed
    assert foreign.commit(fence, **first, fingerprint="engine a=2") == b"replayed 3 0 " + hashed
    record = foreign.redis.hgetall(foreign.key("r", "hello"))
    assert record[b"fingerprint"] == b"engine a=1"
    assert foreign.run("heartbeat", ["hello"], *fence) == [[1, 0]]
    end = done_message("completed", "length")
    assert foreign.extend(fence, [5, 6, 70_000], [9, 2]) == b"+"
    assert foreign.extend(fence, [5, 6, 70_000], [9, 2]) == b"-"
    reply = foreign.commit(fence, 5, [8], done=end, state="completed")
    assert reply.split()[:3] == [b"ok", b"6", b"0"]
    tokens, text, done, fields = foreign.read("hello")
    assert (tokens, text, done["state"]) == ([5, 6, 70_000, 9, 2, 8], "fgijci", "completed")
    assert msgpack.unpackb(fields[b"metadata"]) == {"row": 7}
    assert int(fields[b"attempts"]) == 1


def test_the_package_reads_what_a_foreign_worker_wrote_and_the_other_way_round(foreign, broker):
    from quire import Client
    from tests.quire.builders import claim_next, make_item

    handle = Client(broker).submit([1, 2, 3], priority="high")
    *fence, _ = foreign.claim()
    foreign.commit(fence, 0, [1, 2], done=done_message("completed", "eos"), state="completed")
    completion = handle.result(timeout=10)
    assert (completion.token_ids, completion.usage.prompt_tokens) == ((1, 2), 3)
    foreign.submit("back")
    broker.commit([make_item(claim_next(broker).claim, 0, 5, final=True)])
    assert len(foreign.read("back")[0]) == 5


def test_what_a_foreign_client_says_of_what_it_asks_is_kept_and_may_be_left_out(foreign, broker):
    from quire import Client

    foreign.submit("told", asked=[b"F mine"])
    foreign.submit("untold")
    assert foreign.submit("told", asked=[b"F other"])[3] == b"F mine"
    assert foreign.submit("untold", asked=[b"F other"])[3] == b""
    client = Client(broker)
    for request_id in ("told", "untold"):
        assert client.submit("another prompt", request_id=request_id).request_id == request_id
    client.submit("x", request_id="ours")
    _, _, state, asked = foreign.submit("ours", asked=[b"F mine"])
    assert (state, asked[:1], len(asked)) == (b"queued", b"2", 15)


def test_log_probabilities_are_read_as_a_foreign_worker_wrote_them_and_the_other_way_round(
    foreign, broker
):
    from quire import Client, TokenLogprob, TopLogprob
    from tests.quire.builders import claim_next, make_item, with_logprobs

    handle = Client(broker).submit([1], priority="high", sampling={"logprobs": 1})
    *fence, request = foreign.claim()
    assert request["body"]["logprobs"] == 1
    tokens = [[5, -1.5, "f", 9, -0.5, "j"], [6, 0.0, "g", 6, 0.0, "g"]]
    foreign.commit(fence, 0, tokens, done=done_message("completed", "eos"), state="completed")
    assert handle.result(timeout=10).logprobs == (
        TokenLogprob(5, -1.5, "f", (TopLogprob(9, -0.5, "j"),)),
        TokenLogprob(6, 0.0, "g", (TopLogprob(6, 0.0, "g"),)),
    )
    foreign.submit("back")
    broker.commit([with_logprobs(make_item(claim_next(broker).claim, 0, 5, final=True))])
    assert len(foreign.read("back")[0]) == 5
    ((_, fields), _) = foreign.redis.xrange(foreign.key("o", "back"))
    token_id, logprob, text, *best = msgpack.unpackb(fields[b"ids"])[0]
    assert (token_id, logprob, text, len(best)) == (13, -1.0, "a", 6)


def test_the_prompt_is_read_as_a_foreign_worker_wrote_it_and_the_other_way_round(foreign, broker):
    from quire import Client, PromptToken, TopLogprob
    from tests.quire.builders import claim_next, make_item

    handle = Client(broker).submit([8, 9], priority="high", sampling={"prompt_logprobs": 1})
    *fence, request = foreign.claim()
    assert request["body"]["prompt_logprobs"] == 1
    told = [[8, None, "i"], [9, -1.5, "j", 7, -0.5, "h"]]
    foreign.commit(
        fence, 0, [1, 2], prompt=told, done=done_message("completed", "eos"), state="completed"
    )
    completion = handle.result(timeout=10)
    wanted = (PromptToken(8, None, "i"), PromptToken(9, -1.5, "j", (TopLogprob(7, -0.5, "h"),)))
    assert (completion.token_ids, completion.prompt_tokens) == ((1, 2), wanted)
    foreign.submit("back")
    item = make_item(claim_next(broker).claim, 0, 5, final=True)
    broker.commit([replace(item, told_prompt=wanted)])
    assert len(foreign.read("back")[0]) == 5
    ((_, fields), _) = foreign.redis.xrange(foreign.key("o", "back"))
    assert msgpack.unpackb(fields[b"ids"])["prompt"] == told


def test_a_foreign_client_takes_the_other_ways_too(foreign):
    seconds, _ = foreign.redis.time()
    assert foreign.submit("g~later", not_before=(seconds + 60) * 1000)[2] == b"scheduled"
    assert foreign.run("cancel", ["g~later"], "g~later") == b"cancelled"
    assert foreign.redis.hgetall(foreign.key("g", "g"))[b"cancelled"] == b"1"
    foreign.submit("a")
    *fence, _ = foreign.claim()
    broken = done_message("failed", "error", error="broken")
    state = foreign.run("fail", ["a"], *fence, 1, "broken", broken, 10, 10, 0)
    assert state == b"scheduled"
    foreign.redis.zadd(foreign.key("delay"), {"a": 1})
    assert foreign.run("promote", ["a"], "a") == [b"queued"]
    *fence, _ = foreign.claim()
    assert foreign.run("release", ["a"], *fence) == [1]
    *fence, _ = foreign.claim()
    foreign.redis.zadd(foreign.key("lease"), {"a": 1})
    assert foreign.run("reap", ["a"], "a") == [b"queued"]
    assert foreign.commit(fence, 0, [1]) == b"fenced 0 0 -"
    *fence, _ = foreign.claim()
    assert foreign.run("dead_letter", ["a"], *fence, "tired", broken) == 1
    ((letter_id, letter),) = foreign.redis.xrange(foreign.key("dead"))
    assert letter[b"id"] == b"a"
    assert foreign.run("requeue", ["a"], "a", letter_id, 1) == b"queued"
    assert foreign.run("expire", ["a"], "a") == [b""]
    foreign.redis.zadd(foreign.key("wait"), {"a": 1})
    assert foreign.run("expire", ["a"], "a") == [b"expired"]


def test_the_lines_for_the_console_are_commands(foreign, broker):
    page = (ROOT / "docs" / "how-to" / "operate.md").read_text()
    (block,) = re.findall(r"```redis-cli\n(.*?)```", page, re.DOTALL)
    foreign.submit("hello")
    for line in block.replace("quire:{default.0}", foreign.prefix).splitlines():
        foreign.redis.execute_command(*shlex.split(line))
    record = foreign.redis.hgetall(foreign.key("r", "hello"))
    assert record[b"state"] == b"queued"


def test_the_document_names_every_transition_with_its_files_and_every_key():
    from quire.keys import Keys
    from quire.queue.scripts import load_source

    shared = {"common", "record", "ranking", "fairness", "turns", "ends", "request", "running"}
    shared.add("affinity")
    assert set(FILES) == {*SCRIPTS} - shared
    for transition, files in FILES.items():
        texts = "\n".join(SCRIPTS[file] for file in files)
        assert texts == load_source(transition)
    keys = Keys()
    others = (
        keys.workers,
        keys.served,
        keys.survey,
        keys.wake("<reader>"),
        keys.mark,
    )
    for key in (*keys.of_workers, *keys.of_scripts("<group>~x"), *others):
        name = key.removeprefix(keys.prefix).replace("<group>~x", "<id>")
        name = re.sub(r"(in|rank|fair):\d", r"\1:<priority>", name)
        assert f"`P{name}`" in DOCUMENT, key


def test_the_document_names_every_field_of_a_record(foreign):
    foreign.submit("a", metadata={"row": 1})
    *fence, _ = foreign.claim()
    foreign.run("release", ["a"], *fence)
    *fence, _ = foreign.claim()
    foreign.run("cancel", ["a"], "a")
    foreign.commit(fence, 0, [1])
    seen = set(foreign.redis.hgetall(foreign.key("r", "a")))
    foreign.commit(fence, 1, [], done=done_message("completed", "eos"), state="completed")
    seen |= set(foreign.redis.hgetall(foreign.key("r", "a")))
    assert "(record.md)" in DOCUMENT
    page = (ROOT / "docs" / "reference" / "record.md").read_text()
    assert {name.decode() for name in seen} <= set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))


def test_a_foreign_client_need_not_know_how_long_its_answer_may_be(foreign):
    created, *_ = foreign.submit("a", asked=(b"", "", "", 0, b"", 0))
    assert created == b"created"
    record = foreign.redis.hgetall(foreign.key("r", "a"))
    assert (record[b"answer"], record[b"answer_limit"]) == (b"0", b"0")


def test_the_document_tells_the_limits_of_a_message():
    """What is beyond them ends as a dead letter, whatever language wrote it."""
    from quire.wire import codec as wire
    from quire.wire import protocol

    assert f"at most {wire.MAX_MESSAGE_BYTES >> 20} MiB" in DOCUMENT
    assert f"an array has at most {wire.MAX_ARRAY_LENGTH:,} members" in DOCUMENT
    assert f"and a map {wire.MAX_MAP_LENGTH:,}." in DOCUMENT
    assert f"| `headers` | map of texts, {protocol.MAX_HEADERS_BYTES >> 10} KiB;" in DOCUMENT
    assert f"| `metadata` | map, {protocol.MAX_METADATA_BYTES >> 10} KiB," in DOCUMENT
