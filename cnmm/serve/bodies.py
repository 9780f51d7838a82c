"""Bodies of requests: read within limits of size, time and memory, unpacked within the same, and taken apart.

What is too large is refused before it is read, and what unpacks to too much before the memory is used.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from cnmm._errors import UserError
from cnmm.serve.asks import MOST_BODY, Refusal
from cnmm.serve.engine import Engine

BODY_S = 30.0
"""Within which a whole body must have come."""
PIECE = 2**20
"""Bytes that are unpacked at a time."""
IN_LOOP = 2**16
"""Bodies up to this size are unpacked at once, larger ones in a thread."""
MOST_PARTS, MOST_HEADERS = 16, 2**13
"""Of a form: parts, and bytes of their headers."""
ENCODINGS = ("gzip", "deflate", "identity")


@asynccontextmanager
async def body_of(request: Request, engine: Engine) -> AsyncIterator[bytes]:
    """The body of a request, unpacked; the memory that it takes is counted until the block ends."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ENCODINGS:
        raise Refusal(415, f"content encoding {encoding!r:.80}: must be one of {', '.join(ENCODINGS)}", unread=True)
    taken = [0]
    try:
        try:
            data = await _read(request, engine, taken)
        except Refusal as error:
            error.unread = True
            raise
        if encoding != "identity":
            async with engine.unpacking:
                unpack = asyncio.to_thread(unpacked, data, encoding) if len(data) > IN_LOOP else None
                data = await unpack if unpack else unpacked(data, encoding)
            _take(engine, taken, len(data))
        yield data
    finally:
        engine.give_back(taken[0])


def _take(engine: Engine, taken: list[int], size: int) -> None:
    engine.take(size)
    taken[0] += size


async def _read(request: Request, engine: Engine, taken: list[int]) -> bytes:
    """Memory is set aside for what has come, not for what was promised: promises cost nothing."""
    declared = request.headers.get("content-length", "0")
    if not (declared.isdecimal() and len(declared) < 20 and int(declared) <= MOST_BODY):
        raise _too_large()
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                if taken[0] + len(part) > MOST_BODY:
                    raise _too_large()
                _take(engine, taken, len(part))
                parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the request did not come within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise Refusal(499, "the client is gone") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large() -> Refusal:
    return Refusal(413, f"a request may have at most {MOST_BODY:,} bytes")


def unpacked(data: bytes, encoding: str) -> bytes:
    """What gzip or deflate packed, if it is not too much."""
    parts: list[bytes] = []
    size = 0
    for part in _pieces(data, encoding):
        size += len(part)
        if size > MOST_BODY:
            raise Refusal(413, f"a request may unpack to at most {MOST_BODY:,} bytes")
        parts.append(part)
    return b"".join(parts)


def _pieces(data: bytes, encoding: str) -> Iterator[bytes]:
    """Piece by piece; a gzip file may have several members. What some call deflate has no header."""
    try:
        while data:
            raw = encoding == "deflate" and not (data[0] & 15 == 8 and int.from_bytes(data[:2]) % 31 == 0)
            tool = zlib.decompressobj(-15 if raw else 47 if encoding == "gzip" else 15)
            while not tool.eof:
                part = tool.decompress(data, PIECE)
                data = tool.unconsumed_tail
                if not part and not data and not tool.eof:
                    raise UserError(f"a body packed with {encoding} ends too early")
                yield part
            data = tool.unused_data
    except zlib.error as error:
        raise UserError(f"a body cannot be unpacked with {encoding}: {error}") from None


def form_file(data: bytes, content_type: str) -> bytes:
    """The field `file` of a form, as `curl -F file=@cat.jpg` sends it."""
    _, options = parse_options_header(content_type)
    if not options.get(b"boundary"):
        raise UserError("a form without a boundary; send the image as the field `file`, or as the body")
    form = _Form()
    try:
        parser = MultipartParser(options[b"boundary"], form.callbacks())  # type: ignore[arg-type]  # all are optional
        parser.write(data)
        parser.finalize()
    except FormParserError as error:
        raise UserError(f"a form that cannot be read: {error}") from None
    if form.file is None:
        raise UserError("a form without the field `file`; try: curl -F file=@cat.jpg")
    return form.file


class _Form:
    """Keeps the field `file`, in pieces of the body."""

    def __init__(self) -> None:
        self.file: bytes | None = None
        self._parts, self._headers, self._name, self._value = 0, 0, b"", b""
        self._wanted, self._pieces = False, list[bytes]()

    def callbacks(self) -> dict[str, object]:
        names = ("part_begin", "part_data", "part_end", "header_field", "header_value", "header_end")
        return {f"on_{name}": getattr(self, name) for name in names}

    def part_begin(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise UserError(f"a form of more than {MOST_PARTS} fields")
        self._wanted, self._pieces = False, []

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += self._counted(data[start:end])

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._counted(data[start:end])

    def header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._wanted = parse_options_header(self._value)[1].get(b"name") == b"file" and self.file is None
        self._name = self._value = b""

    def part_data(self, data: bytes, start: int, end: int) -> None:
        if self._wanted:
            self._pieces.append(data[start:end])

    def part_end(self) -> None:
        if self._wanted:
            self.file = b"".join(self._pieces)

    def _counted(self, part: bytes) -> bytes:
        self._headers += len(part)
        if self._headers > MOST_HEADERS:
            raise UserError(f"a form with more than {MOST_HEADERS:,} bytes of headers")
        return part
