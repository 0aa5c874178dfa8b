"""The broker of an event loop, which has the producer's side only."""

from quire.queue.producer_async import AsyncProducer as AsyncBroker

__all__ = ["AsyncBroker"]
