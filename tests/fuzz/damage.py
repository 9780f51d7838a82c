"""How things are damaged: JSON, text, bytes, files, networks. Everything is drawn from a seeded generator."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import external_data_helper, numpy_helper

NUMBERS = [0, -1, 1, 2, 3, 7, -5, 255, 10**5, 10**9, 2**31, 2**53 + 1, 2**63, 10**400, -(10**400), 0.5, -0.5, 1.5, -0.0]
NUMBERS += [1e308, 1e-320, math.nan, math.inf, -math.inf]
TEXTS = ["", " ", "x", "nan", "1", "\x1b[31mred", "a\nb", "\r", "\0", "\u202e", "\ud800", "\x9b2J", "$x^", "<script>"]
TEXTS += ["../x.onnx", "/etc/passwd", "C:\\x.onnx", "e1c0.onnx\0", "\xe9" * 300, "x" * 5000, "{}", "%s", "{0}", "e9c99"]
LISTS = [[], [1], [[1, 2]], [None] * 3, [math.nan], [[]] * 50, [0.5] * 7, ["x"] * 3]
NASTY: list[Any] = [None, True, False, *NUMBERS, *TEXTS, *LISTS, {}, {"a": 1}, {"": []}]
EXTERNAL = "external_weights"
"""The file that networks with external data refer to."""


def damaged(rng: random.Random, document: Any) -> Any:
    """A JSON document with one or two values changed, removed, added, renamed or repeated."""
    made = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2))):
        parent, key = rng.choice(list(_places(made)))
        kind = rng.choice(("value", "value", "value", "value", "remove", "rename", "wrap", "repeat", "deep", "add"))
        if kind == "value":
            parent[key] = copy.deepcopy(rng.choice(NASTY))
        elif kind == "remove":
            del parent[key]
        elif kind == "rename" and isinstance(parent, dict):
            parent[rng.choice(("x", "", "\x1b[0m", key + "s", "format_version"))] = parent.pop(key)
        elif kind == "wrap":
            parent[key] = rng.choice(([parent[key]], {"value": parent[key]}, str(parent[key])))
        elif kind == "repeat" and isinstance(parent, list):
            parent += [copy.deepcopy(parent[key])] * rng.choice((1, 5, 100))
        elif kind == "deep":
            parent[key] = _nested(rng, rng.choice((5, 25, 400)))
        elif isinstance(parent, dict):
            parent[rng.choice(("later", "\x1b]0;x\x07", "a" * 3000))] = rng.choice(NASTY)
    return made


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(items):
        yield document, key
        if isinstance(value, dict | list) and value:
            yield from _places(value)


def _nested(rng: random.Random, depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def text_of(rng: random.Random, document: Any) -> bytes:
    """A document as a file holds it: damaged as a value, or as text."""
    if rng.random() < 0.8:
        return json.dumps(damaged(rng, document)).encode("utf-8", "surrogatepass")
    data = json.dumps(document).encode()
    return rng.choice(
        (
            data[: rng.randrange(len(data))],
            flipped(rng, data, 3),
            rng.choice(
                (b"", b"\0", b"[]", b"3", b"null", b'"text"', b"{}", b"[" * 10**5, b'{"a":' * 10**4, b"\xff\xfe")
            ),
            b"\xef\xbb\xbf" + data,
            data + rng.choice((b"{}", b"\0", b"x", b"]")),
            data.replace(b"1", rng.choice((b"1" * 5000, b"NaN", b"-Infinity", b"1e999", b"0x1", b"01")), 1),
            data.replace(b'"', rng.choice((b"'", b"", b"\\")), rng.choice((1, 2, -1))),
            data.decode().encode(rng.choice(("utf-16", "utf-32", "utf-7"))),
            data.replace(b", ", b",\x0b ", 1),
        )
    )


def lines_of(rng: random.Random, lines: list[Any]) -> bytes:
    """JSON lines, one or two of them damaged."""
    texts = [json.dumps(line).encode() for line in lines]
    for _ in range(rng.choice((1, 1, 2))):
        value = json.dumps(rng.choice(NASTY)).encode("utf-8", "surrogatepass")
        texts[rng.randrange(len(texts))] = rng.choice((text_of(rng, lines[0]), value, b"", b"\xff", b"\0" * 100))
    return b"\n".join(texts) + rng.choice((b"\n", b"\n", b"", b'\n{"step": 3'))


def flipped(rng: random.Random, data: bytes, num: int) -> bytes:
    """Some bytes changed, removed or added."""
    made = bytearray(data)
    for _ in range(rng.randrange(1, num + 1)):
        place = rng.randrange(len(made) or 1)
        if rng.random() < 0.7 and made:
            made[place] = rng.choice((0, 255, 127, 128, made[place] ^ 1 << rng.randrange(8)))
        elif rng.random() < 0.5:
            del made[place : place + rng.choice((1, 4, 50))]
        else:
            made[place:place] = rng.randbytes(rng.choice((1, 4, 50)))
    return bytes(made)


def put(rng: random.Random, path: Path, data: bytes, outside: Path | None = None) -> None:
    """The file of a case, or now and then something else in its place; what an earlier case left there goes."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if rng.random() < 0.03:
        _odd_file(rng, path, outside)
    else:
        path.write_bytes(data)


def _odd_file(rng: random.Random, path: Path, outside: Path | None) -> None:
    """No regular file, or a huge one; `outside`: a file that is there, beyond the folder."""
    links = {"zero": "/dev/zero", "random": "/dev/urandom", "loop": str(path), "dangling": "none"}
    links |= {"outside": str(outside), "outside too": str(outside)} if outside else {}
    kind = rng.choice(("pipe", "folder", "huge", *links))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(2**42)  # of holes
    else:
        path.symlink_to(links[kind])


def damaged_network(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed at random, or a message that says something else."""
    if rng.random() < 0.5:
        return flipped(rng, data, 4)
    model = onnx.load_from_string(data)
    node, tensor = rng.choice(model.graph.node), rng.choice(model.graph.initializer)
    kind = rng.randrange(9)
    if kind == 0:
        external_data_helper.set_external_data(tensor, EXTERNAL)
        tensor.ClearField("raw_data")
    elif kind == 1:
        outside = numpy_helper.from_array(np.ones(1, np.float32), "outside")
        external_data_helper.set_external_data(outside, f"../{EXTERNAL}")
        model.graph.node.append(onnx.helper.make_node("Constant", [], ["unused"], value=outside))
    elif kind == 2:
        node.op_type = rng.choice(("Relu", "Identity", "Loop", "If", "Softmax", "x", "", "\u202e"))
    elif kind == 3:
        del node.input[:]
    elif kind == 4:
        tensor.dims[:] = rng.choice(([], [0], [-1], [10**12], [2**62, 2**62], [1, 1, 1]))
    elif kind == 5:
        values = np.full(len(tensor.raw_data) // 4, rng.choice((math.nan, math.inf, 1e38)), np.float32)
        tensor.raw_data = values.tobytes()
    elif kind == 6:
        model.graph.output[0].name = rng.choice(("", "x", "\x1b[31m"))
    elif kind == 7:
        model.opset_import[0].version = rng.choice((0, 1, -5, 10**6))
    else:
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = rng.choice((0, 1, 10**9))
    return bytes(model.SerializeToString())
