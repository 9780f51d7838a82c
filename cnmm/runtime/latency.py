"""Latency as measured on this machine, in milliseconds: `latency.json` of a run folder or a ladder folder. Torch-free.

A measurement belongs to a CPU model, a number of usable cores and a version of the runtime. It says nothing about
another machine, so nothing here guesses.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._files import inside, read_json, write_json
from cnmm._machine import Machine, machine, usable_cores
from cnmm.ladder import is_ladder, read_ladder

LATENCY_FILE = "latency.json"
RuntimeName = Literal["onnx", "openvino"]
RUNTIMES: tuple[RuntimeName, ...] = get_args(RuntimeName)
PACKAGES: dict[str, str] = {"onnx": "onnxruntime", "openvino": "openvino"}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long one operating point (or one stage of a cascade) takes."""

    point: str
    macs: int
    median_ms: float
    p95_ms: float
    n: int
    """Timed calls."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The points of a folder on one machine, in one runtime with one setting."""

    machine: Machine
    runtime: str
    runtime_version: str
    precision: str
    threads: int
    batch: int
    """Images of one call; the times are those of the call."""
    points: tuple[Timing, ...]
    stages: tuple[Timing, ...] = ()
    """Of the cascade, by exit ("stage 2"), at batch 1: how much longer an answer takes than one at the exit before."""
    asking: tuple[Timing, ...] = ()
    """Asking each exit but the last ("exit 2"), for an image that goes on."""

    @property
    def key(self) -> tuple[object, ...]:
        """A new measurement replaces an old one with the same key."""
        machine = (self.machine["cpu"], self.machine["cores"])
        return (*machine, self.runtime, self.runtime_version, self.precision, self.threads, self.batch)

    @property
    def total_ms(self) -> float:
        """Of all points, to compare runtimes."""
        return sum(timing.median_ms for timing in self.points)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def runtime_version(runtime: str) -> str | None:
    """The installed version of a runtime's package; None if it is not installed, or not known."""
    try:
        return importlib.metadata.version(PACKAGES[runtime])
    except (KeyError, importlib.metadata.PackageNotFoundError):
        return None


def check_runtime(name: str) -> None:
    """Refuses a runtime that is not installed."""
    if runtime_version(name) is None:
        fix = 'pip install "cnmm[openvino]"' if name == "openvino" else "pip install onnxruntime"
        raise UserError(f"runtime {name!r} is not installed; install it with: {fix}")


def time_calls(
    function: Callable[[], object], *, warmup: int = 5, repeats: int = 20, seconds: float = 0.0
) -> tuple[float, float, int]:
    """Median and 95th percentile of a call, in milliseconds, and the number of timed calls.

    At least `repeats` calls are timed, and more until `seconds` have passed.
    """
    for _ in range(warmup):
        function()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < repeats or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return percentile(times, 50), percentile(times, 95), len(times)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed: never below what was asked for."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def store(folder: str | Path, measurement: Measurement) -> None:
    """Adds a measurement to the folder's latency.json; an older one with the same key goes."""
    kept = [old for old in read(folder) if old.key != measurement.key]
    rows = [entry.to_dict() for entry in (*kept, measurement)]
    write_json(Path(folder) / LATENCY_FILE, {"measurements": rows})


def read(folder: str | Path) -> tuple[Measurement, ...]:
    """All measurements of a folder, whatever machine they are from; none if there is no latency.json."""
    path, fix = Path(folder) / LATENCY_FILE, f"remove it and run: cnmm bench {folder}"
    try:
        data = read_json(path, fix=fix)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    with inside(path, fix):
        entries = _fields.get(data, "measurements", _fields.list_of(_fields.OBJECT))
        return tuple(_read_measurement(entry, f"measurements[{n}].") for n, entry in enumerate(entries))


