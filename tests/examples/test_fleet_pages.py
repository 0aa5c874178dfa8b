"""The pages for those who run a fleet: their commands are typed on a real queue."""

from collections.abc import Iterator

import pytest
import redis

from quire import Client, State
from quire.cli.exit_codes import EXIT_OK
from quire.transport.local_redis import URL_VARIABLE, LocalRedis
from tests.examples.pages import REDIS, blocks, command, page, process, typed
from tests.service.builders import PATIENCE_SECONDS, Queue, private_redis
from tests.service.processes import WorkerProcess

#: Long enough to be changed in its middle.
SAMPLING = {"max_tokens": 60, "ignore_eos": True}
SCALE_OUT, ROTATE, COST = page("scale-out"), page("rotate-a-password"), page("cost")


def test_the_plan_costs_what_the_page_says(capsys):
    (said,) = blocks(COST, "text")
    assert typed(command(COST, "quire plan")) == EXIT_OK
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == said.splitlines()


@pytest.fixture
def server(monkeypatch) -> Iterator[LocalRedis]:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    with LocalRedis.start() as server:
        monkeypatch.setenv(URL_VARIABLE, server.url)
        yield server


@pytest.mark.processes
def test_the_same_command_adds_a_worker_and_a_drain_takes_one_away(server, capsys):
    line = command(SCALE_OUT, "quire worker")
    assert REDIS in line
    line = line.replace(REDIS, server.url)
    with Client(server.url) as client, process(line, "--worker-name", "first") as first:
        first.wait_for_event("worker ready")
        before = client.submit("12+34=", sampling={"temperature": 0})
        assert before.result(timeout=PATIENCE_SECONDS).text == "46"
        with process(line, "--worker-name", "second") as second:
            second.wait_for_event("worker ready")
            assert typed(command(SCALE_OUT, "quire status")) == EXIT_OK
            shown = capsys.readouterr().out
            assert "first" in shown and "second" in shown
            drain = command(SCALE_OUT, "quire drain").replace("NAME", "first")
            assert typed(drain) == EXIT_OK
            assert first.wait() == 0
            after = client.submit("5+6=", sampling={"temperature": 0})
            assert after.result(timeout=PATIENCE_SECONDS).text == "11"
            assert [client.status(one.request_id).worker for one in (before, after)] == [
                "first", "second",
            ]  # fmt: skip


@pytest.mark.processes
def test_a_password_changes_under_a_worker_that_generates_and_nothing_is_lost():
    add, remove = [block.strip() for block in blocks(ROTATE, "redis-cli")]
    with private_redis() as server:
        with redis.Redis.from_url(server.url) as first:
            first.config_set("requirepass", "old-password")
        old, new = (with_password(server.url, f"{age}-password") for age in ("old", "new"))
        queue = Queue.at(old)
        with redis.Redis.from_url(old) as prompt, Client(old, queue=queue.name) as client:
            handles = [client.submit([1, 2, n], sampling=SAMPLING) for n in range(8)]
            with WorkerProcess(queue, held_at=20) as worker:
                worker.wait_until_ready()
                queue.wait_for_tokens(handles[0].request_id, 5)
                prompt.execute_command(*add.split())
                queue.wait_for_tokens(handles[0].request_id, 20)
                worker.kill()
            queue.take_all_away()
            with WorkerProcess(Queue.at(new, name=queue.name)) as worker:
                worker.wait_until_ready()
                prompt.execute_command(*remove.split())
                # What is connected stays so, and what is not needs the new password.
                results = [handle.result(timeout=PATIENCE_SECONDS) for handle in handles]
        with pytest.raises(redis.AuthenticationError), redis.Redis.from_url(old) as late:
            late.ping()
    assert [result.state for result in results] == [State.COMPLETED] * 8
    assert [len(result.token_ids) for result in results] == [SAMPLING["max_tokens"]] * 8
    assert results[0].resumes == 1


def with_password(url: str, password: str) -> str:
    return url.replace("redis://", f"redis://:{password}@")
