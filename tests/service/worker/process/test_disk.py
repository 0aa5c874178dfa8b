"""A worker with `durable` begins when its server can be durable; until then it waits."""

import threading

import pytest

from quire.queue.broker import Broker
from quire.transport.connection import connect
from service.worker.process.disk import require_durability
from tests.service.builders import private_redis


class Waits(threading.Event):
    """Counts the pauses, and gives the server memory in the first one."""

    def __init__(self, connection) -> None:
        super().__init__()
        self._connection = connection
        self.num = 0

    def wait(self, timeout=None) -> bool:
        self.num += 1
        self._connection.config_set("maxmemory", 0)
        return super().wait(0)


@pytest.mark.real_redis
def test_a_server_without_memory_is_asked_again():
    with private_redis() as server, connect(server.url) as connection:
        version = connection.info("server")["redis_version"].split(".")
        # Earlier ones have no WAITAOF, and the check of their settings writes nothing.
        num_refused = int(tuple(map(int, version[:2])) >= (7, 2))
        connection.config_set("maxmemory", 1)
        ending = Waits(connection)
        require_durability(connection, [Broker(connection).keys], ending=ending)
        assert ending.num == num_refused
