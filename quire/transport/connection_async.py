"""Connections to Redis for an event loop; see connection.py."""

from __future__ import annotations

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from quire.transport.connection import (
    MAX_BLOCK_SECONDS,
    connection_settings,
    refuse_unknown_options,
)
from quire.transport.urls import is_cluster_url, is_sentinel_url


def connect_async(url: str, *, block_seconds: float = MAX_BLOCK_SECONDS) -> redis.asyncio.Redis:
    """Like `quire.connect`, for an event loop. Sends nothing yet.

    ValueError for an invalid url.
    """
    settings = connection_settings(url, block_seconds) | {"retry": Retry(NoBackoff(), 0)}
    if is_cluster_url(url):
        from quire.transport.cluster.connection_async import connect_to_cluster_async

        client: redis.asyncio.Redis = connect_to_cluster_async(url, settings)
    elif is_sentinel_url(url):
        from redis.asyncio.sentinel import Sentinel

        from quire.transport.sentinel import connect_through_sentinels

        client = connect_through_sentinels(url, settings, make=Sentinel)
    else:
        client = redis.asyncio.Redis.from_url(url, **settings)
    refuse_unknown_options(client)
    return client
