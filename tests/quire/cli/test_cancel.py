"""`quire cancel`: requests by id, of a group, of a tenant."""

import json

import pytest

from tests.quire.builders import claim_next, make_request

pytestmark = [pytest.mark.real_redis, pytest.mark.timeout(60)]


def test_cancel_prints_the_state_and_names_what_it_does_not_know(quire, real_broker):
    real_broker.submit(make_request(id="a"))
    code, out, err = quire("cancel", "a", "nobody")
    assert (code, out) == (3, "a  cancelled\n")
    assert "nobody" in err


def test_a_whole_group_or_tenant_is_cancelled_and_nobody_else(quire, real_broker):
    for name, tenant in (("g~a", "x"), ("g~b", "y"), ("c", "x"), ("d", "y")):
        real_broker.submit(make_request(id=name, tenant=tenant))
    claimed = claim_next(real_broker)
    assert claimed.claim.request_id == "g~a"
    assert quire("cancel", "--group", "g")[:2] == (0, "g~a  running\ng~b  cancelled\n")
    code, out, _ = quire("cancel", "--tenant", "x", "--json")
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [
        {"request_id": "c", "state": "cancelled"},
        {"request_id": "g~a", "state": "running"},
    ]
    assert real_broker.status("g~a").cancel_requested
    assert real_broker.status("d").state == "queued"
    assert quire("cancel", "--tenant", "nobody") == (0, "", "")


def test_a_person_is_told_that_nobody_of_that_name_is_there(quire, real_broker, monkeypatch):
    real_broker.submit(make_request(id="g~a"))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert quire("cancel", "--group", "h") == (0, "", "the group h has no open request\n")
    assert quire("cancel", "--tenant", "x") == (0, "", "the tenant x has no open request\n")
    assert quire("cancel", "--group", "g") == (0, "g~a  cancelled\n", "")


def test_all_open_requests_of_a_tenant_are_found_however_many_there_are(real_broker, monkeypatch):
    monkeypatch.setattr("quire.queue.view.watching.OPEN_PER_LOOK", 10)
    requests = [make_request(id=f"r{n:03}", tenant="xy"[n % 2]) for n in range(600)]
    real_broker.submit_many(requests)
    assert real_broker.open_of("x") == [f"r{n:03}" for n in range(0, 600, 2)]


@pytest.mark.parametrize(
    "arguments", [[], ["a", "--group", "g"], ["--group", "g", "--tenant", "t"]]
)
def test_what_to_cancel_is_said_in_one_way(quire, arguments):
    code, out, err = quire("cancel", *arguments)
    assert (code, out) == (2, "")
    assert err == "error: cancel takes either ids, or --group, or --tenant\n"
