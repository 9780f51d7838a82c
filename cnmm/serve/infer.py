"""The client's side of the Open Inference Protocol: requests as bytes, with tensors in binary, and their answers.

https://github.com/kserve/open-inference-protocol, with the extension for binary tensors: the JSON header comes first,
its length is in an HTTP header, and the tensors follow in the order in which the header names them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._files import parse_json
from cnmm.serve.http_answer import Answer
from cnmm.serve.open_loop import Address

HEADER_LENGTH = "Inference-Header-Content-Length"
_TYPES = {"BOOL": "?", "UINT8": "u1", "INT32": "<i4", "INT64": "<i8", "FP32": "<f4", "FP64": "<f8"}
"""Those of answers."""


@dataclass(frozen=True, kw_only=True)
class InferAnswer:
    """What a server answered."""

    parameters: Mapping[str, Any]
    tensors: Mapping[str, npt.NDArray[Any]]


def http_request(address: Address, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """A request of HTTP/1.1 as bytes: POST with a body, otherwise GET."""
    verb = "POST" if body else "GET"
    lines = [f"{verb} {address.prefix}{path} HTTP/1.1", f"Host: {address.authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def infer_request(
    address: Address,
    model: str,
    images: npt.NDArray[np.uint8],
    *,
    tensor: str,
    outputs: Sequence[str],
    parameters: Mapping[str, Any],
) -> bytes:
    """A request for some outputs, in binary, of images [N, H, W, C]."""
    about = {"name": tensor, "datatype": "UINT8", "shape": list(images.shape)}
    header = {
        "inputs": [{**about, "parameters": {"binary_data_size": images.nbytes}}],
        "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
        **({"parameters": parameters} if parameters else {}),
    }
    words = json.dumps(header, separators=(",", ":")).encode()
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(words))}
    return http_request(address, f"/v2/models/{model}/infer", headers, words + images.tobytes())


def infer_answer(answer: Answer) -> InferAnswer:
    """Reads an answer of status 200."""
    text = answer.headers.get(HEADER_LENGTH.lower().encode())
    if text is None:
        header, rest = answer.body, b""
    elif text.isdigit() and len(text) < 10:
        header, rest = answer.body[: int(text)], answer.body[int(text) :]
    else:
        raise UserError(f"an answer whose {HEADER_LENGTH} is {text[:60]!r}")
    data = _fields.checked(parse_json(header), "answer", _fields.OBJECT)
    parameters = _fields.get(data, "parameters", _fields.or_null(_fields.OBJECT)) or {}
    tensors = {}
    for number, output in enumerate(_fields.get(data, "outputs", _fields.list_of(_fields.OBJECT, most=100))):
        name, array, rest = _tensor(output, rest, f"outputs[{number}].")
        tensors[name] = array
    return InferAnswer(parameters=parameters, tensors=tensors)


def _tensor(output: Mapping[str, Any], rest: bytes, where: str) -> tuple[str, npt.NDArray[Any], bytes]:
    name = _fields.get(output, "name", _fields.TEXT, where)
    kind = np.dtype(_TYPES[_fields.get(output, "datatype", _fields.one_of(*_TYPES), where)])
    shape = _fields.get(output, "shape", _fields.list_of(_fields.whole(0, 2**28), most=8), where)
    given = _fields.get(output, "parameters", _fields.or_null(_fields.OBJECT), where) or {}
    size = given.get("binary_data_size")
    try:
        if size is None:
            return name, np.array(output.get("data"), kind).reshape(shape), rest
        _fields.checked(size, f"{where}binary_data_size", _fields.whole(0, len(rest)))
        return name, np.frombuffer(rest[:size], kind).reshape(shape), rest[size:]
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}{name}: cannot be read as {shape} of {kind}: {error}") from None
