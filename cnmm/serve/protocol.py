"""The Open Inference Protocol, version 2, over REST, with the binary extension: bytes to requests, answers to bytes.

A version is an operating point; without one, the server chooses. There is one input, `image`: uint8 [N, H, W, C], or
BYTES [N], image files. Nothing here waits or knows the time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._files import parse_json
from cnmm.ladder import IMAGE
from cnmm.serve.asks import Answer, Ask, Data, Knobs, Pictures, Refusal, files, pixels, read_knobs, sniffed
from cnmm.serve.served import Served

HEADER_LENGTH = "inference-header-content-length"
MOST_JSON = 2**21
"""Bytes of JSON: reading more would hold up everybody. Tensors of this size should be binary."""
SHORT_JSON = 2**11
"""Bytes of JSON that are worth remembering."""
MOST_NUMBERS = 2**18
"""In the JSON of an answer, for the same reason."""
MAP, SHARES, PROBABILITIES, LABEL, EXIT = "label_map", "shares", "probabilities", "label", "exit"
_SHAPE = _fields.list_of(_fields.whole(0, 2**31), least=1, most=8)
_SIZE = _fields.whole(0, 2**40)


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a client wants to have of one tensor."""

    name: str
    binary: bool
    classes: int = 0
    """Of `probabilities`: only so many classes, as texts `p:number:name`; 0 is the tensor itself."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inference:
    """A request as it was sent."""

    ask: Ask
    id: str | None
    outputs: tuple[Output, ...]


def tensors(served: Served) -> dict[str, tuple[str, list[int]]]:
    """Name, type and shape of every output."""
    num = len(served.ladder.preprocessing.classes)
    if served.segments:
        return {MAP: ("UINT8", [-1, -1, -1]), SHARES: ("FP32", [-1, num]), EXIT: ("INT32", [-1])}
    return {PROBABILITIES: ("FP32", [-1, num]), LABEL: ("BYTES", [-1]), EXIT: ("INT32", [-1])}


def parse_inference(body: bytes, header_length: str | None, version: str | None, served: Served) -> Inference:
    """`header_length`: how many bytes of the body are JSON, if not all of them are; 0 is a body of pixels or a file."""
    size = len(body)
    if header_length is not None:
        if not header_length.isdecimal() or len(header_length) > 15 or int(header_length) > len(body):
            raise UserError(f"{HEADER_LENGTH} {header_length!r:.40}: must be from 0 to {len(body)}, the body's length")
        size = int(header_length)
    if header_length is not None and size == 0:
        knobs = _knobs({}, version, served)
        outputs = tuple(Output(name=name, binary=True) for name in tensors(served))
        return Inference(ask=_ask(sniffed(body, served), knobs, outputs), id=None, outputs=outputs)
    if size > MOST_JSON:
        raise Refusal(413, f"{size:,} bytes of JSON: must be at most {MOST_JSON:,}; send tensors as binary data")
    read = _known_head if size <= SHORT_JSON else _read_head
    head = read(bytes(body[:size]), version, served)
    pictures = _pictures(head, memoryview(body)[size:], served)
    _check_written(pictures, head.outputs, served)
    return Inference(ask=_ask(pictures, head.knobs, head.outputs), id=head.id, outputs=head.outputs)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Head:
    """The JSON of a request."""

    kind: str
    shape: tuple[int, ...]
    binary_size: int | None
    data: Any
    """Numbers in JSON, not checked yet."""
    outputs: tuple[Output, ...]
    knobs: Knobs
    id: str | None


def _read_head(text: bytes, version: str | None, served: Served) -> _Head:
    found = parse_json(text)
    if not isinstance(found, dict):
        raise UserError("a request must be a JSON object")
    parameters = dict(_fields.get({"parameters": {}, **found}, "parameters", _fields.OBJECT))
    binary = bool(_fields.checked(parameters.pop("binary_data_output", False), "binary_data_output", _fields.TRUTH))
    tensor = _fields.get(found, "inputs", _fields.list_of(_fields.OBJECT, 1))[0]
    name, kind = (_fields.get(tensor, field, _fields.TEXT, "inputs[0].") for field in ("name", "datatype"))
    shape = _fields.get(tensor, "shape", _SHAPE, "inputs[0].")
    if name != IMAGE or kind not in ("UINT8", "BYTES"):
        raise UserError(f"input {name!r} of {kind}: must be {IMAGE!r} of UINT8 (pixels) or BYTES (image files)")
    size = tensor.get("parameters", {})
    size = size.get("binary_data_size") if isinstance(size, Mapping) else None
    return _Head(
        kind=kind,
        shape=tuple(shape),
        binary_size=None if size is None else _fields.checked(size, "binary_data_size", _SIZE),
        data=tensor.get("data"),
        outputs=_outputs(found.get("outputs"), binary, served),
        id=_fields.get(found, "id", _fields.or_null((lambda value: isinstance(value, str), "a text"))),
        knobs=_knobs(parameters, version, served),
    )


_known_head = lru_cache(128)(_read_head)
"""Clients send the same few bytes again and again; checking them field by field takes longer than all the rest."""


def _check_written(pictures: Pictures, outputs: Sequence[Output], served: Served) -> None:
    """Refuses answers that would be too much JSON, before they are computed."""
    each = {MAP: pictures.pixels // pictures.images, LABEL: 1, EXIT: 1}
    classes = len(served.ladder.preprocessing.classes)
    numbers = sum(each.get(output.name, classes) for output in outputs if not output.binary) * pictures.images
    if numbers > MOST_NUMBERS:
        fix = "ask for binary data (binary_data_output), or for fewer outputs"
        raise UserError(f"an answer of {numbers:,} numbers in JSON: must be at most {MOST_NUMBERS:,}; {fix}")


def _ask(pictures: Pictures, knobs: Knobs, outputs: Sequence[Output]) -> Ask:
    mapped = any(output.name == MAP for output in outputs)
    return Ask(pictures=pictures, knobs=knobs, want="labels" if mapped else "probabilities")


def _knobs(parameters: Mapping[str, Any], version: str | None, served: Served) -> Knobs:
    """Triton's `timeout` is in microseconds, its `priority` our weight; the version is the operating point."""
    given = dict(parameters)
    if "timeout" in given:
        given["timeout_ms"] = _fields.checked(given.pop("timeout"), "timeout", _fields.whole(0, 3_600_000_000)) / 1e3
    if version is not None:
        given.setdefault("operating_point", version)
        if given["operating_point"] != version:
            raise UserError(f"operating_point {_fields.shown(given['operating_point'])}: the version is {version!r}")
    return read_knobs(given, served)


