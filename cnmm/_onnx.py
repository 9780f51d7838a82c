"""ONNX files as what they are, protobuf messages: read without the package onnx, which a device need not have.

A tensor of an ONNX file may lie in another file (external data), which a runtime looks for relative to the working
folder and past every checksum. Such files are refused, wherever in the file the tensor is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from cnmm._errors import UserError

MOST_ONNX = 2**31 - 1
"""Bytes of an ONNX file: what a protobuf message may have."""
INTEGER, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5
"""Kinds of fields that ONNX uses."""
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse tensor", 23: "sparse tensor"},
    "sparse tensor": {1: "tensor", 2: "tensor"},
    "function": {7: "node", 11: "attribute"},
    "training": {1: "graph", 2: "graph"},
    "tensor": {},
}
"""Which messages hold which, by the number of the field (onnx.proto): all ways that lead to a tensor."""
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
_MOST_FIELDS = 1_000_000
_DEEPEST = 50

Data = TypeVar("Data", bytes, memoryview)


def check_self_contained(data: bytes) -> None:
    """Refuses what is no ONNX file, and a file whose tensors are in other files."""
    left = _MOST_FIELDS
    pending = [("model", memoryview(data), 0)]
    has_graph = False
    while pending:
        kind, part, depth = pending.pop()
        if depth > _DEEPEST:
            raise UserError(f"not an ONNX file: nested more than {_DEEPEST} deep")
        for number, wire, value in fields(part):
            left -= 1
            if left < 0:
                raise UserError(f"an ONNX file of more than {_MOST_FIELDS:,} fields; it is not one of ours")
            if kind == "tensor" and (number == _EXTERNAL_DATA or (number == _DATA_LOCATION and value)):
                raise UserError("its tensors are in other files (external data); all of a network must be in one file")
            inner = _INSIDE[kind].get(number)
            if inner is not None and wire == BYTES and not isinstance(value, int):
                has_graph |= inner == "graph"
                pending.append((inner, value, depth + 1))
    if not has_graph:
        raise UserError("not an ONNX file: it has no graph")


def fields(data: Data) -> Iterator[tuple[int, int, Data | int]]:
    """Number, kind and value of every field of a message; integers as numbers, anything else as its bytes."""
    place = 0
    while place < len(data):
        key, place = _read_integer(data, place, 5)
        number, kind = key >> 3, key & 7
        if not 0 < number < 2**29:  # readers that drop the upper bits would see another field
            raise UserError(f"not an ONNX file: a field of number {number}")
        if kind == INTEGER:
            value, place = _read_integer(data, place, 10)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, place = _read_integer(data, place, 5)
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            size = 8 if kind == EIGHT_BYTES else 4
        else:
            raise UserError(f"not an ONNX file: a field of kind {kind}")
        if place + size > len(data):
            raise UserError("not an ONNX file, or cut short")
        yield number, kind, data[place : place + size]
        place += size


def _read_integer(data: bytes | memoryview, place: int, longest: int) -> tuple[int, int]:
    value = 0
    for count in range(longest):
        if place + count >= len(data):
            raise UserError("not an ONNX file, or cut short")
        byte = data[place + count]
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, place + count + 1
    raise UserError("not an ONNX file: a number that is too long")
