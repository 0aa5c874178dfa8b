"""A console as a process: how it starts, ends, and reads its users again."""

import signal
import urllib.error
import urllib.request

import pytest

from tests.service.builders import PATIENCE_SECONDS, http_get
from tests.service.processes import LoggedProcess

PASSWORD, OTHER = "a-long-password-1", "another-password-2"


def status_of(port: int, password: str) -> int:
    """The status of a page for a program with this password."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/queues/default", headers={"Authorization": f"Bearer {password}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.processes
def test_a_console_serves_reads_its_users_again_and_ends_at_a_signal(redis_url, tmp_path):
    users = tmp_path / "users"
    users.write_text(f"ann {PASSWORD}\n")
    flags = ("--redis-url", redis_url, "--users-file", str(users), "--role", "operator")
    with LoggedProcess("service.console", *flags) as process:
        port = process.wait_for_event("console ready")["http_port"]
        assert (status_of(port, PASSWORD), status_of(port, OTHER)) == (200, 401)
        assert http_get(port, "/readyz")[0] == 200
        users.write_text(f"bob {OTHER} operator\n")
        process.signal(signal.SIGHUP)
        process.wait_for_event("users are read again")
        assert (status_of(port, PASSWORD), status_of(port, OTHER)) == (401, 200)
        with LoggedProcess("service.console", *flags, "--http-port", str(port)) as second:
            assert second.wait() == 2
        assert "another console may have it" in "".join(second.raw_log)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    log = "".join(process.raw_log)
    assert PASSWORD not in log and OTHER not in log
