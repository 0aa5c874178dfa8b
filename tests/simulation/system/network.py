"""Connections of redis-py that end in a simulated server, over a network that is not to be trusted.

What is above the socket is redis-py's own: the commands and the parsing of replies. Below it, a
request takes time to go there and back; it or its reply may be lost, or it may arrive long after
its sender gave it up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import redis
from redis._parsers.base import BaseParser
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from tests.simulation.system.redis_data import ReplyError
from tests.simulation.system.redis_server import RedisServer
from tests.simulation.system.threads import current_process
from tests.simulation.system.timeline import Process, Task, Timeline

#: How long a request takes to the server, and its reply back, in seconds.
LATENCY_SECONDS = (0.0001, 0.002)

#: After how long a request without an answer is given up.
TIMEOUT_SECONDS = 0.25

#: How late a request may arrive that its sender has given up.
LATEST_ARRIVAL_SECONDS = 1.5

_parse_error = BaseParser.parse_error

Commands = list[list[bytes]]


@dataclass(frozen=True, slots=True)
class Weather:
    """How likely each mishap of one exchange is."""

    request_lost: float = 0.0
    reply_lost: float = 0.0
    arrives_late: float = 0.0
    #: How likely the way there takes up to a tenth of a second.
    is_slow: float = 0.0


#: The weather in which nothing is lost.
CALM = Weather()


@dataclass(eq=False)
class Network:
    """Everything between the processes and one server.

    `watch` is told of every transition that ran: its name, its arguments and its reply.
    """

    timeline: Timeline
    server: RedisServer
    weather: Weather = CALM
    watch: Callable[[str, list[bytes], Any], None] = lambda *_: None
    blocked: dict[Task, None] = field(default_factory=dict)

    def exchange(self, commands: Commands, *, block_seconds: float | None) -> list[Any]:
        """Sends commands and waits for their replies; errors of the server stand among them."""
        timeline, server, process = self.timeline, self.server, current_process()
        mishap = self._mishap()
        timeline.sleep(self._latency())
        if not server.is_up or process.cut_off_until > timeline.now:
            raise RedisConnectionError("no route to the server")
        if mishap in ("request_lost", "arrives_late"):
            timeline.note(mishap)
            if mishap == "arrives_late":
                timeline.spawn(self._void, "late", lambda: self._arrive_late(commands))
            timeline.sleep(TIMEOUT_SECONDS)
            raise RedisTimeoutError("no answer in time")
        incarnation = server.incarnation
        replies = [self._execute(command) for command in commands]
        if block_seconds is not None and replies[0] is None:
            replies = [self._wait(commands[0], seconds=block_seconds)]
        timeline.sleep(self._latency())
        if mishap == "reply_lost":
            timeline.note(mishap)
            raise RedisConnectionError("the connection broke before the reply")
        if server.incarnation != incarnation or process.cut_off_until > timeline.now:
            raise RedisConnectionError("the connection broke")
        return replies

    def wake_readers(self) -> None:
        """Something was added to a stream, or the server is gone: blocked reads look again."""
        for task in list(self.blocked):
            self.timeline.wake(task)

    def _wait(self, command: list[bytes], *, seconds: float) -> Any:
        give_up, incarnation = self.timeline.now + seconds, self.server.incarnation
        while (left := give_up - self.timeline.now) > 0:
            self.timeline.park(self.blocked, timeout=left)
            if self.server.incarnation != incarnation:
                raise RedisConnectionError("the connection broke")
            if (reply := self._execute(command)) is not None:
                return reply
        return None

    def _arrive_late(self, commands: Commands) -> None:
        self.timeline.sleep(self.timeline.random.uniform(0, LATEST_ARRIVAL_SECONDS))
        if self.server.is_up:
            for command in commands:
                self._execute(command)

    def _execute(self, command: list[bytes]) -> Any:
        try:
            reply = self.server.execute(command)
        except ReplyError as error:
            return _parse_error(str(error))
        if name := self.server.script_name(command):
            self.timeline.tell(name, reply)
            self.watch(name, command, reply)
        return reply

    def _mishap(self) -> str:
        weather = self.weather
        if weather is CALM:
            return ""
        drawn = self.timeline.random.random()
        for name in ("request_lost", "reply_lost", "arrives_late"):
            drawn -= getattr(weather, name)
            if drawn < 0:
                return name
        return ""

    def _latency(self) -> float:
        random = self.timeline.random
        if self.weather.is_slow and random.random() < self.weather.is_slow:
            return random.uniform(0, 0.1)
        low, high = LATENCY_SECONDS
        return low + (high - low) * random.random()

    @property
    def _void(self) -> Process:
        """Whose requests nobody waits for any more."""
        return Process("late request")


class DirectLine(Network):
    """The way of those who look on: nothing is lost, no time passes, nobody is told."""

    def exchange(self, commands: Commands, *, block_seconds: float | None) -> list[Any]:
        del block_seconds
        return [self._execute(command) for command in commands]


class SimulatedConnection(redis.Redis):
    """A client of redis-py on a Network; it belongs to whichever process uses it."""

    network: Network

    @classmethod
    def to(cls, network: Network) -> SimulatedConnection:
        """A fresh client. Making one from nothing looks up the version of redis-py in files."""
        connection = copy.copy(_template())
        connection.network = network
        return connection

    def execute_command(self, *args: Any, **options: Any) -> Any:
        command = encoded(args)
        (reply,) = self.network.exchange([command], block_seconds=_block_of(command))
        return self._parsed(args[0], reply, options)

    def pipeline(self, transaction: bool = True, shard_hint: object = None) -> Pipeline:
        del shard_hint
        return _SimulatedPipeline(self, transaction=transaction)

    def close(self) -> None:
        """Nothing is open."""

    def _parsed(self, name: str, reply: Any, options: dict[str, Any]) -> Any:
        if isinstance(reply, Exception):
            raise reply
        options.pop("keys", None)
        callback = self.response_callbacks.get(name)
        return reply if callback is None else callback(reply, **options)


@cache
def _template() -> SimulatedConnection:
    return SimulatedConnection(protocol=2, retry=Retry(NoBackoff(), 0))


class _SimulatedPipeline(Pipeline):
    """Collects commands; nothing happens between them on the server."""

    def __init__(self, owner: SimulatedConnection, *, transaction: bool) -> None:
        super().__init__(owner.connection_pool, owner.response_callbacks, transaction, None)
        self._owner = owner

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        stack, self.command_stack = self.command_stack, []
        commands = [encoded(args) for args, _ in stack]
        replies = self._owner.network.exchange(commands, block_seconds=None)
        return list(self._answers(stack, replies, raise_on_error=raise_on_error))

    def reset(self) -> None:
        self.command_stack = []

    def _answers(
        self, stack: list[Any], replies: list[Any], *, raise_on_error: bool
    ) -> Iterator[Any]:
        for (args, options), reply in zip(stack, replies, strict=True):
            try:
                yield self._owner._parsed(args[0], reply, dict(options))
            except ResponseError as error:
                if raise_on_error:
                    raise
                yield error


def encoded(arguments: tuple[Any, ...]) -> list[bytes]:
    """A command as it goes over the wire."""
    words = arguments[0].split() if " " in arguments[0] else [arguments[0]]
    return [
        part if type(part) is bytes else str(part).encode() for part in (*words, *arguments[1:])
    ]


def _block_of(command: list[bytes]) -> float | None:
    """For how long a read wants to wait, in seconds; None when it does not."""
    if command[0] not in (b"XREAD", b"XREADGROUP"):
        return None
    for place, word in enumerate(command):
        if word == b"STREAMS":
            return None
        if word == b"BLOCK":
            milliseconds = int(command.pop(place + 1))
            del command[place]
            return milliseconds / 1000
    return None
