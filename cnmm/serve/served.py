"""What is served: a ladder, its menu on this machine, and what people may know of it. Times are in milliseconds."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cnmm._errors import UserError
from cnmm._files import checksum, read_regular
from cnmm.frontier import LADDER_FILE
from cnmm.ladder import Ladder, read_ladder
from cnmm.runtime.bench import time_session
from cnmm.runtime.latency import (
    RUNTIMES,
    Measurement,
    RuntimeName,
    check_runtime,
    measurement,
    runtime_version,
    store,
)
from cnmm.runtime.session import Session
from cnmm.serve.menu import Menu, menu_of

logger = logging.getLogger("cnmm")

MEASURE_S = 0.3
"""Spent on each point when the latency of a ladder is not known."""
EXAMPLES, MOST_EXAMPLES, MOST_EXAMPLE = "examples", 24, 2**20
"""Folder with images beside a ladder's networks, and how many, and how large, they may be."""
KINDS = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """A ladder that is ready to be served."""

    ladder: Ladder
    timed: Measurement
    menu: Menu
    checksum: str
    """Of the manifest: workers that start later serve the same ladder, or none."""
    examples: Mapping[str, bytes] = field(default_factory=dict)
    """Image files by name."""

    @property
    def model(self) -> str:
        return self.ladder.frontier.model

    @property
    def segments(self) -> bool:
        return self.ladder.task == "segmentation"

    @property
    def image_bytes(self) -> int:
        """Of one image at the ladder's size."""
        return math.prod(self.ladder.preprocessing.image_shape)

    @property
    def p95_ms(self) -> dict[str, float]:
        """By point: what budgets such as `25ms` go by."""
        return {timing.point: timing.p95_ms for timing in self.timed.points}

    def to_dict(self) -> dict[str, Any]:
        """For JSON: all that a client may want to know."""
        about, frontier = self.ladder.preprocessing, self.ladder.frontier
        height, width, channels = about.image_shape
        cascade = self.menu.cascade
        return self.menu.to_dict() | {
            "task": self.ladder.task,
            "classes": about.classes,
            "palette": about.palette,
            "input": {"height": height, "width": width, "channels": channels, "any_size": self.ladder.any_size},
            "full_macs": frontier.full_macs,
            "precision": self.ladder.precision,
            "runtime": self.timed.runtime,
            "points": [
                {
                    "name": point.name,
                    "exit": point.exit,
                    "cuts": point.cuts,
                    "macs": point.macs,
                    "quality": point.quality,
                    "metric": point.metric,
                    "ms": self.menu.points[point.name].ms,
                }
                for point in frontier.points
            ],
            "cascade": cascade and cascade.to_dict(),
            "lattice": self.ladder.lattice and self.ladder.lattice.to_dict(),
        }


def open_served(folder: str | Path, *, runtime: RuntimeName | None = None, latency: str | Path | None = None) -> Served:
    """Reads a ladder; what was not measured on this machine with one thread is measured now, and stored.

    `runtime`: the fastest unless told. `latency`: the folder whose measurements count, the ladder's own unless told.
    """
    ladder = read_ladder(folder)
    if runtime is not None:
        check_runtime(runtime)
    timed = _measured(ladder, runtime, Path(latency) if latency else ladder.folder)
    return Served(
        ladder=ladder,
        timed=timed,
        menu=menu_of(ladder.frontier, timed),
        checksum=checksum(ladder.folder / LADDER_FILE),
        examples=_examples(ladder.folder / EXAMPLES),
    )


def _measured(ladder: Ladder, runtime: RuntimeName | None, folder: Path) -> Measurement:
    try:
        found = measurement(folder, runtime=runtime, precision=ladder.precision, threads=1)
        if _fits(found, ladder):
            return found
        reason = f"{folder}: its latency is that of other points"
    except UserError as error:
        reason = str(error).partition(";")[0]
    names = [runtime] if runtime else [name for name in RUNTIMES if runtime_version(name)]
    logger.info("%s; measuring it now with one thread (%s)", reason, ", ".join(names))
    measurements = []
    for name in names:
        with Session(ladder.folder, runtime=name, threads=1) as session:
            measurements.append(time_session(session, seconds=MEASURE_S))
    for entry in measurements:
        try:
            store(folder, entry)
        except (OSError, UserError) as error:
            logger.info("this measurement is not stored: %s", error)
    return min(measurements, key=lambda entry: entry.total_ms)


def _fits(timed: Measurement, ladder: Ladder) -> bool:
    """Is it of these points and stages?"""
    stages = len(ladder.cascade.exits) if ladder.cascade else 0
    if {timing.point for timing in timed.points} != set(ladder.networks):
        return False
    if not timed.asking and not (ladder.cascade and any(ladder.cascade.asking)):  # where answers cost nothing
        return len(timed.stages) == stages
    return (len(timed.stages), len(timed.asking)) == (stages, max(0, stages - 1))


def _examples(folder: Path) -> dict[str, bytes]:
    """Small images that a ladder may ship, for the page."""
    found: dict[str, bytes] = {}
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in KINDS)
    except OSError:
        return found
    for path in paths[:MOST_EXAMPLES]:
        try:
            found[path.name] = read_regular(path, MOST_EXAMPLE)
        except (OSError, UserError) as error:
            logger.warning("an example is left out: %s", error)
    return found
