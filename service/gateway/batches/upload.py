"""Receives the form of an upload: its file goes to the disk part by part, never into the memory.

Knows the multipart format by the library python-multipart, and no record of a file.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from quire.errors import InvalidRequest
from service.gateway.refusals import Refusal, Refused, unsupported_encoding
from service.gateway.requests import refuse_encoding
from service.shared.http.tasks import HungUp

#: The name of the part with the file.
FILE = "file"

#: Most other parts of a form, and the most bytes of each.
MAX_FIELDS, MAX_FIELD_BYTES = 16, 4096

#: The longest name of a file, in characters.
MAX_FILENAME = 255

#: Bytes of a form beside its file: the headers and the other parts.
FORM_BYTES = 64 << 10

#: The headers of a part that say how its bytes are encoded, and the values that change nothing.
_PLAIN = {
    b"content-encoding": (b"", b"identity"),
    b"content-transfer-encoding": (b"", b"7bit", b"8bit", b"binary"),
}


@dataclass(slots=True)
class Form:
    """What a form holds: its texts by name, and the name and size of its file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    num_bytes: int = 0
    has_file: bool = False


class Receiver:
    """Writes the file of a form to `path`. A context manager that closes the file.

    `feed` takes the body in parts. InvalidRequest for a wrong form, Refused for a file that is too
    large, OSError from the disk.
    """

    def __init__(self, content_type: str, path: Path, *, max_file_bytes: int) -> None:
        kind, options = parse_options_header(content_type.encode())
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidRequest("body", "must be multipart/form-data")
        self.form = Form()
        self._max_file_bytes = max_file_bytes
        self._file = path.open("xb")
        self._header_name = self._header_value = b""
        self._disposition = b""
        self._name = ""
        self._value = bytearray()
        self._has_ended = False
        #: The end of a form, and the last bytes that came, which may hold the first part of it.
        self._end, self._last = b"\r\n--%b--" % boundary, b""
        try:
            self._parser = MultipartParser(boundary, self._callbacks())
        except FormParserError as error:
            self._file.close()
            raise InvalidRequest("body", f"is not a form: {error}") from None

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def feed(self, data: bytes) -> None:
        """Take the next part of the body."""
        rest = data
        if not self._has_ended:
            try:
                self._parser.write(data)
            except FormParserError as error:
                raise InvalidRequest("body", f"is not a form: {error}") from None
            recent = self._last + data
            self._last = recent[-len(self._end) :]
            rest = recent.partition(self._end)[2] if self._has_ended else b""
        # The parser ignores it. It is a part of the file if that holds the boundary.
        if rest.strip():
            raise InvalidRequest("body", "has more than line ends after the last boundary")

    def end(self) -> Form:
        """The form, once its body is complete. InvalidRequest for one that is cut off."""
        if not self._has_ended:
            # The parser takes the end of the body for the end of the file.
            raise InvalidRequest("body", "ends without the last boundary of its form")
        if not self.form.has_file:
            raise InvalidRequest(f"body.{FILE}", "is missing")
        self._file.flush()
        return self.form

    def _callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin_part,
            "on_part_data": self._take,
            "on_part_end": self._end_part,
            "on_header_field": self._take_header_name,
            "on_header_value": self._take_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_end": self._end_form,
        }

    def _end_form(self) -> None:
        self._has_ended = True

    def _begin_part(self) -> None:
        self._disposition, self._name = b"", ""
        self._value = bytearray()

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        name, value = self._header_name.lower(), self._header_value
        if name == b"content-disposition":
            self._disposition = value
        elif name in _PLAIN and value.strip().lower() not in _PLAIN[name]:
            raise unsupported_encoding(_text(self._header_name))
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = _text(options.get(b"name", b""))
        if self._name != FILE:
            if len(self.form.fields) == MAX_FIELDS:
                raise InvalidRequest("body", f"has more than {MAX_FIELDS} fields")
            return
        if self.form.has_file:
            raise InvalidRequest(f"body.{FILE}", "is given twice")
        self.form.has_file = True
        self.form.filename = _text(options.get(b"filename", b""))[:MAX_FILENAME] or "upload"

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name != FILE:
            self._value += data[start:end]
            if len(self._value) > MAX_FIELD_BYTES:
                message = f"takes more than {MAX_FIELD_BYTES} bytes"
                raise InvalidRequest(f"body.{self._name}", message)
            return
        self.form.num_bytes += end - start
        if self.form.num_bytes > self._max_file_bytes:
            raise too_large(self._max_file_bytes)
        self._file.write(memoryview(data)[start:end])

    def _end_part(self) -> None:
        if self._name == FILE:
            return
        if self._name in self.form.fields:
            raise InvalidRequest(f"body.{self._name}", "is given twice")
        self.form.fields[self._name] = _text(bytes(self._value))


async def receive_form(
    request: Request, path: Path, *, max_file_bytes: int, patience_seconds: float
) -> Form:
    """The form of an upload; its file is at `path`.

    A caller may take as long as it needs for the whole body, but must send something within
    `patience_seconds`. InvalidRequest, Refused, HungUp, OSError.
    """
    refuse_encoding(request)
    announced = request.headers.get("Content-Length", "")
    if announced.isdigit() and int(announced[:20]) > max_file_bytes + FORM_BYTES:
        raise too_large(max_file_bytes)
    content_type = request.headers.get("Content-Type", "")
    num_bytes = 0
    with Receiver(content_type, path, max_file_bytes=max_file_bytes) as receiver:
        async for part in _parts(request, patience_seconds):
            num_bytes += len(part)
            if num_bytes > max_file_bytes + FORM_BYTES:
                raise too_large(max_file_bytes)
            # The disk may be slow; other answers go on meanwhile.
            await asyncio.to_thread(receiver.feed, part)
        return receiver.end()


async def _parts(request: Request, patience_seconds: float) -> AsyncIterator[bytes]:
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(patience_seconds):
                part = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            message = f"nothing of the body came for {patience_seconds:g} seconds"
            raise Refused(Refusal(408, "body_timeout", message)) from None
        except ClientDisconnect:
            raise HungUp from None
        yield part


def too_large(max_bytes: int) -> Refused:
    """The refusal of a file above the limit."""
    # On an open connection, the next call could only be read after the rest of this body.
    headers = {"Connection": "close"}
    message = f"the file takes more than {max_bytes} bytes"
    return Refused(Refusal(413, "file_too_large", message, param=FILE, headers=headers))


def _text(data: bytes) -> str:
    # Not every client writes file names as UTF-8; the name means nothing to us.
    return data.decode(errors="replace")
