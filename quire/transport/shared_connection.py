"""One connection on which several callers send before the first of them reads.

For the shards of one node: a call of each is sent at once, and the node works on the second while
the first reply is read. For one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import redis
from redis.exceptions import RedisError, ResponseError


class Sent:
    """The calls of one caller whose replies were not read yet."""

    def __init__(self) -> None:
        self.num_calls = 0


class SharedConnection:
    """A context manager. At its end the connection returns to its pool.

    An error of the connection is not raised: from then on all callers read fewer replies than they
    have sent calls, and send them again in their own way.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool: Any = client.connection_pool
        self._connection: Any = None
        self._unread: deque[Sent] = deque()
        self._is_broken = False

    def __enter__(self) -> SharedConnection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._connection is None:
            return
        if self._unread or self._is_broken:
            # Another caller must not read the remaining replies.
            self._connection.disconnect()
        self._pool.release(self._connection)

    def send(self, commands: Iterator[tuple[Any, ...]]) -> Sent:
        """Sends these commands. Takes all of them from the iterator, also after an error."""
        sent = Sent()
        self._unread.append(sent)
        for command in commands:
            sent.num_calls += 1
            if self._is_broken:
                continue
            try:
                self._connection = self._connection or self._pool.get_connection()
                self._connection.send_command(*command)
            except RedisError:
                self._is_broken = True
        return sent

    def read(self, sent: Sent) -> list[Any]:
        """The replies to these calls, including errors; none if they were read before.

        Fewer than calls if the connection has failed.
        """
        if sent not in self._unread:
            return []
        first = self._unread.popleft()
        assert first is sent, "replies are read in the order of the calls"
        replies: list[Any] = []
        while len(replies) < sent.num_calls and not self._is_broken:
            try:
                replies.append(self._connection.read_response())
            except ResponseError as error:
                replies.append(error)
            except RedisError:
                self._is_broken = True
        return replies
