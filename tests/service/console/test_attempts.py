"""How failed logins are limited: of whom, how long, and in how much memory."""

import base64

import pytest
from starlette.exceptions import HTTPException

from service.console.access import Users
from service.console.attempts import FORGIVE_SECONDS, MAX_FAILURES, MAX_REMEMBERED, Attempts, Login

PASSWORD, OTHER = "a-long-password-1", "another-password-2"
BROWSER = "0" * 32


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def users(tmp_path, clock):
    path = tmp_path / "users"
    path.write_text(f"ann {PASSWORD} operator\nbob {OTHER}\n")
    return Users(path, may_write=True, clock=clock)


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def status(users: Users, authorization: str, address: str = "192.0.2.1", session: str = "") -> int:
    try:
        users.user({"Authorization": authorization}, address=address, session=session)
    except HTTPException as error:
        return error.status_code
    return 200


def fail(users: Users, count: int, *, name: str = "ann", address: str = "192.0.2.1") -> list[int]:
    """What so many wrong passwords are answered, each another one."""
    guesses = [basic(name, f"wrong-{address}-{number}") for number in range(count)]
    return [status(users, guess, address) for guess in guesses]


def addresses(count: int) -> list[str]:
    return [f"198.51.{number >> 8}.{number & 255}" for number in range(count)]


def test_an_address_is_refused_after_its_failures_and_let_in_again_with_time(users, clock):
    assert fail(users, MAX_FAILURES + 2) == [401] * MAX_FAILURES + [429] * 2
    # Refused unread: the right password is answered as a wrong one.
    for login in (basic("ann", PASSWORD), basic("bob", OTHER), f"Bearer {OTHER}"):
        with pytest.raises(HTTPException) as caught:
            users.user({"Authorization": login}, address="192.0.2.1")
        assert caught.value.status_code == 429
        assert caught.value.headers == {"Retry-After": str(int(FORGIVE_SECONDS))}
    assert status(users, basic("bob", OTHER), "192.0.2.2") == 200
    clock.now += FORGIVE_SECONDS - 0.5
    assert status(users, basic("bob", OTHER)) == 429
    clock.now += 0.5
    assert status(users, basic("bob", OTHER)) == 200
    # One is forgiven, and not all.
    assert fail(users, 3, name="bob") == [401, 429, 429]


def test_a_user_is_limited_over_all_addresses(users):
    for address in addresses(MAX_FAILURES):
        assert fail(users, 1, address=address) == [401]
    assert status(users, basic("ann", PASSWORD), "203.0.113.9") == 429
    assert status(users, basic("bob", OTHER), "203.0.113.9") == 200


def test_a_name_that_is_no_users_is_answered_as_one(users):
    for address in addresses(MAX_FAILURES):
        assert fail(users, 1, name="nobody", address=address) == [401]
    assert fail(users, 1, name="nobody", address="203.0.113.9") == [429]


def test_a_browser_that_has_logged_in_is_not_locked_out_by_others(users):
    assert status(users, basic("ann", PASSWORD), session=BROWSER) == 200
    assert fail(users, MAX_FAILURES + 1)[-1] == 429
    assert status(users, basic("ann", PASSWORD), session=BROWSER) == 200
    # Only as the user that it was, and until it fails itself.
    assert status(users, basic("bob", OTHER), session=BROWSER) == 429
    assert status(users, basic("ann", OTHER), session=BROWSER) == 401
    assert status(users, basic("ann", PASSWORD), session=BROWSER) == 429


def test_a_program_that_keeps_cookies_gets_no_more_guesses(users):
    cookies = [f"{number:032x}" for number in range(3)]
    assert [status(users, f"Bearer {OTHER}", session=cookie) for cookie in cookies] == [200] * 3
    fail(users, MAX_FAILURES)
    guesses = [status(users, f"Bearer guess-{cookie}", session=cookie) for cookie in cookies]
    assert guesses == [429] * 3


def test_the_same_wrong_password_again_does_not_count_and_for_another_user_it_does(users):
    """As a page that is still open after a change of its password."""
    assert [status(users, basic("ann", "old")) for _ in range(3 * MAX_FAILURES)][-1] == 401
    names = [f"user-{number}" for number in range(MAX_FAILURES)]
    assert [status(users, basic(name, "old")) for name in names][-1] == 429


