"""A worker process whose fake model makes embeddings: as `fake_worker`, with its slow steps."""

import functools

import service.__main__
import service.worker.process.worker
from engine.fake_runner import FAKE_WIDTH
from service.worker.model.vectors import ServedVectors
from service.worker.process.worker import Worker
from tests.service.builders import fake_model
from tests.service.fake_worker import compute


def main() -> int:
    """What `python -m service` does, with a model that needs no torch."""
    vectors = ServedVectors(kind="embeddings", width=FAKE_WIDTH)
    load = functools.partial(fake_model, before_run=compute, vectors=vectors)
    service.worker.process.worker.Worker = functools.partial(Worker, load=load)  # type: ignore[misc, assignment]
    return service.__main__.main()


if __name__ == "__main__":
    service.__main__.leave(main())
