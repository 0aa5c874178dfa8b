"""What comes of each format is read by another program, and whole texts are let come or not."""

import datetime
import ipaddress
import json
import re
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from service.worker.constraints.schemas.formats import keywords_of
from tests.service.walks import constraint, text_of, walk
from tests.service.worker.constraints.judged import Judge, refusal_of

COMES: dict[str, list[str]] = {
    "date-time": [
        "2024-02-29T23:59:59Z",
        "2000-02-29t00:00:00.123456789z",
        "0004-02-29T00:00:00-23:59",
        "1970-12-31T01:02:03+05:30",
    ],
    "date": ["2024-02-29", "2400-02-29", "2023-02-28", "0001-01-01", "9999-12-31", "2023-04-30"],
    "time": ["00:00:00Z", "23:59:59.5+01:00"],
    "duration": ["P1Y", "P1Y2M3DT4H5M6S", "PT5M", "P2W", "P3D", "P1MT1S"],
    "email": ["a@b", "first.last+tag@a.example", f"{'a' * 64}@b.c", "a@[127.0.0.1]"],
    "hostname": ["a", "a-b.example", "1.2.3", f"{'a' * 63}.b", ".".join(["a" * 49] * 5), "a--b"],
    "ipv4": ["0.0.0.0", "255.249.199.9"],
    "ipv6": ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "1:2:3:4:5:6:1.2.3.4"],
    "uuid": ["00000000-0000-0000-0000-00000000000F"],
    "uri": ["http://a@b.example:1/c/?d#e", "urn:a:b", "a:", "http://[::1.2.3.4]/", "a:/%20"],
    "uri-reference": ["", "a/b", "//b", "/a:b", "?a", "#a", "./a:b", "a:b"],
    "iri": ["http://\u00fc.example/\u65e5"],
    "iri-reference": ["\u00fc#\u65e5"],
    "uri-template": ["http://a/{+b,c*}{?d:3}", "", "{a.b}"],
    "json-pointer": ["", "/", "/a~0b~1/ /0"],
    "relative-json-pointer": ["0", "1#", "12/a"],
    "idn-hostname": ["a.b"],
    "idn-email": ["a@b.c"],
}
NEVER: dict[str, list[str]] = {
    "date-time": [
        "2023-02-29T00:00:00Z",
        "1900-02-29T00:00:00Z",
        "0000-01-01T00:00:00Z",
        "1998-12-31T22:59:60Z",
        "1998-12-31T23:59:60Z",
        "2024-01-01T24:00:00Z",
        "2024-01-01T00:00:00",
        "2024-01-01 00:00:00Z",
        "2024-01-01T00:00:00+24:00",
    ],
    "date": ["2023-02-29", "2100-02-29", "0000-02-29", "0000-01-01", "2023-04-31", "2023-00-01"],
    "time": ["12:34:60Z", "23:59:60Z", "24:00:00Z", "00:60:00Z", "00:00:00", "00:00:00.Z"],
    "duration": ["P", "PT", "P1Y2D", "P1W2D", "P1S", "1Y", "P1YT"],
    "email": ["a", "@b", "a@", "a..b@c", ".a@b", f"{'a' * 65}@b", "a@b_c", f"a@{'b.' * 127}c"],
    "hostname": ["", "-a", "a-", "a..b", "a" * 64, f"{'a.' * 126}ab", "xn--a", "a_b", "a."],
    "ipv4": ["256.0.0.0", "1.2.3", "01.2.3.4", "1.2.3.4.5"],
    "ipv6": [":::", "1::2::3", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7::8", "::1.2.3", "1.2.3.4::", "%a"],
    "uuid": ["0" * 32],
    "uri": ["a", "//b", "http://a b", "a:%2", "1a:b", "http://[1]/", "\\\\a", "http://\u00fc"],
    "uri-reference": ["\\a", "1a:b", ":a", "a b", "%2"],
    "iri": ["\u00fc", "a:<>"],
    "iri-reference": ["\\"],
    "uri-template": ["{", "{a", "{}", "{a,}", "{a:0}", "<a>"],
    "json-pointer": ["a", "/~", "/~2", "#"],
    "relative-json-pointer": ["", "01", "/a", "-1", "0a"],
    "idn-hostname": ["-a"],
    "idn-email": ["a"],
}


@pytest.mark.parametrize("name", COMES)
def test_a_text_of_a_format_may_come_and_no_other(name: str):
    judge = Judge({"type": "string", "format": name})
    right = [one for one in COMES[name] if not judge.lets(json.dumps(one, ensure_ascii=False))]
    wrong = [one for one in NEVER[name] if judge.lets(json.dumps(one, ensure_ascii=False))]
    assert (right, wrong) == ([], [])


def as_date_time(text: str) -> None:
    assert datetime.datetime.fromisoformat(text.upper()).tzinfo is not None


def as_address(text: str) -> None:
    name, _, host = text.rpartition("@")
    assert 0 < len(name) <= 64 and not re.search(r"\.\.|^\.|\.$|[\s\"@]", name)
    if host.startswith("["):
        ipaddress.IPv4Address(host[1:-1])
    else:
        as_host(host)


def as_host(text: str) -> None:
    assert len(text) <= 253
    for label in text.split("."):
        assert 0 < len(label) <= 63 and re.fullmatch("[A-Za-z0-9-]+", label)
        assert label.strip("-") == label


READERS: dict[str, Callable[[str], object]] = {
    "date-time": as_date_time,
    "date": datetime.date.fromisoformat,
    "time": lambda text: as_date_time(f"1970-01-01T{text}"),
    "email": as_address,
    "hostname": as_host,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": lambda text: urlsplit(text).scheme or 1 / 0,
    "uri-reference": urlsplit,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("seed", range(6))
def test_whatever_tokens_come_another_program_reads_a_format(name: str, seed: int):
    rule = constraint("json_schema", {"type": "string", "format": name})
    output, has_ended = walk(rule, seed=seed, longest=300)
    if has_ended:
        READERS[name](json.loads(text_of(output)))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "format": "int64"},
        {"type": "integer", "format": "date-time"},
        {"type": ["number", "null"], "format": "regex"},
        {"type": ["integer", "object"], "format": "a thing"},
    ],
)
def test_a_format_restricts_texts_only(schema: dict[str, Any]):
    assert Judge(schema).lets("7")


