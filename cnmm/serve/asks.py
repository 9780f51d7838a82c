"""What a request asks for, what it gets, and how it is refused. Times are in milliseconds."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cnmm import _fields
from cnmm._errors import UserError
from cnmm.runtime.inputs import sent_size
from cnmm.serve.menu import Row
from cnmm.serve.pool import MEMORY
from cnmm.serve.served import Served

MOST_BODY = MEMORY
"""Bytes of a request, and of what it is when it is unpacked."""
MOST_IMAGES, MOST_FILES = 4096, 256
"""Of a request: as pixels, and as files, whose headers everybody waits for."""
LONGEST_MS = 3_600_000.0
Want = Literal["probabilities", "labels", "png"]
Data = bytes | memoryview


class Refusal(Exception):
    """A request that is not answered: a status of HTTP, one line, and more for the body."""

    def __init__(self, status: int, message: str, *, retry_after_ms: float | None = None, unread: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after_ms = status, message, retry_after_ms
        self.unread = unread
        """Is the rest of the request perhaps still on its way? Then the connection is of no more use."""


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """How a request wants to be treated."""

    row: Row | None = None
    """The way to answer it; adaptive without one."""
    weight: float = 1.0
    timeout_ms: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Pictures:
    """The images of a request."""

    parts: Sequence[Data]
    shape: tuple[int, ...] | None
    """[N, H, W, C], if they are pixels; otherwise each part is a file."""
    images: int
    pixels: int
    """Of all images as they were sent."""
    format: str = ""
    """Of files: that of the first."""

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ask:
    """A request that can be queued."""

    pictures: Pictures
    knobs: Knobs
    want: Want = "probabilities"


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What a request gets."""

    probabilities: npt.NDArray[np.float32]
    """[N, classes]; of segmentation, shares of the pixels."""
    maps: Sequence[bytes]
    """Of segmentation, if wanted: label maps, or PNG files of them."""
    shapes: Sequence[tuple[int, int]]
    """Height and width of the label maps."""
    exits: Sequence[int]
    confidence: Sequence[float]
    point: str
    macs: float
    """Per image."""
    queue_ms: float
    compute_ms: float
    """With decoding."""
    time_ms: float
    """From the moment that the request was complete."""
    quality: float
    """That the way it was answered has on average."""
    degraded: bool
    """Is this less than the ladder's best, because of the load?"""

    def about(self) -> dict[str, Any]:
        """How it was answered, by the names of the protocol."""
        return {
            "operating_point": self.point,
            "exit": max(self.exits),
            "macs": round(self.macs),
            "queue_ms": round(self.queue_ms, 3),
            "compute_ms": round(self.compute_ms, 3),
            "expected_accuracy": round(self.quality, 5),
            "degraded": self.degraded,
        }


_KNOBS: dict[str, _fields.Check] = {
    "timeout_ms": _fields.number(0, LONGEST_MS),
    "priority": _fields.number(0, 1000),
    "budget": (lambda value: isinstance(value, str) or _fields.is_number(value), "a budget such as 40% or 60M"),
    "min_confidence": _fields.SHARE,
    "operating_point": _fields.TEXT,
}


def read_knobs(given: Mapping[str, Any], served: Served) -> Knobs:
    """From parameters by name; at most one of `budget`, `min_confidence` and `operating_point` chooses the row."""
    for name in given:
        if name not in _KNOBS:
            near = difflib.get_close_matches(str(name), _KNOBS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"unknown parameter {_fields.shown(name)}: must be one of {', '.join(_KNOBS)}{hint}")
    values = {name: _fields.checked(value, name, _KNOBS[name]) for name, value in given.items()}
    chosen = [name for name in ("budget", "min_confidence", "operating_point") if name in values]
    if len(chosen) > 1:
        raise UserError(f"{' and '.join(chosen)} cannot be combined; use one of them")
    return Knobs(
        row=_row(chosen[0], values[chosen[0]], served) if chosen else None,
        weight=float(values.get("priority", 0)) or 1.0,
        timeout_ms=float(values.get("timeout_ms", 0)) or None,
    )


def _row(name: str, value: Any, served: Served) -> Row:
    menu = served.menu
    if name == "min_confidence":
        return menu.pinned(float(value))
    if name == "budget":
        return menu.points[served.ladder.frontier.choose(value, served.p95_ms).name]
    if value not in menu.points:
        raise UserError(f"operating_point {_fields.shown(value)}: must be one of {', '.join(menu.points)}")
    return menu.points[value]


def pixels(data: Data, shape: Sequence[int], served: Served) -> Pictures:
    """Images as they are: uint8 [N, H, W, C], at the ladder's size unless pixels are labelled."""
    height, width, channels = served.ladder.preprocessing.image_shape
    fits = len(shape) == 4 and shape[3] == channels and min(shape) > 0
    if not fits or (not served.segments and tuple(shape[1:3]) != (height, width)):
        wanted = f"[N, {'H, W' if served.segments else f'{height}, {width}'}, {channels}]"
        raise UserError(f"images of shape {_fields.shown(list(shape))}: must be {wanted}")
    if math.prod(shape) != len(data):
        raise UserError(f"images of shape {list(shape)} have {math.prod(shape):,} bytes, and {len(data):,} were sent")
    _check_number(shape[0], served)
    return Pictures(parts=[data], shape=tuple(shape), images=shape[0], pixels=math.prod(shape[:3]))


def files(parts: Sequence[Data], served: Served) -> Pictures:
    """Image files; their headers are read here, so that a worker never meets what is no image."""
    _check_number(len(parts), served, MOST_FILES)
    kinds, sizes = zip(*(sent_size(bytes(part)) for part in parts), strict=True)
    total = sum(sizes)
    if served.segments and total > MEMORY // 2:
        raise Refusal(413, f"images of {total:,} pixels: must be at most {MEMORY // 2:,} in all")
    return Pictures(parts=parts, shape=None, images=len(parts), pixels=total, format=kinds[0])


def sniffed(data: Data, served: Served) -> Pictures:
    """Bytes of which nothing is known: images at the ladder's size by their length, unless they begin like a file."""
    known = any(bytes(data[: len(magic)]) == magic for magic in (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"))
    num, rest = divmod(len(data), served.image_bytes)
    if not known and num and not rest:
        return pixels(data, (num, *served.ladder.preprocessing.image_shape), served)
    return files([data], served)


def _check_number(images: int, served: Served, most: int = MOST_IMAGES) -> None:
    if images < 1:
        raise UserError("no images; send at least one")
    most = min(most, MEMORY // (4 * len(served.ladder.preprocessing.classes)))
    if images > most:
        raise Refusal(413, f"{images:,} images: must be at most {most:,} in one request")
