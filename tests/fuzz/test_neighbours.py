"""Whatever is wrong with one thing in Redis, its neighbours are served.

A real worker on the simulated Redis of tests/simulation/system gets bad messages among good ones,
and readers get bad entries in one log of two.
"""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cli import main
from quire.client.client import Client
from quire.errors import ProtocolError
from quire.queue.broker import Broker
from quire.wire.output import State
from quire.wire.protocol import GenerationRequest
from tests.fuzz.targets import SEEDS
from tests.quire.builders import make_item, make_request, submit_and_claim, text_of
from tests.service.fake_model import expected_tokens
from tests.simulation.system import threads
from tests.simulation.system.callers import broker_of
from tests.simulation.system.fleet import Fleet
from tests.simulation.system.network import DirectLine, Network, SimulatedConnection
from tests.simulation.system.plan import Plan
from tests.simulation.system.redis_server import RedisServer
from tests.simulation.system.seams import installed
from tests.simulation.system.timeline import Process, Timeline

#: How long a worker may take for a handful of requests, in virtual seconds.
PATIENCE_SECONDS = 60.0

#: What a message that nobody can serve may be told.
REFUSALS = {"undecodable", "unsupported_version", "invalid_request"}

PLAN = Plan(
    seed=0,
    num_workers=1,
    max_attempts=3,
    step_seconds=0.01,
    wanted=(),
    faults=(),
    weather={},
    settings={"block_size": 4, "num_blocks": 32, "claim_batch": 4, "max_num_seqs": 4},
)

GOOD = {f"good{n}": [1 + n, 2, 3] for n in range(3)}


def wrong(**changes: object) -> bytes:
    """A message with some fields of another value."""
    fields = msgpack.unpackb(SEEDS["request"][0]) | changes
    data: bytes = msgpack.packb(fields)
    return data


#: Messages that are certainly wrong, each in its way; any bytes are drawn beside them.
BAD = [
    b"",
    b"\xc1",
    b"\x93\x01\x02",
    wrong(v=2),
    wrong(v="1"),
    wrong(kind="poetry"),
    wrong(body={}),
    wrong(body={"prompt": [], "max_tokens": 1}),
    wrong(body={"prompt": [-1]}),
    wrong(body={"prompt": [1 << 40]}),
    wrong(body={"prompt": [300]}, kind="tokens"),
    wrong(body={"prompt": "x", "temperature": -1}),
    wrong(body={"prompt": "x", "top_p": float("nan")}),
    wrong(body={"prompt": "x", "stop": [""]}),
    wrong(body={"prompt": "x", "surprise": 1}),
    wrong(body={"messages": [{"role": "user", "content": "x"}]}, kind="chat.completions"),
    wrong(body={"prompt": "x", "model": "another"}),
    wrong(deadline_ms=-1),
    wrong(deadline_ms=1 << 60),
    wrong(priority=99),
    wrong(tenant="a:b"),
    wrong(headers={"a": 1}),
    SEEDS["request"][0][:-3],
    SEEDS["request"][0] + b"\x00",
]


class Stage:
    """One worker, one queue, and what is in it."""

    def __init__(self, bodies: list[bytes], entries: list[dict[bytes, bytes]]) -> None:
        self.timeline = Timeline(0)
        threads.activate(self.timeline)
        self.server = RedisServer(
            lambda: int(self.timeline.unix_seconds() * 1e6), on_growth=self._wake_readers
        )
        self.network = Network(self.timeline, self.server)
        self.fleet = Fleet(self.timeline, self.network, PLAN)
        self.bodies, self.entries = bodies, entries
        self.states: dict[str, State] = {}
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.codes: dict[str, str] = {}
        self._is_over = False

    def play(self) -> None:
        try:
            self.timeline.spawn(Process("director"), "main", self._direct)
            self.timeline.run(lambda: self._is_over or bool(self.timeline.failures))
            assert self.timeline.failures == []
            assert self.fleet.slots[0].exit_codes == [], "the worker has ended"
        finally:
            self.timeline.close()
            threads.activate(None)

    def _direct(self) -> None:
        broker = broker_of(self.network, PLAN)
        connection, names = broker.connection, list(GOOD)
        broker.ensure_groups()
        for number, body in enumerate(self.bodies):
            self._submit_good(broker)
            names.append(f"bad{number}")
            broker.submit(make_request(id=names[-1]))
            connection.set(broker.keys.body(names[-1]), body, keepttl=True)
        for fields in self.entries:
            connection.xadd(broker.keys.ingress(1), fields)
        self._submit_good(broker)
        self.fleet.start(self.fleet.slots[0])
        while self.timeline.now < PATIENCE_SECONDS:
            self.timeline.sleep(0.5)
            self.states = {name: broker.status(name).state for name in names}
            if all(s.is_terminal for s in self.states.values()) and not any(
                broker.queue_depth().values()
            ):
                break
        for name in names:
            read = broker.read_output({name: 0})[name]
            self.tokens[name] = tuple(id_ for chunk in read.chunks for id_ in chunk.token_ids)
            assert read.completion is not None, f"{name} has no end"
            self.codes[name] = read.completion.error.code if read.completion.error else ""
        self._is_over = True

    def _submit_good(self, broker: Broker) -> None:
        for name, prompt in GOOD.items():
            body = {"prompt": prompt, "max_tokens": 5, "seed": 9}
            broker.submit(GenerationRequest(id=name, kind="tokens", body=body))

    def _wake_readers(self) -> None:
        self.network.wake_readers()