def test_a_format_that_json_schema_does_not_define_restricts_nothing():
    zod = {"type": "string", "format": "ulid", "pattern": "^[0-7][0-9A-HJKMNP-TV-Z]{25}$"}
    judge = Judge(zod)
    assert judge.lets('"01ARZ3NDEKTSV4RRFFQ69G5FAV"') and not judge.lets('"01arz"')
    assert Judge({"type": "string", "format": "a thing"}).lets('"b"')


def test_a_format_holds_beside_other_keywords_of_a_text():
    schema = {"type": ["string", "null"], "format": "hostname", "pattern": "^a", "maxLength": 3}
    judge = Judge(schema)
    assert judge.lets("null") and judge.lets('"a.b"')
    assert not judge.lets('"b.a"') and not judge.lets('"a.bc"') and not judge.lets('"a."')


def test_an_address_beside_a_common_pattern_is_served():
    pattern = r"^\w+([\.-]?\w+)*@\w+([\.-]?\w+)*(\.\w{2,})+$"
    judge = Judge({"type": "string", "format": "email", "pattern": pattern, "minLength": 6})
    assert judge.lets('"a.b@c.de"')
    for text in ("a@b.c", "a_@-b.cd", "a@b_.cde"):
        assert not judge.lets(json.dumps(text))


def test_the_format_that_no_pattern_describes_is_refused():
    assert keywords_of("regex") is None
    message = "`format` at #/items/format cannot be enforced"
    assert refusal_of({"items": {"format": "regex"}}) == message
