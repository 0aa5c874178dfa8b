"""When the command asks whether a url's scheme is the right one."""

import ssl

import pytest
from redis import exceptions

from quire.cli.schemes import url_hint, with_hint
from quire.transport.connection import translated

PLAIN = "; if this server has no TLS, begin the url with `redis://`"
SECURED = "; if this server has TLS, begin the url with `rediss://`"


def wrapping(error, cause):
    error.__context__ = cause
    return error


CUT_OFF = {
    "reset": wrapping(
        exceptions.ConnectionError("Error while reading"), ConnectionResetError(104, "reset")
    ),
    "closed": exceptions.ConnectionError("Connection closed by server."),
    "an alert": exceptions.InvalidResponse(
        "Protocol Error: b'\\x15\\x03\\x03\\x00\\x02\\x02\\x46'"
    ),
}
IN_VAIN = {
    "no handshake": exceptions.TimeoutError("Timeout connecting to server"),
    "an answer": wrapping(
        exceptions.ConnectionError("Error 1 connecting to h:1."), ssl.SSLError("version")
    ),
}
OTHER = {
    "refused": wrapping(
        exceptions.ConnectionError("Error 111 connecting"), ConnectionRefusedError()
    ),
    "a password": exceptions.AuthenticationError("Authentication required."),
    "a stranger": wrapping(
        exceptions.ConnectionError(
            "Error 1. [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"
        ),
        ssl.SSLCertVerificationError("certificate verify failed"),
    ),
    "no answer": exceptions.TimeoutError("No answer."),
    "slow": exceptions.TimeoutError("Timeout reading from h:1"),
    "loading": exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
}


@pytest.mark.parametrize("name", [*CUT_OFF, *IN_VAIN, *OTHER])
def test_the_other_scheme_is_named_where_it_may_be_the_right_one(name):
    error = (CUT_OFF | IN_VAIN | OTHER)[name]
    for told in (error, translated(error)):
        assert url_hint("redis://h:1/0", told) == (SECURED if name in CUT_OFF else "")
        assert url_hint("rediss://h:1/0", told) == (PLAIN if name in IN_VAIN else "")
        assert url_hint("unix:///socket", told) == ""


def test_behind_sentinels_it_is_the_scheme_of_theirs():
    hint = url_hint("redis+sentinel://a:1/shop", CUT_OFF["closed"])
    assert hint == SECURED.replace("rediss", "rediss+sentinel")
    hint = url_hint("rediss+sentinel://a:1/shop", IN_VAIN["no handshake"])
    assert hint == PLAIN.replace("redis:", "redis+sentinel:")


@pytest.mark.parametrize("place", ["127.0.0.1:6379/0", "localhost", "me:hush@[::1]:1", "h:1"])
def test_where_this_machine_refuses_it_is_told_how_to_start_a_server(place):
    told = "" if place == "h:1" else "; start one: `quire serve` or `quire local`"
    assert url_hint(f"redis://{place}", OTHER["refused"]) == told
    assert url_hint(f"redis://{place}", OTHER["slow"]) == ""


def test_a_message_ends_once():
    message = str(OTHER["no answer"])
    assert with_hint("redis://h", OTHER["no answer"]) == message == "No answer."
    hint = url_hint("rediss://h", IN_VAIN["no handshake"])
    assert with_hint("rediss://h", IN_VAIN["no handshake"]) == f"Timeout connecting to server{hint}"
    hint = url_hint("redis://h", CUT_OFF["closed"])
    assert with_hint("redis://h", CUT_OFF["closed"]) == f"Connection closed by server{hint}"
