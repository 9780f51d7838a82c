"""Ladder folders: `ladder.json` and its ONNX files, checked before anything runs. Torch-free and numpy-free.

A folder may come from anywhere. So a manifest may only name files that lie beside it, and a file's bytes are read once
and compared with the manifest's checksum before a runtime sees them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cnmm._errors import UserError
from cnmm.cascade import Threshold
from cnmm.frontier import LADDER_FILE, Frontier

IMAGE, PROBABILITIES = "image", "probabilities"
"""The tensor that enters a network, uint8 [N, H, W, C], and the one that leaves it, float32 [N, classes]."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One ONNX file: a whole network, or that part of a cascade that ends at an exit."""

    path: Path
    sha256: str
    exit: int
    macs: int
    """Of this file alone, for one image."""
    inputs: tuple[str, ...] = (IMAGE,)
    outputs: tuple[str, ...] = (PROBABILITIES,)
    """The probabilities, then the tensors that later stages read."""

    def read(self) -> bytes:
        """The file's bytes, if they are those that the manifest names."""
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror}); export the ladder again") from None
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise UserError(f"{self.path}: not the file that {LADDER_FILE} names (sha256); export the ladder again")
        return data


@dataclass(frozen=True, kw_only=True)
class StagedCascade:
    """One set of surviving edges with all exits it reaches, as stages that run one after the other."""

    point: str
    stages: tuple[Stage, ...]
    thresholds: tuple[Threshold, ...]
    """By ascending average macs."""

    @property
    def full_macs(self) -> int:
        """Of an image that goes all the way."""
        return sum(stage.macs for stage in self.stages)

    def confidence(self, average_macs: float) -> tuple[float, ...]:
        """What each early exit asks for if so many macs per image are spent on average, interpolated in the table."""
        if not self.thresholds:
            raise UserError("the ladder's thresholds were not calibrated; ask by confidence, or export it again")
        table = self.thresholds
        if average_macs < table[0].average_macs:
            least = f"{math.ceil(table[0].average_macs):,}"
            raise UserError(f"average_macs={average_macs:,.0f}: the least that early exits can spend is {least}")
        for low, high in itertools.pairwise(table):
            if average_macs < high.average_macs:
                part = (average_macs - low.average_macs) / (high.average_macs - low.average_macs)
                return tuple(a + part * (b - a) for a, b in zip(low.confidence, high.confidence, strict=True))
        return table[-1].confidence


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """What ladder.json says."""

    folder: Path
    frontier: Frontier
    networks: Mapping[str, Stage]
    """The file of each point, by its name."""
    classes: tuple[str, ...]
    input_size: tuple[int, int]
    channels: int
    precision: str
    """Of the weights in the files: float32 or int8."""
    cascade: StagedCascade | None


def is_ladder(path: str | Path) -> bool:
    """Does this look like a ladder folder?"""
    return (Path(path) / LADDER_FILE).is_file()


def read_ladder(folder: str | Path) -> Ladder:
    """Reads and checks the manifest of a ladder folder; the ONNX files are read later."""
    folder = Path(folder)
    path = folder / LADDER_FILE
    try:
        data = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder}: no ladder folder, {LADDER_FILE} is missing; make one with: cnmm export RUN --ladder 8 -o DIR"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    try:
        return _read_manifest(folder, data)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _read_manifest(folder: Path, data: Any) -> Ladder:
    frontier = Frontier.from_dict({**data, "cascade": None} if _is_object(data) else data)  # ours has files
    for name, wanted in (("kind", "ladder"), ("task", "classification")):
        if data.get(name) != wanted:
            raise UserError(f"{name} is {data.get(name)!r}; {wanted!r} is needed")
    precision = _get(data, "precision", lambda value: value in ("float32", "int8"), "'float32' or 'int8'")
    classes = _get(data, "classes", _is_texts, "a list of names")
    size = _get(data, "input", _is_object, "an object")
    height, width, channels = (
        _get(size, name, _is_positive, "a positive whole number", "input.") for name in ("height", "width", "channels")
    )
    networks = {
        entry["point"]: _read_stage(folder, entry, f"points[{number}].") for number, entry in enumerate(data["points"])
    }
    cascade = data.get("cascade")
    return Ladder(
        folder=folder,
        frontier=frontier,
        networks=networks,
        classes=tuple(classes),
        input_size=(height, width),
        channels=channels,
        precision=precision,
        cascade=None if cascade is None else _read_cascade(folder, cascade),
    )


