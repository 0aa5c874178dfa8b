"""What a caller sends costs the disk, and not the memory of a gateway."""

import http.client
from pathlib import Path

import pytest

from tests.service.batcher.builders import peak_bytes
from tests.service.builders import PATIENCE_SECONDS, Queue
from tests.service.gateway.builders import GatewayProcess

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        not Path("/proc/self/status").exists(), reason="reads what Linux tells of memory"
    ),
]

NUM_BYTES = 96 << 20
PART = bytes(1 << 20)
HEAD = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
TAIL = b"\r\n--b--\r\n"


def body():
    yield HEAD + FILE
    for _ in range(NUM_BYTES // len(PART)):
        yield PART
    yield TAIL


def test_a_large_file_passes_through_a_gateway_in_parts(queue: Queue, tmp_path):
    with GatewayProcess(queue, "--files-folder", str(tmp_path)) as gateway:
        before = peak_bytes(gateway.process.pid)
        kind = "multipart/form-data; boundary=b"
        made = gateway.ask("POST", "/v1/files", body(), Content_Type=kind).body
        assert made["bytes"] == NUM_BYTES
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=PATIENCE_SECONDS)
        connection.request("GET", f"/v1/files/{made['id']}/content")
        response, num_read = connection.getresponse(), 0
        while part := response.read(len(PART)):
            num_read += len(part)
        connection.close()
        assert num_read == NUM_BYTES
        assert peak_bytes(gateway.process.pid) - before < NUM_BYTES // 4