def _pictures(head: _Head, binary: memoryview, served: Served) -> Pictures:
    if head.binary_size is None:
        if len(binary):
            raise UserError(f"{len(binary):,} bytes after the JSON belong to no input; give its binary_data_size")
        if head.kind == "BYTES":
            raise UserError("image files must be binary data; give binary_data_size")
        return pixels(_listed(head.data, head.shape), head.shape, served)
    if head.binary_size != len(binary):
        raise UserError(f"binary_data_size={head.binary_size}: {len(binary):,} bytes follow the JSON")
    if head.kind == "UINT8":
        return pixels(binary, head.shape, served)
    parts = split_bytes(binary)
    if math.prod(head.shape) != len(parts):
        raise UserError(f"image files of shape {list(head.shape)}: {len(parts)} were sent")
    return files(parts, served)


def _listed(data: Any, shape: Sequence[int]) -> bytes:
    """Numbers in JSON, flat or nested."""
    if not isinstance(data, list):
        raise UserError("inputs[0].data is missing: must be a list of numbers from 0 to 255, or binary data")
    try:
        values = np.array(data)
    except ValueError:
        raise UserError("inputs[0].data: lists of different lengths") from None
    if values.dtype.kind not in "iu" or (values.size and (values.min() < 0 or values.max() > 255)):
        raise UserError("inputs[0].data: must be whole numbers from 0 to 255")
    if values.ndim > 1 and list(values.shape) != list(shape):
        raise UserError(f"inputs[0].data: its shape is {list(values.shape)}, and {list(shape)} is given")
    return values.astype(np.uint8).tobytes()


def split_bytes(data: Data) -> list[Data]:
    """The elements of a tensor of BYTES: each has its length before it, in four bytes, the lowest first."""
    parts, place = list[Data](), 0
    while place < len(data):
        length = int.from_bytes(data[place : place + 4], "little")
        place += 4 + length
        if place > len(data):
            raise UserError("a tensor of BYTES ends too early: each element has its length before it, in four bytes")
        parts.append(data[place - length : place])
    return parts


