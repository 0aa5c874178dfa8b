"""A queue and a worker inside the process, for the tests of services that use Quire."""

from quire.testing.in_memory import Answer, FakeQuire, FakeWorker

__all__ = ["Answer", "FakeQuire", "FakeWorker"]
