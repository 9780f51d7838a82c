"""The interface as an OpenAPI document: what the server takes and answers."""

from __future__ import annotations

from typing import Any

from cnmm import __version__
from cnmm.ladder import IMAGE
from cnmm.serve.asks import LONGEST_MS
from cnmm.serve.protocol import tensors
from cnmm.serve.served import Served

Schema = dict[str, Any]
NUMBER, WHOLE, TEXT, TRUTH = ({"type": kind} for kind in ("number", "integer", "string", "boolean"))
ERROR = {"$ref": "#/components/schemas/Error"}


def openapi(served: Served) -> Schema:
    """Written by hand, and tested by fuzzing the server with it."""
    paths: Schema = {
        "/": {"get": _answers("The page for people.", {"type": "string"}, kind="text/html")},
        "/about": {"get": _answers("The model, its points and what the server was told.", _object())},
        "/events": {"get": _answers("The state of the server, four times a second.", TEXT, kind="text/event-stream")},
        "/metrics": {"get": _answers("For Prometheus.", TEXT, kind="text/plain; version=0.0.4; charset=utf-8")},
        "/openapi.json": {"get": _answers("This document.", _object())},
        "/examples": {"get": _answers("Images to try.", _list(_object(name=TEXT, url=TEXT)))},
        "/predict": {"post": _predict(served)},
        "/v2": {"get": _answers("About the server.", _object(name=TEXT, version=TEXT, extensions=_list(TEXT)))},
        "/v2/health/live": {"get": _answers("Does it answer?", _object(live=TRUTH), 503)},
        "/v2/health/ready": {"get": _answers("Should it be asked?", _object(ready=TRUTH), 503)},
        "/v2/models/stats": {"get": _answers("What was answered so far.", _object(model_stats=_list(_object())))},
        "/v2/repository/index": {"post": _answers("All operating points.", _list(_object(name=TEXT, version=TEXT)))},
    }
    model = _path("model", "Name of the model.", [served.model])
    version = _path("version", "An operating point.", list(served.menu.points))
    for prefix, named in (
        ("/v2/models/{model}", [model]),
        ("/v2/models/{model}/versions/{version}", [model, version]),
    ):
        for suffix, methods in _model(served).items():
            paths[prefix + suffix] = {"parameters": named, **methods}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"cnmm: {served.model}", "version": __version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {"schemas": {"Error": _object(error=TEXT, retry_after_ms=NUMBER, required=["error"])}},
    }


_DESCRIPTION = """Images in, answers out, each at the cost that the load allows. The paths below /v2 are the Open
Inference Protocol with its binary extension; a version is an operating point, and without one the server chooses."""


def _model(served: Served) -> Schema:
    tensor = _object(name=TEXT, datatype=TEXT, shape=_list(WHOLE), parameters=_object())
    answer = _object(
        model_name=TEXT,
        model_version=TEXT,
        id=TEXT,
        parameters=_ABOUT,
        outputs=_list(tensor),
        required=["model_name", "model_version", "parameters", "outputs"],
    )
    infer = _answers("Classify images, or label their pixels.", answer, 400, 404, 408, 413, 415, 503)
    binary = {"type": "string", "format": "binary"}
    infer["responses"]["200"]["content"]["application/octet-stream"] = {"schema": binary}
    infer["parameters"] = [
        {
            "name": "Inference-Header-Content-Length",
            "in": "header",
            "description": "How many bytes of the body are JSON, if binary data follows; 0 if all of it is one tensor.",
            "schema": {"type": "integer", "minimum": 0},
        }
    ]
    infer["requestBody"] = {
        "required": True,
        "content": {
            "application/json": {"schema": _request(served)},
            "application/octet-stream": {"schema": binary},
        },
    }
    metadata = _object(name=TEXT, versions=_list(TEXT), platform=TEXT, inputs=_list(tensor), outputs=_list(tensor))
    return {
        "": {"get": _answers("Inputs, outputs and versions.", metadata, 404)},
        "/ready": {"get": _answers("Should it be asked?", _object(name=TEXT, ready=TRUTH), 404, 503)},
        "/config": {"get": _answers("The same, by Triton's names.", _object(name=TEXT), 404)},
        "/stats": {"get": _answers("What was answered so far.", _object(model_stats=_list(_object())), 404)},
        "/infer": {"post": infer},
    }


