"""The frontier: measured operating points and their upper envelope, from which every budget is served. Torch-free.

`cnmm.measure` makes one; `frontier.json` of a run folder and `ladder.json` of a ladder folder hold one.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_args

from cnmm import _fields
from cnmm._errors import UserError
from cnmm._files import FORMAT_VERSION, check_beside, check_version, checksum, inside, read_json, write_json
from cnmm.budget import METRICS, Budget, parse_budget, prefix_of
from cnmm.cascade import Cascade
from cnmm.lattice import Rule

FRONTIER_FILE = "frontier.json"
LADDER_FILE = "ladder.json"
RE_ESTIMATED, RAW = "re-estimated", "raw"


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """One measured operating point."""

    name: str
    """Such as e5c37: exit 5, 37 cuts."""
    rule: Rule
    """The rule of its cutting order."""
    cuts: int
    exit: int
    macs: int
    params: int
    """What budgets go by. Of a run: the layers of the mixture that the point runs, as the paper counts them. Of a
    ladder: the network in its file, where much is folded away. The other count stands below."""
    quality: float
    """The metric's value on n images, between 0 and 1, with the `statistics` named below."""
    metric: str
    """accuracy, mean_class_accuracy, miou or pixel_accuracy."""
    low: float
    high: float
    """95 % interval of the quality."""
    n: int
    split: str
    """The images it was measured on, such as "validation"."""
    statistics: str
    """Batch statistics: "re-estimated" at this point, or "raw", those of the full mixture."""
    raw_quality: float | None = None
    """The quality with raw statistics, for comparison."""
    test_quality: float | None = None
    test_n: int | None = None
    per_class: tuple[float | None, ...] = ()
    """Of pixels: the IoU of every class; None where a class occurs neither in labels nor in answers."""
    written_macs: int | None = None
    written_params: int | None = None
    """In a run's frontier: of the network that `slim` and `export` write."""
    mixture_macs: int | None = None
    mixture_params: int | None = None
    """In a ladder: of the mixture at the same point."""
    float32_quality: float | None = None
    """Of an int8 network: the quality before it was quantised, on the same images."""
    on_envelope: bool = False
    """Is it better than every cheaper point? The frontier that holds the point says so."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_class", tuple(self.per_class))  # JSON has no tuples


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Measured operating points of one mixture, cheapest first."""

    model: str
    """Name of the mixture."""
    full_macs: int
    """Macs of its last exit with nothing cut, counted as those of the points: what `40%` refers to."""
    points: tuple[FrontierPoint, ...]
    cascade: Cascade | None = None
    """The measured cascade, for early exits."""
    buffers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False, compare=False)
    """Re-estimated batch statistics of the envelope points (and of the cascade): tensors by point and by name in the
    mixture's state. `cnmm.measure` fills it in; a run folder keeps it in a file of its own."""
    checksums: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Of the files of the run folder that it belongs to, by name: weights, orders and statistics. Others would make its
    figures wrong."""

    def __post_init__(self) -> None:
        if not self.points:
            raise UserError("a frontier needs at least one measured point")
        names = Counter(point.name for point in self.points)
        for name, times in names.items():
            if times > 1:
                raise UserError(f"point {name!r} occurs twice; every point may occur once")
        metrics = {point.metric for point in self.points}
        if len(metrics) > 1:
            raise UserError(f"points measured by {' and '.join(sorted(metrics))}; a frontier has one metric")
        best = {point.name for point in _envelope(self.points)}
        marked = (dataclasses.replace(point, on_envelope=point.name in best) for point in self.points)
        object.__setattr__(self, "points", tuple(sorted(marked, key=_by_macs)))

    @property
    def metric(self) -> str:
        """What the quality of its points is."""
        return self.points[0].metric

    def __getitem__(self, name: str) -> FrontierPoint:
        """A measured point by name."""
        for point in self.points:
            if point.name == name:
                return point
        raise UserError(f"point {name!r} was not measured; must be one of {', '.join(p.name for p in self.points)}")

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
                f"the cheapest is {cheapest.name} with {cheapest.macs:,} macs{share}"
            )
        return max(fitting, key=lambda point: (point.quality, -point.macs))

    def _good_enough(self, wanted: Budget) -> FrontierPoint:
        if wanted.metric != self.metric:
            fix = f"{prefix_of(self.metric)}:{wanted.value:g}"
            raise UserError(f"budget {wanted.text!r}: these points were measured by {self.metric}; try {fix}")
        for point in self.points:
            if point.quality >= wanted.value:
                return point
        best = self.envelope()[-1]
        raise UserError(
            f"budget {wanted.text!r}: no point is that good; the best is {best.name} with {best.quality:.4f}"
        )

    def _fast_enough(self, wanted: Budget, latency: Mapping[str, float]) -> FrontierPoint:
        timed = [point for point in self.points if point.name in latency]
        if not timed:
            raise UserError(
                f"budget {wanted.text!r}: no latency was measured on this machine; measure it with: cnmm bench"
            )
        fitting = [point for point in timed if latency[point.name] <= wanted.value]
        if not fitting:
            fastest = min(timed, key=lambda point: latency[point.name])
            raise UserError(
                f"budget {wanted.text!r}: no point is that fast; "
                f"the fastest is {fastest.name} with {latency[fastest.name]:.3g} ms"
            )
        return max(fitting, key=lambda point: (point.quality, -latency[point.name]))

    def ladder(self, num: int) -> tuple[FrontierPoint, ...]:
        """`num` points of the envelope, spread evenly over macs from the cheapest to the best; one alone is the best.

        If the envelope has fewer points, all of them.
        """
        num = _fields.checked(num, "points", _fields.POSITIVE)
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
            **({"checksums": dict(self.checksums)} if self.checksums else {}),
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Checks every field; fields of later versions are ignored."""
        if not isinstance(data, Mapping):
            raise UserError("must be an object with 'model', 'full_macs' and 'points'")
        check_version(data)
        points = _fields.get(data, "points", _fields.list_of(_fields.OBJECT, least=1))
        cascade = _fields.get(data, "cascade", _fields.or_null(_fields.OBJECT))
        return cls(
            model=_fields.get(data, "model", _fields.TEXT),
            full_macs=_fields.get(data, "full_macs", _fields.POSITIVE),
            points=tuple(
                _fields.read(FrontierPoint, entry, _CHECKS, f"points[{number}].") for number, entry in enumerate(points)
            ),
            cascade=None if cascade is None else Cascade.from_dict(cascade),
            checksums=_fields.get(data, "checksums", _CHECKSUMS) or {},
        )

    def to_csv(self) -> str:
        """One line per measured point, cheapest first."""
        text = io.StringIO()
        names = [each.name for each in dataclasses.fields(FrontierPoint) if each.name != "per_class"]
        writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(point) for point in self.points)
        return text.getvalue()

    def save(self, path: str | Path) -> None:
        """Writes a JSON file in one step."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a JSON file: frontier.json of a run folder, or ladder.json."""
        try:
            data = read_json(Path(path))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{path}: no such file; make it with: cnmm frontier RUN") from None
        with inside(path):
            return cls.from_dict(data)