def p95(
    folder: str | Path,
    *,
    runtime: str | None = None,
    precision: str = "float32",
    threads: int | None = None,
    batch: int = 1,
) -> dict[str, float]:
    """The 95th percentile by point, measured on this machine with the installed version of the runtime.

    Without `runtime` or `threads` the fastest that was measured counts. A ValueError if there is no such measurement.
    """
    timed = measurement(folder, runtime=runtime, precision=precision, threads=threads, batch=batch)
    return {timing.point: timing.p95_ms for timing in timed.points}


def measurement(
    folder: str | Path,
    *,
    runtime: str | None = None,
    precision: str = "float32",
    threads: int | None = None,
    batch: int = 1,
) -> Measurement:
    """The measurement of this machine with the installed version of the runtime: of several that fit, the fastest."""
    here = machine()
    asked = {"runtime": runtime, "threads": threads, "batch": batch if batch > 1 else None}
    flags = "".join(f" --{name} {value}" for name, value in asked.items() if value)
    fix = f"run: cnmm bench {folder}{flags}"
    entries = read(folder)
    if not entries:
        raise UserError(f"{folder}: its latency was not measured; {fix}")
    local = [entry for entry in entries if entry.machine == here]
    if not local:
        other = entries[-1].machine
        where = f"{other['cpu']} with {other['cores']} usable cores"
        raise UserError(f"{folder}: its latency was measured on {where}, not here; {fix}")
    same = [
        entry
        for entry in local
        if (entry.precision, entry.batch) == (precision, batch)
        and runtime in (None, entry.runtime)
        and threads in (None, entry.threads)
    ]
    wanted = f"{runtime or 'any runtime'}, {precision}, {threads or 'any number of'} threads, batch {batch}"
    if not same:
        raise UserError(f"{folder}: its latency was not measured with {wanted}; {fix}")
    current = [entry for entry in same if entry.runtime_version == runtime_version(entry.runtime)]
    if not current:
        old = f"{PACKAGES.get(same[-1].runtime, same[-1].runtime)} {same[-1].runtime_version}"
        raise UserError(f"{folder}: its latency was measured with {old}, which is not installed here; {fix}")
    return min(current, key=lambda entry: entry.total_ms)


def measured_p95(
    folder: str | Path, *, runtime: RuntimeName = "onnx", threads: int | None = None, needed: bool = False
) -> dict[str, float]:
    """p95 of a run folder or a ladder folder as `predict` and a session run it: with all usable cores unless told.

    If it is not `needed`, nothing has to be measured.
    """
    try:
        precision = read_ladder(folder).precision if is_ladder(folder) else "float32"
        return p95(folder, runtime=runtime, precision=precision, threads=threads or usable_cores())
    except UserError:
        if needed:
            raise
        return {}


_MS = _fields.number(0, 1e9)
_TIMING: dict[str, _fields.Check] = {
    "point": _fields.TEXT,
    "macs": _fields.COUNT,
    "median_ms": _MS,
    "p95_ms": _MS,
    "n": _fields.POSITIVE,
}
_MEASUREMENT: dict[str, _fields.Check] = {
    "machine": _fields.OBJECT,
    "runtime": _fields.TEXT,
    "runtime_version": _fields.TEXT,
    "precision": _fields.TEXT,
    "threads": _fields.POSITIVE,
    "batch": _fields.POSITIVE,
    "points": _fields.list_of(_fields.OBJECT),
    "stages": _fields.list_of(_fields.OBJECT),
    "asking": _fields.list_of(_fields.OBJECT),
}


def _read_measurement(entry: Mapping[str, Any], where: str) -> Measurement:
    found = _fields.get_all({"stages": (), "asking": (), **entry}, _MEASUREMENT, where)
    place = _fields.get_all(found["machine"], {"cpu": _fields.TEXT, "cores": _fields.POSITIVE}, f"{where}machine.")
    for name in ("points", "stages", "asking"):
        rows = enumerate(found[name])
        found[name] = tuple(_fields.read(Timing, row, _TIMING, f"{where}{name}[{number}].") for number, row in rows)
    return Measurement(**{**found, "machine": Machine(cpu=place["cpu"], cores=place["cores"])})