def check_served(stage: Stage) -> None:
    """All good requests are served in full, and every other one was given an end."""
    stage.play()
    for name, prompt in GOOD.items():
        assert stage.states[name] is State.COMPLETED
        assert stage.tokens[name] == expected_tokens(prompt, max_tokens=5, seed=9)
    assert all(state.is_terminal for state in stage.states.values())


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_a_message_that_cannot_be_right_is_refused_by_name_and_its_neighbours_are_served(body):
    with installed():
        stage = Stage([body], [])
        check_served(stage)
    assert stage.states["bad0"] is State.FAILED
    assert stage.codes["bad0"] in REFUSALS


@settings(max_examples=40, deadline=None)
@given(
    bodies=st.lists(st.one_of(st.sampled_from(BAD), st.binary(max_size=60)), max_size=4),
    entries=st.lists(
        st.dictionaries(
            st.sampled_from([b"id", b"hello", b""]), st.binary(max_size=12), min_size=1, max_size=2
        ),
        max_size=3,
    ),
)
def test_any_messages_and_entries_among_good_ones_leave_those_served(bodies, entries):
    with installed():
        check_served(Stage(bodies, entries))


# Readers.

ENTRIES = st.one_of(
    st.dictionaries(st.sampled_from([b"ids", b"from", b"text", b"done", b"x"]), st.binary(),
                    min_size=1, max_size=4),
    st.sampled_from([{b"hello": b"world"}, {b"done": b"\xc1"}, {b"done": b""}]),
)  # fmt: skip


@pytest.fixture
def broker():
    """A broker on a server without time or network."""
    timeline = Timeline(0)
    server = RedisServer(lambda: 1_700_000_000_000_000, on_growth=lambda: None)
    broker = Broker(SimulatedConnection.to(DirectLine(timeline, server)))
    broker.ensure_groups()
    return broker


def write_two_logs(broker: Broker, fields: dict[bytes, bytes]) -> None:
    """One good log, and one with a foreign entry in it."""
    claims = {name: submit_and_claim(broker, id=name).claim for name in ("good", "bad")}
    broker.commit([make_item(claims["good"], 0, 3, final=True), make_item(claims["bad"], 0, 2)])
    broker.connection.xadd(broker.keys.output("bad"), fields, id="7-1")


@settings(max_examples=60, deadline=None)
@given(fields=ENTRIES)
def test_a_bad_entry_in_one_log_ends_its_reader_by_a_typed_error_and_no_other(fields):
    timeline = Timeline(0)
    server = RedisServer(lambda: 1_700_000_000_000_000, on_growth=lambda: None)
    broker = Broker(SimulatedConnection.to(DirectLine(timeline, server)))
    broker.ensure_groups()
    write_two_logs(broker, fields)
    client = Client(broker)
    with pytest.raises(ProtocolError):
        client.result("bad")
    assert client.result("good").text == "".join(map(text_of, range(3)))


def test_the_command_says_what_is_wrong_with_a_log_and_prints_the_next(broker, monkeypatch, capsys):
    write_two_logs(broker, {b"hello": b"world"})
    monkeypatch.setattr("quire.cli.requests.client_of", lambda _arguments: Client(broker))
    assert main(["tail", "bad"]) != 0
    told = capsys.readouterr()
    assert "neither tokens nor an end" in told.err
    assert "Traceback" not in told.err
    assert main(["tail", "good"]) == 0
    assert capsys.readouterr().out == "abc\n"


def test_a_letter_that_is_not_ours_hides_no_other(broker):
    claim = submit_and_claim(broker, id="good").claim
    broker.dead_letter(claim, "tired")
    broker.connection.xadd(broker.keys.dead, {"hello": "world"})
    assert [letter.request_id for letter in broker.dead_letters()] == ["good"]


def test_a_worker_line_that_is_not_ours_hides_no_other(broker):
    broker.beat_worker("good", "ready", {"claims": 1.0})
    broker.connection.hset(broker.keys.workers, "bad", b"x ready \x80")
    assert "good" in [worker.name for worker in broker.workers()]