def test_a_request_without_a_login_is_no_attempt(users):
    without = ("", "Basic", "Basic !", "Bearer", "Digest x")
    assert {status(users, one) for one in without * MAX_FAILURES} == {401}
    assert status(users, basic("ann", PASSWORD)) == 200
    # It is asked to log in, also when no login would be looked at.
    fail(users, MAX_FAILURES)
    assert {status(users, one) for one in without} == {401}


@pytest.mark.parametrize(("first", "second", "is_shared"), [
    ("2001:db8::1", "2001:db8::ffff:1", True), ("2001:db8::1", "2001:db8:0:1::1", False),
    ("::ffff:192.0.2.1", "192.0.2.1", True), ("no address", "no address", True),
])  # fmt: skip
def test_a_network_of_ipv6_is_one_address(users, first, second, is_shared):
    fail(users, MAX_FAILURES, address=first)
    assert (status(users, basic("bob", OTHER), second) == 429) is is_shared


def test_memory_is_bounded_and_invented_names_displace_no_user(clock):
    attempts = Attempts(clock=clock)
    for number in range(MAX_FAILURES):
        attempts.fail(Login(f"a{number}", "ann", b"%d" % number), is_user=True)
    for number in range(MAX_REMEMBERED + 10):
        login = Login(f"address {number}", f"name {number}" * 100, b"guess", f"{number:032x}")
        attempts.fail(login, is_user=False)
        attempts.succeed(login)
    tables = (attempts._addresses, attempts._strangers, attempts._browsers)
    assert [len(table._values) for table in tables] == [MAX_REMEMBERED] * 3
    assert len(attempts._users._values) == 1
    assert attempts.wait_seconds(Login("elsewhere", "ann", b"new")) > 0


def test_a_browser_is_told_when_to_try_again_and_the_log_names_the_user(start, tmp_path, caplog):
    path = tmp_path / "users"
    path.write_text(f"ann {PASSWORD}\n")
    console = start(users_file=path)
    for number in range(MAX_FAILURES):
        reply = console.page(Authorization=basic("ann", f"wrong-{number}"))
        assert reply.status == 401 and "Retry-After" not in reply.headers
    reply = console.page(Authorization=basic("ann", PASSWORD))
    assert reply.status == 429 and 0 < int(reply.headers["Retry-After"]) <= FORGIVE_SECONDS
    assert "Too many logins have failed" in reply.text
    assert console.get("/livez").status == 200
    (told,) = [str(one.msg) for one in caplog.records if "logins are refused" in str(one.msg)]
    assert "user=ann" in told and "wrong" not in told


@pytest.mark.parametrize(("proxies", "status"), [("127.0.0.1", 200), ("10.0.0.0/8", 429)])
def test_only_a_trusted_proxy_says_whose_address_it_is(start, tmp_path, proxies, status):
    path = tmp_path / "users"
    path.write_text(f"ann {PASSWORD}\nbob {OTHER}\n")
    console = start(users_file=path, trusted_proxies=proxies)
    for number in range(MAX_FAILURES):
        wrong = basic("ann", f"wrong-{number}")
        assert console.page(Authorization=wrong, X_Forwarded_For="192.0.2.1").status == 401
    headers = {"Authorization": basic("bob", OTHER), "X_Forwarded_For": "192.0.2.2"}
    assert console.page(**headers).status == status


def test_a_browser_with_its_cookie_stays_logged_in(start, tmp_path):
    path = tmp_path / "users"
    path.write_text(f"ann {PASSWORD}\n")
    console = start(users_file=path)
    login = basic("ann", PASSWORD)
    cookie = console.page(Authorization=login).headers["Set-Cookie"].partition(";")[0]
    assert console.page(Authorization=login, Cookie=cookie).status == 200
    for number in range(MAX_FAILURES):
        console.page(Authorization=basic("ann", f"wrong-{number}"))
    assert console.page(Authorization=login, Cookie=cookie).status == 200
    assert console.page(Authorization=login).status == 429