def load_frontier(folder: str | Path) -> Frontier:
    """The frontier of a run folder, if the files that it was measured with are still there."""
    path = Path(folder) / FRONTIER_FILE
    if not path.is_file():
        raise UserError(f"{folder}: its frontier has not been measured; run: cnmm frontier {folder}")
    for _ in range(2):  # another process may replace it while it is read
        frontier = Frontier.load(path)
        other = [name for name, value in frontier.checksums.items() if _checksum(path.with_name(name)) != value]
        if not other:
            return frontier
    raise UserError(
        f"{path}: it was measured with another {other[0]} than the one beside it; measure again: cnmm frontier {folder}"
    )


def _checksum(path: Path) -> str | None:
    return checksum(path) if path.is_file() else None


def find_frontier(folder: str | Path) -> Frontier:
    """The frontier of a run folder or of a ladder folder."""
    path = Path(folder) / LADDER_FILE
    if path.is_file():
        with inside(path):
            check_beside(path)
        return Frontier.load(path)
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such folder; give a run folder or a ladder folder")
    return load_frontier(folder)


def metric_words(metric: str) -> str:
    """A metric as people say it."""
    return "mIoU" if metric == "miou" else metric.replace("_", " ")


def _by_macs(point: FrontierPoint) -> tuple[int, float, str]:
    return point.macs, -point.quality, point.name


def _envelope(points: Iterable[FrontierPoint]) -> list[FrontierPoint]:
    envelope: list[FrontierPoint] = []
    for point in sorted(points, key=_by_macs):
        if not envelope or point.quality > envelope[-1].quality:
            envelope.append(point)
    return envelope


_CHECKS: dict[str, _fields.Check] = {
    "name": _fields.TEXT,
    "rule": _fields.one_of(*get_args(Rule)),
    "cuts": _fields.COUNT,
    "exit": _fields.POSITIVE,
    "macs": _fields.COUNT,
    "params": _fields.COUNT,
    "quality": _fields.SHARE,
    "metric": _fields.one_of(*METRICS.values()),
    "low": _fields.SHARE,
    "high": _fields.SHARE,
    "n": _fields.POSITIVE,
    "split": _fields.TEXT,
    "statistics": _fields.one_of(RE_ESTIMATED, RAW),
    "raw_quality": _fields.or_null(_fields.SHARE),
    "test_quality": _fields.or_null(_fields.SHARE),
    "test_n": _fields.or_null(_fields.POSITIVE),
    "per_class": _fields.list_of(_fields.or_null(_fields.SHARE)),
    "written_macs": _fields.or_null(_fields.COUNT),
    "written_params": _fields.or_null(_fields.COUNT),
    "mixture_macs": _fields.or_null(_fields.COUNT),
    "mixture_params": _fields.or_null(_fields.COUNT),
    "float32_quality": _fields.or_null(_fields.SHARE),
    "on_envelope": _fields.TRUTH,
}


def _are_checksums(value: object) -> bool:
    """By plain names of files: the folder's own, nothing else."""
    return value is None or (
        isinstance(value, Mapping)
        and all(isinstance(name, str) and re.fullmatch(r"\w[\w.-]*", name, re.ASCII) for name in value)
        and all(isinstance(digest, str) for digest in value.values())
    )


_CHECKSUMS: _fields.Check = (_are_checksums, "an object of checksums by plain file name")
