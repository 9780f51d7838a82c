"""Curves for TensorBoard, where it is installed: an event file in the run folder, written without any of its packages.

An event file is a sequence of records: the length of a message, a checksum of the length, the message, a checksum of
the message. Messages are protocol buffers (`Event`), of which we write time, step and scalars.
"""

from __future__ import annotations

import functools
import importlib.util
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from cnmm._files import named
from cnmm.training.progress import EpochResult

FOLDER = "tensorboard"
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, bits reversed
_DOUBLE, _LENGTH, _FLOAT = 1, 2, 5  # kinds of fields of a protocol buffer, besides 0, a varint


def is_installed() -> bool:
    """Would anybody look at the curves?"""
    return importlib.util.find_spec("tensorboard") is not None


class Curves:
    """The event file of one process; the file appears with the first epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self.path: Path | None = None

    def add(self, result: EpochResult) -> None:
        """The figures of an epoch, over epochs."""
        events = [_event(result.epoch, _scalars(_figures(result)))]
        if self.path is None:
            self.folder.mkdir(exist_ok=True)
            self.path = self.folder / f"events.out.tfevents.{time.time_ns() // 1000}.cnmm"
            version = _event(0, _field(3, _LENGTH, b"brain.Event:2"))
            start = _event(result.epoch, _field(7, _LENGTH, _field(1, 0, _varint(1))))  # older files end here
            events = [version, start, *events]
        with named(self.path), self.path.open("ab") as file:
            file.write(b"".join(map(_record, events)))


def _figures(result: EpochResult) -> dict[str, float]:
    figures = {name: getattr(result, name) for name in ("loss", "lr", "images_per_s", "entropy")}
    figures |= {f"{result.metric}/exit {exit}": value for exit, value in result.quality.items()}
    return figures | {f"gradients/{name}": value for name, value in result.gradients.items()}


def _scalars(figures: Mapping[str, float]) -> bytes:
    """A message `Summary` as field 5 of an event."""
    values = [
        _field(1, _LENGTH, _field(1, _LENGTH, name.encode()) + _field(2, _FLOAT, struct.pack("<f", value)))
        for name, value in figures.items()
    ]
    return _field(5, _LENGTH, b"".join(values))


def _event(step: int, content: bytes) -> bytes:
    return _field(1, _DOUBLE, struct.pack("<d", time.time())) + _field(2, 0, _varint(step)) + content


def _field(number: int, kind: int, content: bytes) -> bytes:
    length = _varint(len(content)) if kind == _LENGTH else b""
    return _varint(number << 3 | kind) + length + content


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _record(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return length + _masked(length) + message + _masked(message)


def _masked(data: bytes) -> bytes:
    """The checksum as event files have it: rotated, and shifted by a constant."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of some bytes."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@functools.cache
def _table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (_POLYNOMIAL if value & 1 else 0) for value in table]
    return table