def join_bytes(parts: Sequence[bytes]) -> bytes:
    """A tensor of BYTES."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _outputs(given: Any, binary: bool, served: Served) -> tuple[Output, ...]:
    """All of them, unless some are asked for."""
    known = tensors(served)
    if given is None:
        return tuple(Output(name=name, binary=binary) for name in known)
    found = []
    for number, one in enumerate(_fields.checked(given, "outputs", _fields.list_of(_fields.OBJECT, most=16))):
        where = f"outputs[{number}]."
        name = _fields.get(one, "name", _fields.TEXT, where)
        if name not in known:
            raise UserError(f"output {name!r}: must be one of {', '.join(known)}")
        wishes = _fields.get({"parameters": {}, **one}, "parameters", _fields.OBJECT, where)
        own = _fields.checked(wishes.get("binary_data", binary), f"{where}binary_data", _fields.TRUTH)
        classes = _fields.checked(wishes.get("classification", 0), f"{where}classification", _fields.COUNT)
        found.append(Output(name=name, binary=own, classes=classes if name in (PROBABILITIES, SHARES) else 0))
    return tuple(found) or tuple(Output(name=name, binary=binary) for name in known)


# Answers


def write_inference(asked: Inference, answer: Answer, served: Served, version: str | None) -> tuple[bytes, int | None]:
    """The body, and how many bytes of it are JSON if others follow."""
    outputs: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for output in asked.outputs:
        kind, shape, data = _tensor(output, answer, served)
        entry: dict[str, Any] = {"name": output.name, "datatype": kind, "shape": shape}
        if output.binary:
            blob = join_bytes(data) if kind == "BYTES" else data.tobytes()
            blobs.append(blob)
            entry["parameters"] = {"binary_data_size": len(blob)}
        else:
            entry["data"] = [text.decode() for text in data] if kind == "BYTES" else data.ravel().tolist()
        outputs.append(entry)
    head = {
        "model_name": served.model,
        "model_version": version or answer.point,
        **({} if asked.id is None else {"id": asked.id}),
        "parameters": answer.about(),
        "outputs": outputs,
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    return (text + b"".join(blobs), len(text)) if blobs else (text, None)


def _tensor(output: Output, answer: Answer, served: Served) -> tuple[str, list[int], Any]:
    classes = served.ladder.preprocessing.classes
    if output.name == EXIT:
        return "INT32", [len(answer.exits)], np.array(answer.exits, np.int32)
    if output.name == MAP:
        if len(set(answer.shapes)) > 1:
            raise UserError("label maps of different sizes are no tensor; send such images one by one")
        shape = [len(answer.maps), *answer.shapes[0]]
        return "UINT8", shape, np.frombuffer(b"".join(answer.maps), np.uint8)
    if output.name == LABEL:
        best = answer.probabilities.argmax(1).tolist()
        return "BYTES", [len(best)], [classes[number].encode() for number in best]
    if output.classes:
        texts = [
            f"{row[number]:f}:{number}:{classes[number]}".encode()
            for row in answer.probabilities
            for number in np.argsort(-row, kind="stable")[: output.classes].tolist()
        ]
        return "BYTES", [len(answer.probabilities), len(texts) // len(answer.probabilities)], texts
    return "FP32", list(answer.probabilities.shape), answer.probabilities


# Descriptions


def metadata(served: Served) -> dict[str, Any]:
    """Of the model."""
    height, width, channels = served.ladder.preprocessing.image_shape
    shape = [-1, -1, -1, channels] if served.segments else [-1, height, width, channels]
    return {
        "name": served.model,
        "versions": list(served.menu.points),
        "platform": f"cnmm_{served.timed.runtime}",
        "inputs": [{"name": IMAGE, "datatype": "UINT8", "shape": shape}],
        "outputs": [{"name": name, "datatype": kind, "shape": dims} for name, (kind, dims) in tensors(served).items()],
    }


def config(served: Served) -> dict[str, Any]:
    """Of the model, by Triton's names."""
    about = metadata(served)

    def ports(name: str) -> list[dict[str, Any]]:
        kinds = {"UINT8": "TYPE_UINT8", "FP32": "TYPE_FP32", "INT32": "TYPE_INT32", "BYTES": "TYPE_STRING"}
        return [
            {"name": port["name"], "data_type": kinds[port["datatype"]], "dims": port["shape"]} for port in about[name]
        ]

    return {
        "name": served.model,
        "platform": about["platform"],
        "backend": "cnmm",
        "max_batch_size": 0,
        "input": ports("inputs"),
        "output": ports("outputs"),
        "version_policy": {"all": {}},
        "parameters": {"task": {"string_value": served.ladder.task}},
    }