def _read_cascade(folder: Path, data: Any) -> StagedCascade:
    if not _is_object(data):
        raise UserError("cascade must be an object or null")
    where = "cascade."
    entries = _get(data, "stages", _is_objects, "a list of stages", where)
    stages = tuple(_read_stage(folder, entry, f"{where}stages[{n}].", True) for n, entry in enumerate(entries))
    if not stages:
        raise UserError("cascade.stages is empty; one stage per exit is needed")
    known = {IMAGE}
    for number, stage in enumerate(stages):
        missing = [name for name in stage.inputs if name not in known]
        if missing:
            raise UserError(f"{where}stages[{number}] reads {missing[0]!r}, which no earlier stage makes")
        if stage.outputs[:1] != (PROBABILITIES,) or known & set(stage.outputs):
            raise UserError(f"{where}stages[{number}].outputs must begin with {PROBABILITIES!r}, then new names")
        known |= set(stage.outputs[1:])
    exits = [stage.exit for stage in stages]
    if exits != sorted(set(exits)):
        raise UserError(f"{where}stages have the exits {exits}; they must ascend")
    rows = _get(data, "thresholds", _is_objects, "a list of thresholds", where)
    thresholds = tuple(_read_threshold(row, len(stages), f"{where}thresholds[{n}].") for n, row in enumerate(rows))
    averages = [row.average_macs for row in thresholds]
    if averages != sorted(averages):
        raise UserError(f"{where}thresholds must ascend by average_macs")
    point = _get(data, "point", _is_text, "a name", where)
    return StagedCascade(point=point, stages=stages, thresholds=thresholds)


def _read_threshold(row: Mapping[str, Any], num_exits: int, where: str) -> Threshold:
    def numbers(name: str, num: int) -> tuple[float, ...]:
        return tuple(_get(row, name, lambda value: _is_numbers(value) and len(value) == num, f"{num} numbers", where))

    average, accuracy = (_get(row, name, _is_number, "a number", where) for name in ("average_macs", "accuracy"))
    return Threshold(
        confidence=numbers("confidence", num_exits - 1),
        average_macs=float(average),
        accuracy=float(accuracy),
        exits=numbers("exits", num_exits),
    )


def _read_stage(folder: Path, entry: Mapping[str, Any], where: str, in_cascade: bool = False) -> Stage:
    name = _get(entry, "file", _is_plain_name, "the plain name of an .onnx file in the same folder", where)
    tensors = {
        field: tuple(_get(entry, field, _is_texts, "a list of names", where))
        for field in ("inputs", "outputs")
        if in_cascade
    }
    return Stage(
        path=folder / name,
        sha256=_get(entry, "sha256", _is_text, "a checksum", where),
        exit=_get(entry, "exit", _is_positive, "a positive whole number", where),
        macs=_get(entry, "macs", _is_positive, "a positive whole number", where),
        **tensors,
    )


def _get(data: Mapping[str, Any], name: str, check: Callable[[Any], bool], words: str, where: str = "") -> Any:
    value = data.get(name)
    if not check(value):
        found = repr(value)[:80] if name in data else "missing"
        raise UserError(f"{where}{name} is {found}; {words} is needed")
    return value


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(_is_number(item) for item in value)


def _is_plain_name(value: object) -> bool:
    """Not a path of any system: no folders, no drives, nothing hidden."""
    return (
        isinstance(value, str)
        and value.isprintable()
        and value.endswith(".onnx")
        and not value.startswith(".")
        and not set(value) & set('/\\:*?"<>|')
    )
