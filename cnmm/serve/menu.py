"""The menu of a ladder: every way to answer, with its expected quality and time. Times are milliseconds of one core.

Rows are operating points, and the cascade with each of its thresholds. Those on the upper hull of quality over time are
what a policy chooses from: a mixture of two of them is the best that any average time can buy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cnmm import _fields
from cnmm._errors import UserError
from cnmm.cascade import Cascade, Threshold, passed
from cnmm.frontier import Frontier
from cnmm.ladder import read_ladder
from cnmm.runtime.latency import Measurement, RuntimeName, measurement

Floats = npt.NDArray[np.float64]
_MS = _fields.number(above=0, most=1e9)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to answer an image."""

    point: str
    """The operating point, or that of the cascade."""
    quality: float
    ms: float
    """Expected, per image, on one core."""
    macs: float
    """Average per image."""
    exit: int
    """The one that answers; of a cascade, the last."""
    confidence: tuple[float, ...] = ()
    """Of a cascade: what each exit but the last asks for. Empty for a plain operating point."""
    leaves: tuple[float, ...] = ()
    """Of a cascade: the share of the images that leaves at each exit."""


@dataclass(frozen=True, kw_only=True)
class Menu:
    """Rows of a ladder: all operating points, and the hull from the cheapest row to the best."""

    model: str
    metric: str
    points: Mapping[str, Row]
    """Plain operating points by name, cheapest first: what a request can ask for."""
    cascade: Cascade | None
    stage_ms: tuple[float, ...]
    """Per image: how much longer an answer at each exit of the cascade takes than one at the exit before it."""
    asking_ms: tuple[float, ...]
    """Of asking each exit but the last, for an image that goes on."""
    full_ms: float
    """Of the full mixture, by its macs and the time of the largest point: a load of 1 is what it could hold."""
    rows: tuple[Row, ...]
    """The hull, cheapest first."""
    ms: Floats = field(init=False, repr=False, compare=False)
    quality: Floats = field(init=False, repr=False, compare=False)
    slope: Floats = field(init=False, repr=False, compare=False)
    """Quality per millisecond between a row and the next one; zero after the best."""

    def __post_init__(self) -> None:
        ms = np.array([row.ms for row in self.rows])
        quality = np.array([row.quality for row in self.rows])
        object.__setattr__(self, "ms", ms)
        object.__setattr__(self, "quality", quality)
        object.__setattr__(self, "slope", np.append(np.diff(quality) / np.diff(ms), 0.0))

    @property
    def cheapest(self) -> Row:
        return self.rows[0]

    @property
    def best(self) -> Row:
        return self.rows[-1]

    def within(self, ms: float) -> int:
        """The number of the best row that takes no longer on average; the cheapest if none does."""
        return max(0, int(np.searchsorted(self.ms, ms, side="right")) - 1)

    def good_enough(self, loss: float) -> Row:
        """The cheapest row whose quality is at most `loss` below the best."""
        return self.rows[int(np.searchsorted(self.quality, self.best.quality - loss))]

    def passed_ms(self, confidence: Sequence[float]) -> Floats:
        """Time of an image that leaves at each exit of the cascade, where exits ask for these confidences."""
        return np.array(passed(self.stage_ms, self.asking_ms, confidence))

    @property
    def going_on_ms(self) -> tuple[float, ...]:
        """Of each stage with its answer, for an image that comes from the stage before it."""
        return tuple(a + b for a, b in zip(self.stage_ms, (0.0, *self.asking_ms), strict=True)) if self.stage_ms else ()

    def slower(self, factor: float) -> Menu:
        """The same ladder on a machine where everything takes so many times as long."""
        rows = [replace(row, ms=row.ms * factor) for row in self.rows]
        points = {name: replace(row, ms=row.ms * factor) for name, row in self.points.items()}
        stage_ms, asking_ms = (tuple(ms * factor for ms in times) for times in (self.stage_ms, self.asking_ms))
        full_ms = self.full_ms * factor
        return replace(self, rows=tuple(rows), points=points, stage_ms=stage_ms, asking_ms=asking_ms, full_ms=full_ms)

    def pinned(self, confidence: float) -> Row:
        """The cascade with the same confidence at every exit; its time is that of an image that goes all the way."""
        if self.cascade is None:
            raise UserError("min_confidence: this ladder has no cascade; give a budget or an operating point")
        return Row(
            point=self.cascade.point,
            quality=self.cascade.thresholds[-1].quality,
            ms=sum(self.stage_ms) + sum(self.asking_ms),
            macs=self.cascade.full_macs,
            exit=self.cascade.exits[-1],
            confidence=(confidence,) * (len(self.cascade.exits) - 1),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what people and load tests want to know."""
        return {
            "model": self.model,
            "metric": self.metric,
            "points": [_brief(row) for row in self.points.values()],
            "rows": [{**_brief(row), "confidence": row.confidence, "leaves": row.leaves} for row in self.rows],
            "stage_ms": self.stage_ms,
            "asking_ms": self.asking_ms,
            "full_ms": self.full_ms,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` made, perhaps on another machine; without the cascade's thresholds, so `pinned` needs more."""
        objects = _fields.list_of(_fields.OBJECT, least=1, most=10_000)
        points = [_read_row(row, f"points[{n}].") for n, row in enumerate(_fields.get(data, "points", objects))]
        rows = [_read_row(row, f"rows[{n}].") for n, row in enumerate(_fields.get(data, "rows", objects))]
        stage_ms = _fields.get(data, "stage_ms", _fields.list_of(_MS, most=1000))
        asking_ms = _fields.get(data, "asking_ms", _fields.list_of(_fields.number(0, 1e9), max(0, len(stage_ms) - 1)))
        if hull(rows) != tuple(rows):
            raise UserError("rows: must be a hull, from the cheapest to the best")
        if any(len(row.leaves) not in (0, len(stage_ms)) for row in rows):
            raise UserError(f"rows: a cascade of {len(stage_ms)} stages must say how many images leave at each")
        return cls(
            model=_fields.get(data, "model", _fields.TEXT),
            metric=_fields.get(data, "metric", _fields.TEXT),
            points={row.point: row for row in points},
            cascade=None,
            stage_ms=tuple(stage_ms),
            asking_ms=tuple(asking_ms),
            full_ms=_fields.get(data, "full_ms", _MS),
            rows=tuple(rows),
        )


def make_menu(
    frontier: Frontier,
    point_ms: Mapping[str, float],
    stage_ms: Sequence[float] = (),
    asking_ms: Sequence[float] | None = None,
) -> Menu:
    """The menu of a ladder's points and cascade, given how long each point and each stage takes for one image.

    `asking_ms`: nothing unless told.
    """
    asking_ms = (0.0,) * max(0, len(stage_ms) - 1) if asking_ms is None else asking_ms
    points = {
        point.name: Row(
            point=point.name, quality=point.quality, ms=point_ms[point.name], macs=point.macs, exit=point.exit
        )
        for point in frontier.points
    }
    cascade = frontier.cascade if stage_ms else None
    rows = list(points.values())
    largest = max(rows, key=lambda row: row.macs)
    if cascade:
        for threshold in cascade.thresholds:
            rows.append(_threshold_row(cascade, threshold, passed(stage_ms, asking_ms, threshold.confidence)))
    return Menu(
        model=frontier.model,
        metric=frontier.metric,
        points=points,
        cascade=cascade,
        stage_ms=tuple(stage_ms),
        asking_ms=tuple(asking_ms),
        full_ms=largest.ms * frontier.full_macs / max(largest.macs, 1),
        rows=hull(rows),
    )


def read_menu(folder: str | Path, *, runtime: RuntimeName | None = None) -> Menu:
    """The menu of a ladder folder, as `cnmm bench LADDER --threads 1` measured it on this machine."""
    ladder = read_ladder(folder)
    timed = measurement(ladder.folder, runtime=runtime, precision=ladder.precision, threads=1)
    return menu_of(ladder.frontier, timed)


def menu_of(frontier: Frontier, timed: Measurement) -> Menu:
    """The menu by the medians of a measurement."""
    point_ms = {timing.point: timing.median_ms / timed.batch for timing in timed.points}
    stage_ms, asking_ms = ([timing.median_ms for timing in part] for part in (timed.stages, timed.asking))
    return make_menu(frontier, point_ms, stage_ms, asking_ms or None)


def hull(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows on the upper concave hull of quality over time, from the cheapest to the best."""
    chosen: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.ms, -row.quality)):
        if chosen and row.quality <= chosen[-1].quality:
            continue
        while len(chosen) > 1 and _gain(chosen[-2], chosen[-1]) <= _gain(chosen[-1], row):
            chosen.pop()
        chosen.append(row)
    return tuple(chosen)


def _gain(low: Row, high: Row) -> float:
    """Quality per millisecond."""
    return (high.quality - low.quality) / max(high.ms - low.ms, 1e-12)


def _threshold_row(cascade: Cascade, threshold: Threshold, passed_ms: Sequence[float]) -> Row:
    return Row(
        point=cascade.point,
        quality=threshold.quality,
        ms=float(np.dot(threshold.exits, passed_ms)),
        macs=threshold.average_macs,
        exit=cascade.exits[-1],
        confidence=threshold.confidence,
        leaves=threshold.exits,
    )


def _brief(row: Row) -> dict[str, Any]:
    return {"point": row.point, "quality": row.quality, "ms": row.ms, "macs": row.macs, "exit": row.exit}


_ROW: dict[str, _fields.Check] = {
    "point": _fields.TEXT,
    "quality": _fields.SHARE,
    "ms": _MS,
    "macs": _fields.number(0),
    "exit": _fields.whole(1, 1000),
    "confidence": _fields.list_of(_fields.NUMBER, most=1000),
    "leaves": _fields.list_of(_fields.SHARE, most=1000),
}


def _read_row(data: Mapping[str, Any], where: str) -> Row:
    fields = _fields.get_all({"confidence": (), "leaves": (), **data}, _ROW, where)
    return Row(**fields | {name: tuple(fields[name]) for name in ("confidence", "leaves")})
