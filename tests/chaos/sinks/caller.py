"""Callers of the gateways, each in a thread. One uploads a batch and reads its results.

They have what every client of HTTP needs: a deadline for each call, and another gateway to go to.
"""

import contextlib
import io
import json
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from openai import APIError, APIStatusError, OpenAI

from tests.chaos.sinks.laws import Result

ENDPOINT = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
#: A gateway that stands still does not answer. After a call in vain the next one gets longer: on a
#: busy machine one that lives may take so long, too.
CALL_SECONDS, GROWTH, LONGEST_CALL_SECONDS = 1.5, 1.5, 20.0
#: Between two looks at the batch.
LOOK_SECONDS = 0.05

_Answer = TypeVar("_Answer")


class GatewayCaller:
    """A thread that calls gateways. `gateways` gives the addresses of those that may answer."""

    def __init__(self, name: str, gateways: Callable[[], Sequence[str]]) -> None:
        self.violations: list[str] = []
        self.num_retries = 0
        self._name = name
        self._gateways = gateways
        self._wants_cancellation = threading.Event()
        self._is_closed = threading.Event()
        self._turn = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Cancel what was asked for at the next look."""
        self._wants_cancellation.set()

    def close(self) -> None:
        """Ends the thread at its next call."""
        self._is_closed.set()
        self._thread.join()

    @property
    def was_cancelled(self) -> bool:
        return self._wants_cancellation.is_set()

    @property
    def is_through(self) -> bool:
        """It has read everything, or died of something."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with contextlib.suppress(_Closed):
                self._live()
        except Exception:  # noqa: BLE001 - whatever a caller dies of belongs into the audit.
            self.violations.append(f"{self._name}: {traceback.format_exc()}")

    def _live(self) -> None:
        raise NotImplementedError

    def _call(self, ask: Callable[..., _Answer]) -> _Answer:
        """What a gateway answers, the first that does."""
        seconds = CALL_SECONDS
        while not self._is_closed.is_set():
            urls = self._gateways()
            if not urls:
                self._is_closed.wait(LOOK_SECONDS)
                continue
            self._turn += 1
            url = urls[self._turn % len(urls)]
            try:
                with OpenAI(
                    base_url=url, api_key="unused", max_retries=0, timeout=seconds
                ) as openai:
                    return ask(openai)
            except APIStatusError as error:
                # 503 of a gateway that drains, or whose Redis does not answer.
                if error.status_code not in (503, 504):
                    raise
                self.num_retries += 1
            except APIError:
                # No answer, or a stream that was broken off.
                self.num_retries += 1
                seconds = min(LONGEST_CALL_SECONDS, GROWTH * seconds)
            self._is_closed.wait(LOOK_SECONDS)
        raise _Closed


class BatchCaller(GatewayCaller):
    """One batch of these lines."""

    def __init__(
        self, name: str, lines: Sequence[Mapping[str, Any]], gateways: Callable[[], Sequence[str]]
    ) -> None:
        super().__init__(name, gateways)
        self.batch_id = ""
        self.status = ""
        self.results: list[Result] = []
        self._lines = lines

    def _live(self) -> None:
        data = "".join(f"{json.dumps(line)}\n" for line in self._lines).encode()
        file = self._call(
            lambda openai: openai.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
        )
        made = [self._call(lambda openai: self._create(openai, file.id)) for _ in range(2)]
        if made[0].id != made[1].id:
            self.violations.append(f"{self._name}: a second create made a second batch")
        self.batch_id = made[0].id
        batch = self._ended()
        self.results = self._read(batch)
        # Whoever reads again, from whichever gateway, reads the same.
        if self._read(self._call(lambda openai: openai.batches.retrieve(batch.id))) != self.results:
            self.violations.append(f"{self._name}: the results have changed")
        self.status = batch.status
        counts, num_errors = batch.request_counts, sum(one.is_error for one in self.results)
        found = (counts.total, counts.completed, counts.failed)
        if found != (len(self._lines), len(self.results) - num_errors, num_errors):
            self.violations.append(f"{self._name}: counted {found}, which the files are not")

    def _create(self, openai: OpenAI, file_id: str) -> Any:
        return openai.batches.create(
            input_file_id=file_id,
            endpoint=ENDPOINT,
            completion_window="24h",
            extra_headers={"Idempotency-Key": self._name},
        )

    def _ended(self) -> Any:
        is_cancelled = False
        while True:
            if self._wants_cancellation.is_set() and not is_cancelled:
                self._call(lambda openai: openai.batches.cancel(self.batch_id))
                is_cancelled = True
            batch = self._call(lambda openai: openai.batches.retrieve(self.batch_id))
            if batch.status in ENDED:
                return batch
            self._is_closed.wait(LOOK_SECONDS)

    def _read(self, batch: Any) -> list[Result]:
        found: list[Result] = []
        for file_id, is_error in ((batch.output_file_id, False), (batch.error_file_id, True)):
            if file_id is None:
                continue
            text = self._call(lambda openai, file_id=file_id: openai.files.content(file_id).text)
            for one in map(json.loads, text.splitlines()):
                said = (
                    one["error"]["code"]
                    if is_error
                    else one["response"]["body"]["choices"][0]["text"]
                )
                found.append(Result(one["custom_id"], said, is_error))
        return found


class _Closed(Exception):
    """The schedule is over."""
