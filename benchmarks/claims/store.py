"""Results as JSON files: `RESULTS/SCALE/trainings/NAME.json` and `RESULTS/SCALE/measurements/KIND.NAME.json`.

Every file says how it was made, and carries the fingerprint of its declaration: where that has changed, it is stale.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cnmm
from cnmm._files import read_json, write_json
from cnmm._machine import machine

JSON = dict[str, Any]


def fingerprint(declared: object) -> str:
    """Of a declaration as JSON: another one, another fingerprint."""
    return hashlib.sha256(json.dumps(declared, sort_keys=True).encode()).hexdigest()[:16]


def circumstances() -> JSON:
    """What a result was made with."""
    versions = {"cnmm": cnmm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"versions": versions, "hardware": {**machine(), "threads": torch.get_num_threads()}}


@dataclass(frozen=True)
class Store:
    """The results of one scale."""

    folder: Path

    def training(self, name: str) -> Path:
        return self.folder / "trainings" / f"{name}.json"

    def measurement(self, kind: str, name: str) -> Path:
        return self.folder / "measurements" / f"{kind}.{name}.json"

    def read(self, path: Path, wanted: str | None = None) -> JSON | None:
        """A result; None if it is not there, or stale: its declaration had another fingerprint."""
        if not path.is_file():
            return None
        found: JSON = read_json(path)
        return found if wanted in (None, found.get("fingerprint")) else None

    def write(self, path: Path, result: JSON) -> None:
        """In one step: a result is there as a whole, or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, rounded(result))


def rounded(value: Any) -> Any:
    """Floats with seven digits: more would be noise, and would not survive another machine."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value


def pack(array: np.ndarray) -> str:
    """Answers image by image as a text: truths are bits, counts are numbers of four bytes."""
    data = np.packbits(array) if array.dtype == bool else array.astype("<i4")
    return base64.b64encode(zlib.compress(data.tobytes(), 9)).decode()


def unpack_truths(text: str, num: int) -> np.ndarray:
    """Which of `num` images were answered rightly."""
    return np.unpackbits(np.frombuffer(_bytes(text), np.uint8), count=num).astype(bool)


def unpack_counts(text: str, num: int) -> np.ndarray:
    """[N, 3, K]: of every image and class, pixels in the intersection, predicted and labelled."""
    return np.frombuffer(_bytes(text), "<i4").reshape(num, 3, -1)


def _bytes(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
