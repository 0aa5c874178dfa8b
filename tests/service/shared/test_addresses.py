"""Where webhooks may go, and that they go to the address that was checked."""

import asyncio
import ipaddress
import socket

import httpcore2
import pytest

from service.shared.http.addresses import AddressRefused, CheckedBackend, host_of, is_allowed

REFUSED = (
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1"),
    # Addresses that contain one of IPv4.
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
    *("::127.0.0.1", "::ffff:0:127.0.0.1"),
    # Python counts it as global, and it was once what fc00::/7 is.
    "fec0::1",
)


@pytest.mark.parametrize("text", REFUSED)
def test_an_address_that_is_not_public_is_refused(text):
    assert not is_allowed(ipaddress.ip_address(text), [])


@pytest.mark.parametrize("text", ["93.184.215.14", "2606:2800:220:1::1", "::ffff:93.184.215.14"])
def test_a_public_address_is_allowed(text):
    assert is_allowed(ipaddress.ip_address(text), [])


def test_operators_may_allow_networks_in_addition():
    allowed = [ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fc00::/7")]
    for text in ("10.1.2.3", "::ffff:10.1.2.3", "fc00::1", "93.184.215.14"):
        assert is_allowed(ipaddress.ip_address(text), allowed)
    assert not is_allowed(ipaddress.ip_address("10.2.0.1"), allowed)


def resolving_to(monkeypatch, *answers):
    """Each resolution of a name gives the next of the answers; returns how many were asked for."""
    asked = []

    async def getaddrinfo(_loop, host, port, **_):
        found = answers[min(len(asked), len(answers) - 1)]
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (text, port)) for text in found]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return asked


def connecting(monkeypatch, host, *, allowed=()):
    """Connects to a host; returns the addresses that a connection was made to."""
    connected = []

    async def connect_tcp(_self, host, port, *_):
        connected.append(host)

    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect_tcp)
    networks = [ipaddress.ip_network(text) for text in allowed]
    asyncio.run(CheckedBackend(networks).connect_tcp(host, 443))
    return connected


def test_a_name_is_resolved_once_and_its_checked_address_connected_to(monkeypatch):
    """A name server that changes its mind at the second question is never asked again."""
    asked = resolving_to(monkeypatch, ["93.184.215.14"], ["127.0.0.1"])
    assert connecting(monkeypatch, "hooks.example") == ["93.184.215.14"]
    assert asked == ["hooks.example"]


def test_one_private_address_among_others_refuses_the_name(monkeypatch):
    resolving_to(monkeypatch, ["93.184.215.14", "10.0.0.1"])
    with pytest.raises(AddressRefused, match=r"10\.0\.0\.1"):
        connecting(monkeypatch, "hooks.example")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433"])
def test_other_spellings_of_this_machine_are_refused(monkeypatch, host):
    with pytest.raises((AddressRefused, httpcore2.ConnectError)):
        connecting(monkeypatch, host)


def test_an_allowed_network_is_connected_to(monkeypatch):
    assert connecting(monkeypatch, "127.0.0.1", allowed=["127.0.0.0/8"]) == ["127.0.0.1"]


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://a.example",
            "ftp://a.example",
            "https://",
            "a.example",
            "https://a.example:99999",
            "https://hooks..example/x",
            f"https://{'a' * 64}.example/x",
        ),
        *("https://u:p@a.example", "https://a.example/#x", "https://a.example/ x", "https://ä.de"),
    ],
)
def test_a_url_that_no_webhook_may_go_to_is_refused(url):
    with pytest.raises(ValueError, match=r"url|Port|port"):
        host_of(url, allows_http=False)


def test_a_url_without_tls_is_for_those_who_allow_it():
    assert host_of("http://a.example:8080/x?y=1", allows_http=True) == "a.example"
    assert host_of("https://a.example/x", allows_http=False) == "a.example"
