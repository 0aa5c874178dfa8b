"""What `quire doctor` examines of a table of models: whether a worker knows each of its names."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.cli.console import few
from quire.cli.findings import Finding, Verdict
from quire.errors import QuireError
from quire.queue.roles import Observer
from quire.queue.workers.workers import models_of

#: The name of these checks.
_CHECK = "table of models"


def examined_table(one: Observer, path: Path) -> Iterator[Finding]:
    """A finding for each model whose name no worker of its queue has; else one for all."""
    try:
        models = _models_in(path)
    except (OSError, ValueError) as error:
        yield Finding(_CHECK, Verdict.FAIL, f"cannot read {path}: {error}")
        return
    differing = 0
    for name, (queue, num_shards) in models.items():
        try:
            served = _served(one, queue, num_shards)
        except QuireError as error:
            yield Finding(_CHECK, Verdict.FAIL, f"the workers of queue {queue!r}: {error}")
            return
        if served and name not in served:
            differing += 1
            detail = f"{name!r} cannot be called: workers of queue {queue!r} serve {few(served)}"
            advice = f"set their served_model_name to {name!r}, or give the entry their name"
            yield Finding(_CHECK, Verdict.FAIL, detail, advice)
    if not differing:
        yield Finding(_CHECK, Verdict.OK, f"{path}, {len(models)} models, none under another name")


def _models_in(path: Path) -> dict[str, tuple[str, int]]:
    """Each model of the table with its queue and the number of shards. ValueError, OSError.

    Only as much as this check needs: gateways and workers check the rest of the file.
    """
    rows: Any = tomllib.loads(path.read_text(encoding="utf-8")).get("models")
    if not isinstance(rows, Mapping) or not all("queue" in row for row in rows.values()):
        raise ValueError("it has no entries [models.<name>] with a queue")
    return {name: (str(row["queue"]), int(row.get("shards", 1))) for name, row in rows.items()}


def _served(one: Observer, queue: str, num_shards: int) -> list[str]:
    shards = (Observer(one.connection, queue=queue, shard=shard) for shard in range(num_shards))
    return models_of([info for shard in shards for info in shard.workers()])
