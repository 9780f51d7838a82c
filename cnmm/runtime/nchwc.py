"""Stages of a cascade that hand maps to each other as onnxruntime's convolutions hold them.

Inside a network, onnxruntime keeps maps in a blocked layout (NCHWc). Between networks they travel in the plain one, so
a cascade pays for a conversion out of every map that a later stage reads, and for one into it in each stage that reads
it. Here stages come as onnxruntime itself has optimised them for this machine, and these conversions are taken out:
nodes ReorderOutput and ReorderInput on either side of a map that travels, with or without a Concat along the channels
between them. Shapes stay the same. A file is a protobuf message, of which only nodes and names of tensors change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cnmm._errors import UserError
from cnmm._onnx import BYTES, INTEGER, fields

BLOCK = 16
"""Channels of a block, at most; on some machines it is 8."""
TO_BLOCKS, TO_PLAIN = "ReorderInput", "ReorderOutput"
# Numbers of fields in ONNX's messages (onnx.proto).
_GRAPH, _NODE, _GRAPH_INPUT, _GRAPH_OUTPUT = 7, 1, 11, 12
_INPUT, _OUTPUT, _OP_TYPE, _ATTRIBUTE = 1, 2, 4, 5
_NAME, _ATTRIBUTE_INT = 1, 3


class NotBlocked(Exception):
    """These stages cannot hand over blocks."""


def without_conversions(files: Sequence[bytes], plain: Iterable[str]) -> list[bytes]:
    """The optimised stages of a cascade, where every map between them stays blocked; `plain` names what else travels.

    Raises `NotBlocked` where a map is not read by convolutions alone, or has channels that do not fill their blocks.
    """
    try:
        return [_without_conversions(data, frozenset(plain)) for data in files]
    except (UserError, IndexError, UnicodeDecodeError) as error:
        raise NotBlocked("not an ONNX file") from error


def _without_conversions(data: bytes, plain: frozenset[str]) -> bytes:
    model = list(_fields(data))
    graph = list(_fields(_only(model, _GRAPH)))
    nodes = [_Node.read(value) for number, value in graph if number == _NODE]
    inputs, outputs = (
        {_text(_only(_fields(_bytes(value)), _NAME)) for number, value in graph if number == kind} - plain
        for kind in (_GRAPH_INPUT, _GRAPH_OUTPUT)
    )
    readers: dict[str, list[_Node]] = {}
    for node in nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)

    blocked = set(inputs)  # plain tensors that will come in blocks
    same: dict[str, str] = {}  # what a conversion made, and what it was made from
    kept: list[_Node] = []
    for node in nodes:
        made = node.outputs[0]
        if node.op_type in (TO_BLOCKS, TO_PLAIN) and node.integer("channels_last"):
            raise NotBlocked(f"{made} is turned on the way")
        if node.op_type == TO_BLOCKS and node.inputs[0] in blocked:
            same[made] = node.inputs[0]
        elif node.op_type == TO_PLAIN and _travels(made, readers, outputs):
            if node.integer("channels") % BLOCK:
                raise NotBlocked(f"{made} has {node.integer('channels')} channels")
            same[made] = node.inputs[0]
            blocked.add(made)
        elif node.op_type == "Concat" and node.integer("axis") == 1 and blocked.issuperset(node.inputs):
            blocked.add(made)
            kept.append(node)
        elif blocked.intersection(node.inputs):
            raise NotBlocked(f"{node.op_type} {made} reads a map that travels")
        else:
            kept.append(node)
    if missing := outputs - blocked:
        raise NotBlocked(f"{min(missing)} is not made by convolutions")

    # The name of a map that leaves goes to what its conversion was made from.
    origin = {made: _first(made, same) for made in same}
    leaves = {origin[made]: made for made in outputs if made in origin}
    if len(leaves) < sum(made in origin for made in outputs) or inputs & leaves.keys():
        raise NotBlocked("a map leaves under two names")
    names = {made: leaves.get(source, source) for made, source in origin.items()} | leaves
    body = [*((_NODE, node.renamed(names)) for node in kept), *(field for field in graph if field[0] != _NODE)]
    return _message((number, _message(body) if number == _GRAPH else value) for number, value in model)


def _travels(name: str, readers: dict[str, list[_Node]], outputs: Iterable[str]) -> bool:
    """Whether a plain tensor only leaves the stage, or enters convolutions again."""
    then = readers.get(name, [])
    return (name in outputs or bool(then)) and all(node.op_type in (TO_BLOCKS, "Concat") for node in then)


def _first(name: str, same: dict[str, str]) -> str:
    while name in same:
        name = same[name]
    return name


@dataclass(frozen=True)
class _Node:
    """A node of an ONNX graph; what is not named here is kept as it is."""

    fields: tuple[tuple[int, bytes | int], ...]

    @classmethod
    def read(cls, data: bytes | int) -> _Node:
        return cls(tuple(_fields(_bytes(data))))

    @property
    def inputs(self) -> list[str]:
        return [_text(value) for number, value in self.fields if number == _INPUT]

    @property
    def outputs(self) -> list[str]:
        return [_text(value) for number, value in self.fields if number == _OUTPUT]

    @property
    def op_type(self) -> str:
        return _text(_only(self.fields, _OP_TYPE))

    def integer(self, name: str) -> int:
        """An attribute; 0 if it is not there."""
        for number, value in self.fields:
            if number == _ATTRIBUTE:
                attribute = list(_fields(_bytes(value)))
                if _text(_only(attribute, _NAME)) == name:
                    found = [part for kind, part in attribute if kind == _ATTRIBUTE_INT]
                    return found[0] if found and isinstance(found[0], int) else 0
        return 0

    def renamed(self, names: dict[str, str]) -> bytes:
        """The node's message, with other names of its tensors."""
        return _message(
            (number, names.get(_text(value), _text(value)).encode() if number in (_INPUT, _OUTPUT) else value)
            for number, value in self.fields
        )


# Protobuf, as far as ONNX uses it: fields with a number, and integers or bytes.


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    for number, kind, value in fields(data):
        if kind not in (INTEGER, BYTES):
            raise NotBlocked(f"a field of kind {kind}")
        yield number, value


def _message(fields: Iterable[tuple[int, bytes | int]]) -> bytes:
    parts: list[bytes] = []
    for number, value in fields:
        if isinstance(value, int):
            parts += [_write_integer(number << 3), _write_integer(value)]
        else:
            parts += [_write_integer(number << 3 | 2), _write_integer(len(value)), value]
    return b"".join(parts)


def _write_integer(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _only(fields: Iterable[tuple[int, bytes | int]], number: int) -> bytes:
    found = [value for key, value in fields if key == number]
    if len(found) != 1:
        raise NotBlocked(f"{len(found)} fields {number}, where one is needed")
    return _bytes(found[0])


def _bytes(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise NotBlocked("an integer, where a message is needed")
    return value


def _text(value: bytes | int) -> str:
    return _bytes(value).decode()
