"""Files and batches in an object store: moto's server, which speaks S3 over HTTP."""

import contextlib
import io
import urllib.request
from collections.abc import Iterator

import obstore
import pytest
from moto.server import ThreadedMotoServer

from service.batcher.batcher import Batcher
from service.batcher.destinations import Destinations
from service.batcher.job import Draining, Job
from service.shared.batches import ledger
from service.shared.batches.ledger import Ledger
from service.shared.batches.object_store import ObjectStorage
from service.shared.batches.opening import open_storage
from service.shared.batches.storage import MissingContent
from service.shared.settings.sources import ConfigurationError
from tests.service.batcher.builders import (
    batcher_of,
    create,
    ended,
    lines_of_batch,
    results_of,
    settings_of,
    value_of,
    wanted,
)
from tests.service.batcher.conftest import Front, front_of
from tests.service.gateway.builders import openai_client

pytestmark = pytest.mark.timeout(120)

BUCKET = "quire"
URL = f"s3://{BUCKET}/some/prefix"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def url(endpoint, monkeypatch) -> str:
    values = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    call = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
    urllib.request.urlopen(call).close()
    return URL


@pytest.fixture
def stored(queue, tmp_path, url) -> Iterator[Front]:
    yield from front_of(queue, tmp_path / "gateway", files_url=url)


def test_a_large_file_is_stored_and_read_in_parts(stored, url, tmp_path):
    # More than one part of an upload, and no multiple of it.
    data = b"0123456789abcdef" * (1 << 20) + b"end"
    made = stored.openai.files.create(file=("f", io.BytesIO(data)), purpose="batch")
    assert made.bytes == len(data)
    assert stored.openai.files.content(made.id).read() == data
    assert not list((tmp_path / "gateway").glob("files/*")), "the folder is for temporary files"
    assert not list((tmp_path / "gateway").glob("staging/*"))
    stored.openai.files.delete(made.id)
    storage = ObjectStorage(tmp_path / "gateway", url)
    assert storage.list_objects(f"files/{made.id}") == []
    with pytest.raises(MissingContent):
        next(storage.parts(made.id))


def test_a_batch_goes_on_at_another_machine(stored, worker, url, tmp_path):
    """Two batchers with folders of their own have nothing in common but the store and Redis."""
    made = create(stored.openai, *lines_of_batch(40))
    records = Ledger(stored.queue.connection, stored.queue.name)
    storage = ObjectStorage(tmp_path / "first", url)
    hold = records.run(ledger.claim_batch(records.keys, made.id, lease_ms=60_000))
    settings = settings_of(stored.queue, tmp_path / "first", max_inflight=4, save_seconds=0.01)
    job = Job(
        hold,
        records.run(ledger.read_batch(records.keys, made.id)),
        records=records,
        storage=storage,
        destinations=Destinations(stored.queue.connection, settings),
        settings=settings,
    )
    save = job._save_progress

    def saved(files, work, now) -> None:
        save(files, work, now)
        if now.completed >= 12:
            job.drain()

    job._save_progress = saved  # type: ignore[method-assign]
    with pytest.raises(Draining):
        job.run()
    parts = storage.list_objects(f"work/{made.id}/")
    assert len(parts) > 2, "each save is an object"
    with batcher_of(stored.queue, tmp_path / "second", files_url=url) as batcher:
        batch = ended(stored.openai, made.id)
        written = value_of(batcher, "lines_total", outcome="completed")
    assert results_of(stored.openai, batch) == wanted(40)
    assert written <= 28, "it went on where the first one was"
    assert storage.list_objects(f"work/{made.id}/") == []


def test_a_part_that_a_frozen_claim_stored_late_is_not_joined(url, tmp_path):
    storage = ObjectStorage(tmp_path / "first", url)
    work = storage.work("batch_x", epoch=1, work_epoch=0)
    work.output.write_text("one\n")
    work.save()
    with work.output.open("a") as file:
        file.write("two\n")
    work.save()
    # As if the part in between had never come.
    obstore.delete(storage._store, "work/batch_x/1/output.jsonl/000000000000000")
    later = ObjectStorage(tmp_path / "second", url).work("batch_x", epoch=2, work_epoch=1)
    assert later.output.read_text() == ""
    storage.remove_work("batch_x")


def test_a_store_without_a_folder_or_with_another_scheme_is_refused(queue, tmp_path, url):
    with pytest.raises(ConfigurationError, match="needs a files_folder"):
        open_storage(settings_of(queue, None, files_url=url))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="files_url"):
        settings_of(queue, tmp_path, files_url="https://elsewhere")


def test_a_batcher_without_a_folder_says_what_sets_it(queue):
    with pytest.raises(ConfigurationError, match="set --files-folder or QUIRE_BATCHER_FILES_FOLDE"):
        Batcher(settings_of(queue, None))  # type: ignore[arg-type]


def test_an_outage_of_the_store_is_an_outage_of_files(queue, tmp_path, url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with contextlib.closing(front_of(queue, tmp_path / "x", files_url=url)) as fronts:
        gateway = next(fronts).gateway
        with openai_client(gateway.url) as openai:
            with pytest.raises(Exception, match="storage of files") as refused:
                openai.files.create(file=("f", io.BytesIO(b"x")), purpose="batch")
            assert refused.value.status_code == 503
