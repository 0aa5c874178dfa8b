"""Whatever the keys of a queue hold, each page is shown or refused with a typed error."""

import os
import random

import pytest

from quire.errors import QuireError
from quire.testing.in_memory import FakeQuire
from service.console.access import User
from service.console.app import Visit
from service.console.pages import PAGES, STATES, Parameters, Watched
from service.console.reading.history import History
from service.console.reading.queue import QueueReading
from service.console.views import Views
from tests.console import stage

JUNK = (b"", b"\xff\xfe", b"-1", b"nan", b"9" * 400, b"1e999", b" ", b"0 0 0", b"\x00", b"\x81\xa1",
        stage.HOSTILE.encode(), "\N{SUPERSCRIPT TWO}".encode(), b"True")  # fmt: skip
#: How many damaged queues are looked at; more with QUIRE_TEST_CONSOLE_DAMAGE=<number>.
NUM_QUEUES = int(os.environ.get("QUIRE_TEST_CONSOLE_DAMAGE", "12"))


def looks() -> list[tuple[object, Parameters]]:
    """Every page, with every list of the requests."""
    plain = [(page, Parameters(request_id=stage.ENDED, group=stage.GROUP)) for page in PAGES]
    lists = [(page, Parameters(state=one)) for page in PAGES for one in STATES
             if page.name == "requests"]  # fmt: skip
    others = [(page, Parameters(request_id=name)) for page in PAGES
              for name in (stage.RESUMED, "later-1") if page.name == "request"]  # fmt: skip
    return [*plain, *lists, *others]


def damage(connection, key: bytes, draw: random.Random) -> None:
    """Puts junk in the place of a part of a key, or of all of it."""
    kind, junk = connection.type(key), draw.choice(JUNK)
    if draw.random() < 0.15:
        connection.delete(key)
        connection.rpush(key, junk)
    elif kind == b"hash":
        connection.hset(key, draw.choice(connection.hkeys(key)), junk)
        connection.hset(key, junk, draw.choice(JUNK))
    elif kind == b"zset":
        connection.zadd(key, {junk: draw.choice((0, -1, 1.5, 9e18, 1e300))})
    elif kind == b"stream":
        found = connection.xrevrange(key, count=1)
        fields = found[0][1] if found else {b"id": b"x"}
        fields = {**fields, draw.choice(list(fields)): junk}
        connection.xadd(key, fields, id=draw.choice(("*", b"18446744073709551610-1")))
    elif kind == b"string":
        connection.set(key, junk)


def troubles(fake: FakeQuire) -> list[str]:
    """What is no typed error, for each page that it kept from being shown."""
    queue, views = (
        QueueReading(fake.connection, "default"),
        Views(version="", queues=["default"], menu=()),
    )
    history = History(queue, sample_seconds=5.0)
    visit = Visit(User(is_operator=True), "s", "t", "")
    found = []
    for _ in range(2):
        try:
            history.read()
        except QuireError:
            pass
        except Exception as error:  # noqa: BLE001 - any error is a finding.
            found.append(f"history: {error!r}")
    for page, parameters in looks():
        try:
            context = page.context(Watched(queue, history), parameters)
        except QuireError:
            continue
        except Exception as error:  # noqa: BLE001 - any error is a finding.
            found.append(f"{page.name} {parameters.state}: {error!r}")
            continue
        common = {"visit": visit, "queue": "default", "page": page, "at": parameters, "refresh": 1}
        try:
            text = views.page(page.template, common | context)
            assert "<script>document" not in text
            views.live(page.template, common | context)
        except QuireError:
            continue
        except Exception as error:  # noqa: BLE001 - any error is a finding.
            found.append(f"{page.template}: {error!r}")
    return found


@pytest.fixture(scope="module")
def whole():
    """The keys of a queue with some of everything, as DUMP gives them."""
    with FakeQuire() as fake:
        stage.play(fake.broker, num_waiting=6, num_running=4, num_ended=4)
        assert troubles(fake) == []
        dumps = {key: fake.connection.dump(key) for key in fake.connection.keys("*")}
        # The key of the rate lives only for moments, and may end in between.
        yield {key: dump for key, dump in dumps.items() if dump is not None}


@pytest.mark.parametrize("seed", range(NUM_QUEUES))
def test_a_damaged_queue_is_shown_or_refused(whole, seed):
    draw = random.Random(seed)
    with FakeQuire() as fake:
        fake.connection.flushall()
        for key, value in whole.items():
            fake.connection.restore(key, 0, value)
        for key in draw.sample(sorted(whole), 6):
            damage(fake.connection, key, draw)
        assert troubles(fake) == []


def test_a_reader_that_trusts_its_bytes_would_be_noticed(whole, monkeypatch):
    def read(*_):
        raise ValueError("invalid literal")

    monkeypatch.setattr("service.console.pages.ended", read)
    with FakeQuire() as fake:
        assert len(troubles(fake)) == 2
