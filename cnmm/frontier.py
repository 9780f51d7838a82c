"""The frontier: measured operating points and their upper envelope, from which every budget is served. Torch-free.

`cnmm.measure` makes one; `frontier.json` of a run folder and `ladder.json` of a ladder folder hold one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from cnmm._errors import UserError
from cnmm._files import FORMAT_VERSION, write_json
from cnmm.budget import Budget, parse_budget
from cnmm.cascade import Cascade

FRONTIER_FILE = "frontier.json"
LADDER_FILE = "ladder.json"
RE_ESTIMATED, RAW = "re-estimated", "raw"


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """One measured operating point."""

    point: str
    """Its name, such as e5c37."""
    exit: int
    cuts: int
    macs: int
    params: int
    accuracy: float
    """Share of the n images that were right, with the `statistics` named below."""
    low: float
    high: float
    """95 % interval of the accuracy (Wilson's)."""
    n: int
    split: str
    """The images it was measured on, such as "validation"."""
    statistics: str
    """Batch statistics: "re-estimated" at this point, or "raw", those of the full mixture."""
    raw_accuracy: float | None = None
    """The accuracy with raw statistics, for comparison."""
    test_accuracy: float | None = None
    test_n: int | None = None
    on_envelope: bool = False
    """Is it better than every cheaper point? The frontier that holds the point says so."""


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Measured operating points of one mixture, cheapest first."""

    model: str
    """Name of the mixture."""
    full_macs: int
    """Macs of its last exit with nothing cut: what `40%` refers to."""
    points: tuple[FrontierPoint, ...]
    cascade: Cascade | None = None
    """The measured cascade, for early exits."""
    buffers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False, compare=False)
    """Re-estimated batch statistics of the envelope points (and of the cascade): tensors by point and by name in the
    mixture's state. `cnmm.measure` fills it in; a run folder keeps it in a file of its own."""

    def __post_init__(self) -> None:
        if not self.points:
            raise UserError("a frontier needs at least one measured point")
        names = [point.point for point in self.points]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"point {name!r} occurs twice; every point may occur once")
        best = {point.point for point in _envelope(self.points)}
        marked = (dataclasses.replace(point, on_envelope=point.point in best) for point in self.points)
        object.__setattr__(self, "points", tuple(sorted(marked, key=_by_macs)))

    def __getitem__(self, name: str) -> FrontierPoint:
        """A measured point by name."""
        for point in self.points:
            if point.point == name:
                return point
        raise UserError(f"point {name!r} was not measured; measured are {', '.join(p.point for p in self.points)}")

    def envelope(self) -> tuple[FrontierPoint, ...]:
        """The points that are better than every cheaper one, cheapest first."""
        return tuple(point for point in self.points if point.on_envelope)

    def choose(self, budget: str | int | float | Budget, latency: Mapping[str, float] | None = None) -> FrontierPoint:
        """The best measured point within a budget, never above it; for `acc:0.92` the cheapest at least that good.

        `latency`: p95 milliseconds on this machine by point, which a budget such as `25ms` needs.
        """
        wanted = parse_budget(budget)
        if wanted.kind == "quality":
            return self._good_enough(wanted)
        if wanted.kind == "ms":
            return self._fast_enough(wanted, latency or {})
        limit = wanted.value if wanted.kind == "macs" else wanted.value * self.full_macs / 100
        fitting = [point for point in self.points if point.macs <= limit]
        if not fitting:
            cheapest = self.points[0]
            share = f" ({100 * cheapest.macs / self.full_macs:.1f}%)" if wanted.kind == "percent" else ""
            raise UserError(
                f"budget {wanted.text!r}: no point is that cheap; "
                f"the cheapest is {cheapest.point} with {cheapest.macs:,} macs{share}"
            )
        return max(fitting, key=lambda point: (point.accuracy, -point.macs))

    def _good_enough(self, wanted: Budget) -> FrontierPoint:
        for point in self.points:
            if point.accuracy >= wanted.value:
                return point
        best = self.envelope()[-1]
        raise UserError(
            f"budget {wanted.text!r}: no point is that good; the best is {best.point} with {best.accuracy:.4f}"
        )

    def _fast_enough(self, wanted: Budget, latency: Mapping[str, float]) -> FrontierPoint:
        timed = [point for point in self.points if point.point in latency]
        if not timed:
            raise UserError(
                f"budget {wanted.text!r}: no latency was measured on this machine; measure it with: cnmm bench"
            )
        fitting = [point for point in timed if latency[point.point] <= wanted.value]
        if not fitting:
            fastest = min(timed, key=lambda point: latency[point.point])
            raise UserError(
                f"budget {wanted.text!r}: no point is that fast; "
                f"the fastest is {fastest.point} with {latency[fastest.point]:.3g} ms"
            )
        return max(fitting, key=lambda point: (point.accuracy, -latency[point.point]))

    def ladder(self, num: int) -> tuple[FrontierPoint, ...]:
        """`num` points of the envelope, spread evenly over macs from the cheapest to the best; one alone is the best.

        If the envelope has fewer points, all of them.
        """
        if num < 1:
            raise UserError(f"a ladder of {num} points: at least 1 is needed")
        envelope = self.envelope()
        if num >= len(envelope):
            return envelope
        if num == 1:
            return envelope[-1:]
        low, high = envelope[0].macs, envelope[-1].macs
        chosen = [0]
        for step in range(1, num):
            target = low + (high - low) * step / (num - 1)
            left = range(chosen[-1] + 1, len(envelope) - (num - 1 - step))
            chosen.append(min(left, key=lambda index: abs(envelope[index].macs - target)))
        return tuple(envelope[index] for index in chosen)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the buffers are left out."""
        return {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "full_macs": self.full_macs,
            "points": [dataclasses.asdict(point) for point in self.points],
            "cascade": self.cascade.to_dict() if self.cascade else None,
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Checks every field; fields of later versions are ignored."""
        if not isinstance(data, Mapping):
            raise UserError("an object with 'model', 'full_macs' and 'points' is needed")
        if data.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"format_version={data.get('format_version')!r}, this version of cnmm reads {FORMAT_VERSION}; "
                "upgrade with: pip install -U cnmm"
            )
        points = data.get("points")
        if not isinstance(points, Sequence) or isinstance(points, str) or not points:
            raise UserError("'points' must be a list of one or more measured points")
        cascade = data.get("cascade") if data.get("kind") != "ladder" else None  # a ladder's has files: see cnmm.ladder
        if not isinstance(cascade, Mapping | None):
            raise UserError("'cascade' must be an object or null")
        return cls(
            model=_checked(data, "model", ""),
            full_macs=_checked(data, "full_macs", ""),
            points=tuple(_read_point(entry, number) for number, entry in enumerate(points)),
            cascade=None if cascade is None else Cascade.from_dict(cascade),
        )

    def save(self, path: str | Path) -> None:
        """Writes a JSON file in one step."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a JSON file: frontier.json of a run folder, or ladder.json."""
        try:
            return cls.from_dict(json.loads(Path(path).read_text("utf-8")))
        except FileNotFoundError:
            raise UserError(f"{path}: there is no such file; `cnmm frontier RUN --data ...` makes one") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: no frontier that can be read: {error}") from None


