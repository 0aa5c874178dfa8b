"""The page on notebooks runs in a Jupyter kernel, which is killed half-way and started again."""

import re
import threading

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from quire.queue.broker import Broker
from quire.testing.in_memory import FakeWorker
from quire.transport.connection import connect
from quire.transport.local_redis import LocalRedis
from tests.service.builders import CHECKOUT

PAGE = (CHECKOUT / "docs" / "how-to" / "notebook.md").read_text()
ADDRESS = "redis://127.0.0.1:6379/0"
NUM_ROWS = 300

#: How long the test waits for a kernel, in seconds.
PATIENCE = 120


def cells(url):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert ADDRESS in program
    shown = "print(len(table), sorted({one.value for one in table['answer']})[-1])"
    # After it there is a row for each request that the table was made of.
    complete = "print([one.name for one in __import__('jedi').Interpreter("
    complete += "'client.generate(x, temperat', [globals()]).complete()])"
    return [program.replace(ADDRESS, url), shown, complete]


def notebook(url):
    sources = [nbformat.v4.new_code_cell(source) for source in cells(url)]
    return nbformat.v4.new_notebook(cells=sources)


def outputs(cell, kind):
    return [one for one in cell.outputs if one.output_type == kind]


@pytest.fixture
def server(monkeypatch, tmp_path):
    # A kernel of this environment, with nothing of the person who runs the test.
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    with LocalRedis.start() as server:
        yield server


def test_no_row_is_computed_twice_although_the_kernel_is_killed_half_way(server):
    half_is_done, kernel_is_dead = threading.Event(), threading.Event()
    begun = []

    def answer(request):
        begun.append(request.id)
        if len(begun) > NUM_ROWS // 2:
            half_is_done.set()
            assert kernel_is_dead.wait(PATIENCE)
        return f'{{"value": {int(request.body["prompt"].removesuffix("+1=")) + 1}}}'

    with connect(server.url) as connection:
        broker = Broker(connection)
        broker.ensure_groups()
        with FakeWorker(broker, answer) as worker:
            run_and_kill(notebook(server.url), half_is_done)
            kernel_is_dead.set()
            again = notebook(server.url)
            NotebookClient(again, timeout=PATIENCE).execute()
    program, shown, completed = again.cells
    (told,) = outputs(shown, "stream")
    assert told.text == "300 300\n"
    assert len(worker.requests) == len({one.id for one in worker.requests}) == NUM_ROWS
    (bar,) = outputs(program, "display_data")
    assert f"{NUM_ROWS}/{NUM_ROWS} done" in bar.data["text/plain"]
    assert '<progress value="300" max="300">' in bar.data["text/html"]
    (names,) = outputs(completed, "stream")
    assert "temperature=" in names.text


def run_and_kill(page, is_time):
    """Runs the notebook, and kills its kernel when it is time."""
    running = NotebookClient(page, timeout=PATIENCE)

    def kill():
        assert is_time.wait(PATIENCE)
        running.km.provisioner.process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(DeadKernelError):
        running.execute()
    killer.join()
