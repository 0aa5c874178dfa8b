"""Checks a whole input file before a batch begins, in bounded memory. Knows no queue.

What makes every line useless, or would make the results ambiguous, fails the batch, as in OpenAI's
API. What is wrong with the body of a line fails that line alone, when it is run.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.batch.files import digest_of
from quire.batch.lines import CUSTOM_ID_TEXT, is_custom_id, wrong_field

#: The most errors that the record of a batch holds; a wrong file may have one in each line.
MAX_ERRORS = 100

#: Lines between two calls of `on_part`.
PART_LINES = 1000

#: The most characters of a model's name that a record keeps.
MAX_NAME_LENGTH = 256

_BLANKS = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Checked:
    """What an input file holds: its lines, the model of its first one, and what is wrong."""

    num_lines: int = 0
    model: str = ""
    errors: list[Mapping[str, Any]] = field(default_factory=list)

    def refuse(
        self, code: str, message: str, *, line: int | None = None, param: str | None = None
    ) -> None:
        """Add an error in OpenAI's form."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append({"code": code, "line": line, "message": message, "param": param})


class Validator:
    """Checks one file. `on_part` is called now and then; its errors end the check.

    `has_one_model`: the model decides where the batch goes, so all lines must name the same.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        max_lines: int,
        max_line_bytes: int,
        on_part: Callable[[], None],
        has_one_model: bool = False,
    ) -> None:
        self._has_one_model = has_one_model
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._on_part = on_part
        self._taken: set[bytes] = set()
        self._first_model: str | None = None
        self._checked = Checked()

    def check(self, source: Path) -> Checked:
        """What the file holds. OSError."""
        checked, number = self._checked, 0
        with source.open("rb") as lines:
            while data := lines.readline(self._max_line_bytes + 1):
                number += 1
                if number % PART_LINES == 0:
                    self._on_part()
                if number == 1:
                    data = data.removeprefix(_BYTE_ORDER_MARK)
                if len(data) > self._max_line_bytes:
                    message = f"is longer than {self._max_line_bytes} bytes"
                    checked.refuse("line_too_long", message, line=number)
                    # The next lines cannot be counted without reading on: the file fails anyway.
                    break
                if not data.strip(_BLANKS):
                    continue
                checked.num_lines += 1
                if checked.num_lines > self._max_lines:
                    message = f"the file has more than {self._max_lines} requests"
                    checked.refuse("too_many_lines", message)
                    break
                self._check_line(data, number)
        if not number or not (checked.num_lines or checked.errors):
            checked.refuse("empty_file", "the file has no requests")
        return checked

    def _check_line(self, data: bytes, number: int) -> None:
        checked = self._checked
        try:
            fields = json.loads(data.decode())
        except (ValueError, RecursionError):
            checked.refuse("invalid_json_line", "is not JSON in UTF-8", line=number)
            return
        if not isinstance(fields, dict):
            checked.refuse("invalid_json_line", "is not an object", line=number)
            return
        custom_id = fields.get("custom_id")
        if not is_custom_id(custom_id):
            message = f"must be {CUSTOM_ID_TEXT}"
            checked.refuse("invalid_custom_id", message, line=number, param="custom_id")
            return
        digest = digest_of(custom_id)
        if digest in self._taken:
            message = f"an earlier line has the custom_id {custom_id!r}"
            checked.refuse("duplicate_custom_id", message, line=number, param="custom_id")
        self._taken.add(digest)
        if wrong := wrong_field(fields):
            param = wrong.code.removeprefix("invalid_")
            checked.refuse(wrong.code, wrong.message, line=number, param=param)
        elif fields["url"] != self._endpoint:
            message = f"the batch is for {self._endpoint}"
            checked.refuse("mismatched_url", message, line=number, param="url")
        else:
            self._check_model(fields["body"].get("model"), number)

    def _check_model(self, value: object, number: int) -> None:
        checked = self._checked
        model = value[:MAX_NAME_LENGTH] if isinstance(value, str) else ""
        # A record cannot hold half a surrogate pair. The check of the line refuses it later.
        model = model.encode(errors="replace").decode()
        if self._first_model is None:
            self._first_model = model
        elif self._has_one_model and model != self._first_model:
            message = f"an earlier line has the model {self._first_model!r}"
            checked.refuse("mismatched_model", message, line=number, param="body.model")
        checked.model = checked.model or model