def find_frontier(folder: str | Path) -> Frontier:
    """The frontier of a run folder or of a ladder folder."""
    for name in (LADDER_FILE, FRONTIER_FILE):
        if (Path(folder) / name).is_file():
            return Frontier.load(Path(folder) / name)
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: there is no such folder; a run folder or a ladder folder is needed")
    raise UserError(f"{folder}: its frontier is not measured yet; do so with: cnmm frontier {folder} --data KIND:DIR")


def _by_macs(point: FrontierPoint) -> tuple[int, float, str]:
    return point.macs, -point.accuracy, point.point


def _envelope(points: Iterable[FrontierPoint]) -> list[FrontierPoint]:
    envelope: list[FrontierPoint] = []
    for point in sorted(points, key=_by_macs):
        if not envelope or point.accuracy > envelope[-1].accuracy:
            envelope.append(point)
    return envelope


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _or_none(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


_COUNT = (_is_count, "a whole number of at least 0")
_POSITIVE = (lambda value: _is_count(value, 1), "a whole number of at least 1")
_SHARE = (_is_share, "a number between 0 and 1")
_TEXT = (_is_text, "a text on one line")
_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "model": _TEXT,
    "full_macs": _POSITIVE,
    "point": _TEXT,
    "exit": _POSITIVE,
    "cuts": _COUNT,
    "macs": _COUNT,
    "params": _COUNT,
    "accuracy": _SHARE,
    "low": _SHARE,
    "high": _SHARE,
    "n": _POSITIVE,
    "split": _TEXT,
    "statistics": (lambda value: value in (RE_ESTIMATED, RAW), f"{RE_ESTIMATED!r} or {RAW!r}"),
    "raw_accuracy": (_or_none(_is_share), "a number between 0 and 1, or null"),
    "test_accuracy": (_or_none(_is_share), "a number between 0 and 1, or null"),
    "test_n": (_or_none(lambda value: _is_count(value, 1)), "a whole number of at least 1, or null"),
    "on_envelope": (lambda value: isinstance(value, bool), "true or false"),
}
"""What every field of the file must be: a check, and its words."""


def _read_point(entry: object, number: int) -> FrontierPoint:
    if not isinstance(entry, Mapping):
        raise UserError(f"points[{number}] must be an object")
    fields = {
        this.name: _checked(entry, this.name, f"points[{number}].")
        for this in dataclasses.fields(FrontierPoint)
        if this.name in entry or this.default is dataclasses.MISSING
    }
    return FrontierPoint(**fields)


def _checked(data: Mapping[str, Any], name: str, where: str) -> Any:
    check, words = _CHECKS[name]
    value = data.get(name)
    if not check(value):
        found = repr(value) if name in data else "missing"
        raise UserError(f"{where}{name} is {found[:80]}; {words} is needed")
    return value
