"""Serves an app with uvicorn on an open socket, without uvicorn's own signals and log."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp, listener: socket.socket, *, close_seconds: float, **options: Any
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve from the begin of the block to its end; then answers have `close_seconds` to end.

    `options` are those of `uvicorn.Config`. Yields the task, which ends earlier only if it fails;
    its error is raised at the end of the block.
    """
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        # The app itself logs what uvicorn would log below this level.
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(close_seconds),
        **options,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield task
    finally:
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: the process ends it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