def _request(served: Served) -> Schema:
    height, width, channels = served.ladder.preprocessing.image_shape
    wishes = _object(
        timeout={**WHOLE, "minimum": 0, "maximum": 3_600_000_000, "description": "Deadline, in microseconds."},
        priority={**NUMBER, "minimum": 0, "maximum": 1000, "description": "How much a right answer counts; 1 if 0."},
        budget={"description": "Such as 60M, 25ms, 40% or acc:0.92.", "type": ["string", "number"]},
        min_confidence={**NUMBER, "minimum": 0, "maximum": 1},
        operating_point={"type": "string", "enum": list(served.menu.points)},
        binary_data_output=TRUTH,
    )
    pixel = {"type": "integer", "minimum": 0, "maximum": 255}
    image = _object(
        name={"const": IMAGE},
        datatype={"enum": ["UINT8", "BYTES"]},
        shape={"type": "array", "items": WHOLE, "examples": [[1, height, width, channels]]},
        data={"type": "array", "description": "Pixels, flat or nested.", "items": {"anyOf": [pixel, _list({})]}},
        parameters=_object(binary_data_size={**WHOLE, "minimum": 0}),
        required=["name", "datatype", "shape"],
    )
    output = _object(
        name={"enum": list(tensors(served))},
        parameters=_object(binary_data=TRUTH, classification={**WHOLE, "minimum": 0}),
        required=["name"],
    )
    return _object(
        id=TEXT,
        parameters={**wishes, "additionalProperties": False},
        inputs={"type": "array", "minItems": 1, "maxItems": 1, "items": image},
        outputs={"type": "array", "maxItems": 16, "items": output},
        required=["inputs"],
    )


def _predict(served: Served) -> Schema:
    ranked = _list(_object(label=TEXT, p=NUMBER, required=["label", "p"]))
    more = {"shares": _list(_object(label=TEXT, share=NUMBER)), "size": _list(WHOLE)} if served.segments else {}
    answer = _object(
        top=ranked, confidence=NUMBER, time_ms=NUMBER, **_ABOUT["properties"], **more, required=["top", "time_ms"]
    )
    found = _answers("Send an image file, see what it is.", answer, 400, 408, 413, 415, 503)
    if served.segments:
        found["responses"]["200"]["content"]["image/png"] = {"schema": {"type": "string", "format": "binary"}}
    wishes = {
        "top": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 5},
        "budget": {"type": "string", "examples": ["40%"]},
        "operating_point": {"type": "string", "enum": list(served.menu.points)},
        "min_confidence": {"type": "number", "minimum": 0, "maximum": 1},
        "timeout_ms": {"type": "number", "minimum": 0, "maximum": LONGEST_MS},
        "priority": {"type": "number", "minimum": 0, "maximum": 1000},
    }
    found["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in wishes.items()]
    file = {"type": "string", "format": "binary"}
    found["requestBody"] = {
        "required": True,
        "content": {
            "image/*": {"schema": file},
            "application/octet-stream": {"schema": file},
            "multipart/form-data": {"schema": _object(file=file, required=["file"])},
        },
    }
    return found


def _object(*, required: list[str] | None = None, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _path(name: str, words: str, values: list[str]) -> Schema:
    schema = {"type": "string", "enum": values}
    return {"name": name, "in": "path", "required": True, "description": words, "schema": schema}


def _answers(summary: str, schema: Schema, *refusals: int, kind: str = "application/json") -> Schema:
    """An operation with its answer and what it may be refused with."""
    content = {"content": {kind: {"schema": schema}}}
    refused = {"content": {"application/json": {"schema": schema if refusals == (503,) else ERROR}}}
    return {
        "summary": summary,
        "responses": {
            "200": {"description": summary, **content},
            **{str(status): {"description": _STATUS[status], **refused} for status in refusals},
        },
    }


_STATUS = {
    400: "The request is wrong, and the message says why.",
    404: "There is no such model or operating point.",
    408: "The request did not come in time.",
    413: "The request is too large.",
    415: "It is packed in an unknown way.",
    503: "Not now: Retry-After and retry_after_ms say when.",
}
_ABOUT = _object(
    operating_point=TEXT,
    exit=WHOLE,
    macs=WHOLE,
    queue_ms=NUMBER,
    compute_ms=NUMBER,
    expected_accuracy=NUMBER,
    degraded=TRUTH,
)
