"""Answers of HTTP/1.1, read from the bytes of a connection as they come. Hostile ones are refused, not believed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cnmm._errors import UserError

MOST_HEAD, MOST_BODY = 2**16, 2**28
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: [^\r\n]*)?")
_WHOLE = re.compile(rb"[0-9]{1,12}")
_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")
Framing = Literal["length", "chunks", "close"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A complete answer."""

    status: int
    headers: Mapping[bytes, bytes]
    """By names in small letters."""
    body: bytes
    last: bool
    """Will the server close the connection?"""


class AnswerReader:
    """Reads one answer after the other; each must be complete before the next request is sent."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._start()

    def _start(self) -> None:
        self._status, self._headers, self._last = 0, dict[bytes, bytes](), False
        self._framing: Framing = "length"
        self._length, self._body = 0, bytearray()

    def feed(self, data: bytes) -> Answer | None:
        """The answer that these bytes complete, if they do."""
        self._data += data
        if not self._status and not self._read_head():
            return None
        if self._framing == "chunks":
            return self._read_chunks()
        if self._framing == "close":
            _check_size(len(self._data), MOST_BODY)
            return None
        if len(self._data) < self._length:
            return None
        self._body += self._data[: self._length]
        del self._data[: self._length]
        return self._complete()

    def end(self) -> Answer | None:
        """The answer that ends with the connection, if it does."""
        if not self._status or self._framing != "close":
            return None
        self._body, self._data = self._data, bytearray()
        return self._complete()

    def _complete(self) -> Answer:
        if self._data:
            raise UserError("more bytes than one answer")
        answer = Answer(status=self._status, headers=self._headers, body=bytes(self._body), last=self._last)
        self._start()
        return answer

    def _read_head(self) -> bool:
        end = self._data.find(b"\r\n\r\n")
        _check_size(len(self._data) if end < 0 else end, MOST_HEAD)
        if end < 0:
            return False
        first, *lines = bytes(self._data[:end]).split(b"\r\n")
        del self._data[: end + 4]
        found = _STATUS.fullmatch(first)
        if not found:
            raise UserError(f"an answer that is not HTTP/1.1: {first[:60]!r}")
        if found[2] in (b"100", b"102", b"103"):  # the answer proper follows
            return self._read_head()
        self._headers = {}
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or name != name.strip():
                raise UserError(f"an answer with the header {line[:60]!r}")
            self._headers[name.lower()] = value.strip()
        self._status = int(found[2])
        self._choose_framing(old=found[1] == b"0")
        return True

    def _choose_framing(self, *, old: bool) -> None:
        wish = self._headers.get(b"connection", b"").lower()
        self._last = b"close" in wish or (old and b"keep-alive" not in wish)
        length = self._headers.get(b"content-length")
        if self._headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._framing = "chunks"
        elif length is not None:
            if not _WHOLE.fullmatch(length):
                raise UserError(f"an answer of length {length[:60]!r}")
            self._length = int(length)
            _check_size(self._length, MOST_BODY)
        elif self._status not in (204, 304):
            self._framing, self._last = "close", True

    def _read_chunks(self) -> Answer | None:
        while True:
            end = self._data.find(b"\r\n")
            if end < 0:
                _check_size(len(self._data), MOST_HEAD)
                return None
            size = bytes(self._data[:end]).partition(b";")[0].strip()
            if not _HEX.fullmatch(size):
                raise UserError(f"an answer with a chunk of size {size[:60]!r}")
            num = int(size, 16)
            _check_size(len(self._body) + num, MOST_BODY)
            if len(self._data) < end + 2 + num + 2:
                return None
            if bytes(self._data[end + 2 + num : end + 4 + num]) != b"\r\n":
                raise UserError("an answer with a chunk that does not end, or with trailers")
            self._body += self._data[end + 2 : end + 2 + num]
            del self._data[: end + 4 + num]
            if not num:
                return self._complete()


def _check_size(num: int, most: int) -> None:
    if num > most:
        raise UserError(f"an answer of {num:,} bytes: at most {most:,} are read")
