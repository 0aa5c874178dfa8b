"""Brokers that connect as one of the users of docs/reference/acl.md."""

import pytest
import redis

from quire.queue.broker import Broker
from quire.transport.connection import connect
from tests.quire.queue.acl.roles import ROLES
from tests.quire.servers import needs_version_7


@pytest.fixture
def as_role(real_server, real_connection, real_broker):
    """Makes a broker for the queue of the test that connects as one of the document's users."""
    needs_version_7(real_connection)
    queue = real_broker.keys.queue
    opened: list[redis.Redis] = []

    def broker(role: str, *, queue: str = queue) -> Broker:
        user = f"{role}-{real_broker.keys.queue}"
        rules = [rule.replace("{default.", f"{{{real_broker.keys.queue}.") for rule in ROLES[role]]
        real_connection.execute_command("ACL", "SETUSER", user, "reset", *rules)
        # What an earlier test has loaded must not be there already.
        real_connection.script_flush()
        address = real_server.url.partition("://")[2]
        opened.append(connect(f"redis://{user}:change-me@{address}"))
        return Broker(opened[-1], queue=queue, retry_seconds=0.1, max_attempts=2)

    yield broker
    for connection in opened:
        connection.close()
    for role in ROLES:
        real_connection.execute_command("ACL", "DELUSER", f"{role}-{queue}")
