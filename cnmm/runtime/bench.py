"""Measuring the latency of a ladder on this machine: what budgets such as `25ms` go by. Times are in milliseconds."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._machine import machine
from cnmm.ladder import read_ladder
from cnmm.runtime.early_exit import steps
from cnmm.runtime.engines import Images
from cnmm.runtime.latency import (
    RUNTIMES,
    Measurement,
    RuntimeName,
    Timing,
    check_runtime,
    percentile,
    runtime_version,
    store,
    time_calls,
)
from cnmm.runtime.session import Session

MOST_IMAGES, MOST_BYTES = 2**16, 2**30
"""Of one call."""
MOST_SECONDS = 3600
ROUNDS = 5
"""Turns of each point in a measurement."""
BUSY = 2.0
"""How far the 95th percentile lies above the median at most where nothing else runs."""
ENOUGH_S = 0.5
"""Seconds for a point from which on that can be said."""
Progress = Callable[[str, float], None]

logger = logging.getLogger("cnmm")


def bench(
    ladder: str | Path,
    *,
    runtime: RuntimeName | None = None,
    threads: int | None = None,
    batch: int = 1,
    precision: Literal["float32", "bfloat16"] = "float32",
    seconds: float = 1.0,
    out: str | Path | None = None,
    on_progress: Progress = lambda what, done: None,
) -> tuple[Measurement, ...]:
    """Times every point of a ladder, fastest runtime first, and stores the result in the folder's latency.json.

    `runtime`: all that are installed unless told. `seconds`: spent on each point. `out`: another folder to store in.
    """
    batch = _fields.checked(batch, "batch", _fields.whole(1, MOST_IMAGES))
    seconds = _fields.checked(seconds, "seconds", _fields.number(0, MOST_SECONDS))
    size = math.prod(read_ladder(ladder).preprocessing.image_shape)
    if batch * size > MOST_BYTES:
        raise UserError(f"batch={batch}: {batch * size:,} bytes of images, must be at most {MOST_BYTES:,}")
    measurements = []
    for name in _runtimes(runtime, precision):
        on_progress(name, 0.0)
        with Session(ladder, runtime=name, threads=threads, precision=precision) as session:
            measurements.append(time_session(session, batch=batch, seconds=seconds, on_progress=on_progress))
    for measurement in measurements:
        store(out or ladder, measurement)
    return tuple(sorted(measurements, key=lambda entry: entry.total_ms))


def _runtimes(name: RuntimeName | None, precision: str) -> Sequence[RuntimeName]:
    if name is None and precision == "bfloat16":
        name = "openvino"
    if name is not None:
        check_runtime(name)
        return [name]
    return [name for name in RUNTIMES if runtime_version(name)]


def time_session(
    session: Session, *, batch: int = 1, seconds: float = 1.0, on_progress: Progress = lambda what, done: None
) -> Measurement:
    """Times every point of a session, as its callers see it, and the stages of its cascade at batch 1.

    All points take their turns, several times, because a machine has slow moments, which last for seconds and slow down
    whatever runs. So the spread, how far a turn's 95th percentile lies above its point's median, is one for all points:
    that of 95 % of all turns. A budget in milliseconds then holds at other moments, too.
    """
    images = _noise(session, batch)
    turns: dict[str, list[tuple[float, float, int]]] = {point.name: [] for point in session.points}
    for number in range(ROUNDS * len(session.points)):
        name = session.points[number % len(session.points)].name
        on_progress(f"{session.runtime} {name}", number / (ROUNDS * len(session.points)))

        def call(name: str = name) -> object:
            return session.predict(images, point=name)

        turns[name].append(time_calls(call, seconds=seconds / ROUNDS))
    medians = {name: percentile([median for median, _, _ in own], 50) for name, own in turns.items()}
    spread = percentile([p95 / medians[name] for name, own in turns.items() for _, p95, _ in own], 95)
    if spread > BUSY and seconds >= ENOUGH_S:
        logger.warning(
            "the machine is busy with something else: the 95th percentile lies %.1f times above the median, so budgets "
            "in ms will be far too careful; measure again when it is quiet, or with a larger --seconds",
            spread,
        )
    points = [
        Timing(
            point=point.name,
            macs=point.macs,
            median_ms=medians[point.name],
            p95_ms=medians[point.name] * spread,
            n=sum(n for _, _, n in turns[point.name]),
        )
        for point in session.points
    ]
    stages, asking = _time_stages(session)
    return Measurement(
        machine=machine(),
        runtime=session.runtime,
        runtime_version=runtime_version(session.runtime) or "unknown",
        precision=session.precision,
        threads=session.threads,
        batch=batch,
        points=tuple(points),
        stages=stages,
        asking=asking,
    )


def _time_stages(session: Session) -> tuple[tuple[Timing, ...], tuple[Timing, ...]]:
    """What an image takes that leaves at an exit is the sum up to it; so its label map counts with the first stage."""
    cascade = session.cascade
    if cascade is None:
        return (), ()
    stages, answers = session.time_stages(_noise(session, 1), repeats=100)
    stages[0] = [ms + session.finishing_ms for ms in stages[0]]
    parts = {
        percent: [[percentile(own, percent) for own in times] for times in (stages, answers)] for percent in (50, 95)
    }
    median_ms, p95_ms = (steps(*part) for part in parts.values())
    n = len(stages[0])
    timed = [
        Timing(point=f"stage {exit}", macs=macs, median_ms=median, p95_ms=p95, n=n)
        for exit, macs, median, p95 in zip(cascade.exits, cascade.macs, median_ms, p95_ms, strict=True)
    ]
    asked = [
        Timing(point=f"exit {exit}", macs=macs, median_ms=median, p95_ms=p95, n=n)
        for exit, macs, median, p95 in zip(cascade.exits, cascade.asking, parts[50][1], parts[95][1], strict=False)
    ]
    return tuple(timed), tuple(asked)


def _noise(session: Session, batch: int) -> Images:
    """Images to time with: which ones does not matter, the work is the same."""
    return np.random.default_rng(0).integers(0, 256, (batch, *session.preprocessing.image_shape), np.uint8)
