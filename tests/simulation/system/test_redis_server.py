"""The simulated Redis answers as a real one does: to any commands, and to the shipped scripts."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from quire.errors import QuireError
from quire.queue.broker import Broker
from tests.quire.builders import claim_next, make_item, make_request, queue_keys, remove_queue
from tests.simulation.system import threads
from tests.simulation.system.network import DirectLine, SimulatedConnection, encoded
from tests.simulation.system.redis_data import ReplyError
from tests.simulation.system.redis_server import RedisServer
from tests.simulation.system.timeline import Timeline

pytestmark = pytest.mark.real_redis

_counter = itertools.count()

NAMES = st.sampled_from(["a", "b", "c"])
IDS = st.sampled_from(["1-1", "1-2", "2-1", "5", "7-3", "9-0", "0-0"])
BOUNDS = st.sampled_from(["-", "+", "1-1", "2", "5-0", "(1-2"])
LEX_BOUNDS = st.sampled_from(["[a", "(a", "[b", "(b ", "(c", "[d", "a"])
COUNT = st.integers(1, 3)
SCORES = st.sampled_from(["1", "2.5", "-3", "1e3", "10000000000000"])


def command(*parts: Any) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(
        *(part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts)
    )


STREAM = st.sampled_from(["x1", "x2"])
GROUP = st.sampled_from(["g1", "g2"])
#: Any type of key, so that commands meet a value of the wrong kind.
ANY = st.sampled_from(["s", "h", "z", "m", "x1", "none"])

COMMANDS = st.one_of(
    command("SET", st.sampled_from(["s", "s2", "h"]), NAMES),
    command("SET", "s", NAMES, st.sampled_from(["NX", "XX"])),
    command("SET", "s", NAMES, "PX", "100000"),
    command("SET", "s", NAMES, "KEEPTTL"),
    command("GET", ANY),
    command("STRLEN", "s"),
    command("DEL", ANY),
    command("EXISTS", ANY, "s"),
    command("TYPE", ANY),
    command("HSET", ANY, NAMES, NAMES),
    command("HGET", ANY, NAMES),
    command("HMGET", "h", "a", "b"),
    command("HGETALL", ANY),
    command("HSCAN", ANY, "0", "COUNT", "100"),
    command("HKEYS", "h"),
    command("HLEN", "h"),
    command("HEXISTS", "h", NAMES),
    command("HDEL", "h", NAMES, "a"),
    command("HINCRBY", "h", st.sampled_from(["n", "a"]), st.integers(-2, 2)),
    command("SADD", ANY, NAMES, NAMES),
    command("SREM", "m", NAMES),
    command("SCARD", ANY),
    command("ZADD", ANY, SCORES, NAMES),
    command("ZADD", "z", st.sampled_from(["NX", "XX", "GT", "LT", "CH"]), SCORES, NAMES),
    command("ZREM", "z", NAMES),
    command("ZSCORE", "z", NAMES),
    command("ZCARD", "z"),
    command("ZCOUNT", "z", "-inf", SCORES),
    command("ZRANGE", "z", st.integers(-2, 2), st.integers(-2, 2), "WITHSCORES"),
    command("ZRANGEBYSCORE", "z", "(1", "+inf", "WITHSCORES", "LIMIT", "0", COUNT),
    command("ZADD", "equals", "0", NAMES),
    command("ZRANGEBYLEX", "equals", LEX_BOUNDS, LEX_BOUNDS, "LIMIT", st.integers(0, 1), COUNT),
    command("ZRANGEBYLEX", st.sampled_from(["equals", "s"]), LEX_BOUNDS, LEX_BOUNDS),
    command("ZREMRANGEBYSCORE", "z", "-inf", SCORES),
    command("XADD", st.one_of(STREAM, ANY), IDS, "f", NAMES),
    command("XADD", STREAM, "MAXLEN", COUNT, IDS, "f", NAMES),
    command("XADD", STREAM, "MINID", IDS, IDS, "f", NAMES),
    command("XLEN", ANY),
    command("XDEL", STREAM, IDS, IDS),
    command("XTRIM", STREAM, "MAXLEN", COUNT),
    command("XRANGE", STREAM, BOUNDS, BOUNDS),
    command("XRANGE", STREAM, "-", "+", "COUNT", COUNT),
    command("XREVRANGE", STREAM, "+", "-", "COUNT", COUNT),
    command("XREVRANGE", STREAM, BOUNDS, BOUNDS, "COUNT", "1"),
    command("XREAD", "COUNT", COUNT, "STREAMS", "x1", "x2", IDS, IDS),
    command("XGROUP", "CREATE", STREAM, GROUP, st.sampled_from(["0", "$", "1-1"])),
    command("XGROUP", "CREATE", STREAM, GROUP, "0", "MKSTREAM"),
    command("XREADGROUP", "GROUP", GROUP, NAMES, "COUNT", COUNT, "STREAMS", "x1", "x2", ">", ">"),
    command("XREADGROUP", "GROUP", GROUP, NAMES, "STREAMS", STREAM, ">"),
    command("XREADGROUP", "GROUP", GROUP, NAMES, "COUNT", COUNT, "NOACK", "STREAMS", STREAM, ">"),
)  # fmt: skip

#: Replies without an order of their own.
UNORDERED = {"SMEMBERS", "HKEYS", "HGETALL"}


def simulated() -> RedisServer:
    return RedisServer(lambda: 1_700_000_000_000_000, on_growth=lambda: None)


def answer(ask: Any, words: tuple[Any, ...]) -> Any:
    """The reply, or the code of the error."""
    try:
        reply = ask(words)
    except (ReplyError, ResponseError):
        # Its text is nobody's contract.
        return "error"
    if words[0] == "HSCAN":
        return reply[0], sorted(reply[1])
    return sorted(reply) if words[0] in UNORDERED else reply


@pytest.fixture
def raw(real_connection: redis.Redis):
    """Asks the real server for a bare reply."""
    pool = real_connection.connection_pool
    connection = pool.connection_class(**pool.connection_kwargs | {"protocol": 2})
    connection.connect()

    def ask(words: tuple[Any, ...]) -> Any:
        connection.send_command(*words)
        return connection.read_response()

    yield ask
    connection.disconnect()


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(commands=st.lists(COMMANDS, min_size=1, max_size=40))
def test_any_commands_get_the_replies_of_a_real_server(raw, commands):
    server, names = simulated(), ("s", "s2", "h", "z", "equals", "m", "x1", "x2", "none")
    run = f"twin{next(_counter)}:"

    def apart(words: tuple[Any, ...]) -> tuple[Any, ...]:
        # On the shared server every run has keys of its own.
        return (words[0], *(run + w if w in names else w for w in map(str, words[1:])))

    try:
        for words in commands:
            asked = apart(words)
            expected = answer(raw, asked)
            assert answer(lambda w: server.execute(encoded(w)), asked) == expected, words
    finally:
        raw(("DEL", *(run + name for name in names)))


def life_of_requests(broker: Broker) -> list[str]:
    """Every transition once, with its answers in words that do not depend on clock and chance."""
    told: list[str] = []

    def tell(value: object) -> None:
        told.append(repr(value))

    broker.ensure_groups()
    for name in ("g~a", "b", "c", "d"):
        tell(broker.submit(make_request(id=name, idempotency_key=f"key {name}")))
    tell(broker.submit(make_request(id="b")))
    tell(broker.submit(make_request(id="other", idempotency_key="key b")))
    tell(broker.cancel("d"))
    claims = [claim_next(broker) for _ in range(3)]
    tell([(c.claim.request_id, c.claim.epoch, c.attempts, c.published) for c in claims])
    first, second, third = (c.claim for c in claims)
    tell(broker.commit([make_item(first, 0, 3), make_item(second, 0, 1)]))
    tell(broker.commit([make_item(first, 0, 3), make_item(second, 5, 6)]))
    tell(broker.heartbeat([first, second, third]))
    tell(broker.release([second]))
    tell(broker.commit([make_item(second, 1, 2)]))
    tell(broker.dead_letter(third, "tired"))
    tell([(letter.request_id, letter.reason) for letter in broker.dead_letters()])
    tell([broker.requeue(letter, keep_tokens=True) for letter in broker.dead_letters()])
    tell(broker.commit([make_item(first, 3, 5, final=True)]))
    tell(broker.reap())
    tell(broker.promote())
    tell({name: broker.status(name).state for name in ("g~a", "b", "c", "d")})
    tell(
        [
            (c.start, c.token_ids, c.prefix_hash)
            for c in broker.read_output({"g~a": 0})["g~a"].chunks
        ]
    )
    tell(broker.queue_depth())
    tell(sorted(key.partition(b"}:")[2] for key in queue_keys(broker.connection, broker)))
    return told


def test_the_shipped_scripts_answer_as_on_a_real_server(real_connection):
    threads.activate(Timeline(0))
    try:
        line = DirectLine(Timeline(0), simulated())
        mine = life_of_requests(Broker(SimulatedConnection.to(line), queue="twin"))
    finally:
        threads.activate(None)
    real = Broker(real_connection, queue=f"twin{next(_counter)}")
    try:
        assert mine == life_of_requests(real)
    finally:
        remove_queue(real_connection, real)


def test_a_script_that_fails_is_an_error_reply():
    server = simulated()
    with pytest.raises(ReplyError):
        server.execute([b"EVAL", b"return redis.call('HGET', KEYS[1])", b"1", b"x"])
    with contextlib.suppress(QuireError), pytest.raises(ReplyError):
        server.execute([b"EVALSHA", b"0" * 40, b"0"])
