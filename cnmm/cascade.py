"""Cascades: one set of surviving edges with the exits it reaches, run stage by stage until an exit is confident.

An image leaves at the first exit whose largest class probability reaches what this exit asks for; the last exit takes
all. An exit that nobody may leave is not asked: where answers cost something, as label maps do, that is saved. Which
thresholds spend which average budget is measured on held-out images and stored. Torch-free.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from cnmm import _fields
from cnmm._errors import UserError
from cnmm.budget import METRICS, Budget, parse_budget
from cnmm.config import MixtureConfig
from cnmm.cost import CostTable
from cnmm.lattice import OperatingPoint, reached_exits

NEVER = 1.0 + 1e-6
"""A confidence that no image reaches."""


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """When images leave, and what that spends and gives."""

    confidence: tuple[float, ...]
    """The least probability of the best class with which they leave each exit but the last."""
    average_macs: float
    quality: float
    exits: tuple[float, ...]
    """Part of the images that leaves at each exit."""


@dataclass(frozen=True, kw_only=True)
class Cascade:
    """A cascade and its measured thresholds, by ascending average macs."""

    point: str
    """Name of the operating point whose edges it has."""
    exits: tuple[int, ...]
    macs: tuple[int, ...]
    """What an answer at each exit costs beyond one at the exit before it."""
    asking: tuple[int, ...]
    """Macs of asking each exit but the last, for an image that goes on all the same."""
    thresholds: tuple[Threshold, ...]
    metric: str
    n: int
    split: str

    @property
    def full_macs(self) -> int:
        """Of an image that goes all the way, if every exit is asked."""
        return sum(self.macs) + sum(self.asking)

    def passed(self, confidence: Sequence[float]) -> list[float]:
        """Macs of an image that leaves at each exit, where exits ask for these confidences."""
        return passed(self.macs, self.asking, confidence)

    def with_macs(self, macs: Sequence[int], asking: Sequence[int]) -> Self:
        """The same cascade where stages and asking cost something else, and hence each row."""
        moved = dataclasses.replace(self, macs=tuple(macs), asking=tuple(asking))
        rows = []
        for row in self.thresholds:
            average = sum(part * cost for part, cost in zip(row.exits, moved.passed(row.confidence), strict=True))
            rows.append(dataclasses.replace(row, average_macs=average))
        return dataclasses.replace(moved, thresholds=tuple(sorted(rows, key=lambda row: row.average_macs)))

    def quality_at(self, average_macs: float) -> float:
        """The best quality that fits an average budget; zero if none does."""
        found = self.row_within(average_macs)
        return found.quality if found else 0.0

    def row_within(self, average_macs: float) -> Threshold | None:
        """The best row within an average budget, of equal ones the dearest; None if none is that cheap."""
        fitting = [row for row in self.thresholds if row.average_macs <= average_macs]
        return max(reversed(fitting), key=lambda row: row.quality, default=None)

    def confidence(self, average_macs: str | float | Budget, full_macs: int) -> tuple[float, ...]:
        """What each early exit asks for if at most so many macs per image are spent on average.

        `average_macs` is a budget in macs, or in percent of the full network's `full_macs`.
        """
        return self.row(average_budget(average_macs, full_macs)).confidence

    def row(self, macs: float) -> Threshold:
        """The best row within an average budget; an error if none is that cheap."""
        found = self.row_within(macs)
        if found is None:
            least = f"{math.ceil(self.thresholds[0].average_macs):,}"
            raise UserError(f"average_macs={macs:,.0f}: must be at least {least}, the least that early exit can spend")
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `from_dict` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "cascade.") -> Self:
        """Checks every field; `where` is the path of `data` in its file."""
        exits = tuple(_fields.get(data, "exits", _fields.list_of(_fields.POSITIVE, least=1), where))
        if list(exits) != sorted(set(exits)):
            raise UserError(f"{where}exits={_fields.shown(list(exits))}: must ascend")
        rows = _fields.get(data, "thresholds", _fields.list_of(_fields.OBJECT, least=1), where)
        table = tuple(_read_threshold(row, len(exits), f"{where}thresholds[{n}].") for n, row in enumerate(rows))
        averages = [row.average_macs for row in table]
        if averages != sorted(averages):
            raise UserError(f"{where}thresholds must ascend by average_macs")
        return cls(
            point=_fields.get(data, "point", _fields.TEXT, where),
            exits=exits,
            macs=tuple(_fields.get(data, "macs", _fields.list_of(_fields.COUNT, len(exits)), where)),
            asking=_read_asking(data, len(exits) - 1, where),
            thresholds=table,
            metric=_fields.get(data, "metric", _fields.one_of(*METRICS.values()), where),
            n=_fields.get(data, "n", _fields.POSITIVE, where),
            split=_fields.get(data, "split", _fields.TEXT, where),
        )


def average_budget(average_macs: str | float | Budget, full_macs: int) -> float:
    """An average budget in macs; shares are of the full network's."""
    wanted = parse_budget(average_macs)
    if wanted.kind not in ("macs", "percent"):
        raise UserError(f"average_macs={wanted.text!r}: must be macs such as 30M, or a share such as 40%")
    return wanted.value if wanted.kind == "macs" else wanted.value * full_macs / 100


def passed(costs: Sequence[float], asking: Sequence[float], confidence: Sequence[float]) -> list[float]:
    """What an image costs that leaves at each exit: its answer there, and having asked exits before."""
    asked = [cost * is_asked(needed) for cost, needed in zip(asking, confidence, strict=True)]
    return [a + b for a, b in zip(itertools.accumulate(costs), itertools.accumulate((0, *asked)), strict=True)]


def is_asked(confidence: float) -> bool:
    """Can an image leave an exit that asks for this confidence?"""
    return confidence <= 1.0


def _read_asking(data: Mapping[str, Any], num: int, where: str) -> tuple[int, ...]:
    """Nothing in files of earlier versions, whose stages answer as they run."""
    if "asking" not in data:
        return (0,) * num
    return tuple(_fields.get(data, "asking", _fields.list_of(_fields.COUNT, num), where))


def _read_threshold(row: Mapping[str, Any], num_exits: int, where: str) -> Threshold:
    def numbers(name: str, num: int) -> tuple[float, ...]:
        return tuple(_fields.get(row, name, _fields.list_of(_fields.NUMBER, num), where))

    return Threshold(
        confidence=numbers("confidence", num_exits - 1),
        average_macs=float(_fields.get(row, "average_macs", _fields.NUMBER, where)),
        quality=float(_fields.get(row, "quality", _fields.SHARE, where)),
        exits=numbers("exits", num_exits),
    )


def stage_macs(config: MixtureConfig, point: OperatingPoint) -> dict[int, int]:
    """What an answer at each exit of a cascade costs beyond one at the exit before it.

    Classifiers of pixels run only where an exit is asked; those of images always, and so count once more at each exit.
    """
    table = CostTable.of(config)
    edges: set[tuple[int, int]] = set()
    spent, before = {}, 0
    for number, exit in enumerate(reached_exits(config, table.lattice, point.exit, point.edges), start=1):
        edges |= table.lattice.exit_edges(exit, point.edges)
        total = table.total(edges, 1 if config.task == "segmentation" else number).macs
        spent[exit], before = total - before, total
    return spent


def asking_macs(config: MixtureConfig) -> int:
    """Macs of asking an exit, for an image that goes on: those of a classifier of pixels."""
    if config.task != "segmentation":
        return 0
    return CostTable.of(config).classifier.macs
