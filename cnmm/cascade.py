"""Cascades: one set of surviving edges with the exits it reaches, run stage by stage until an exit is confident.

An image leaves at the first exit whose largest class probability reaches what this exit asks for; the last exit takes
all. Which thresholds spend which average budget is measured on held-out images (`calibrate`), and stored with the
cascade.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from cnmm._errors import UserError
from cnmm.cost import CostTable
from cnmm.export.graph import cascade_graph
from cnmm.lattice import OperatingPoint


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """When images leave, and what that spends and gives."""

    confidence: tuple[float, ...]
    """The least probability of the best class with which they leave each exit but the last."""
    average_macs: float
    accuracy: float
    exits: tuple[float, ...]
    """Part of the images that leaves at each exit."""


@dataclass(frozen=True, kw_only=True)
class Cascade:
    """A cascade and its measured thresholds, cheapest first."""

    point: str
    exits: tuple[int, ...]
    macs: tuple[int, ...]
    """Of each stage alone, with its classifier."""
    thresholds: tuple[Threshold, ...]
    n: int
    split: str

    def accuracy_at(self, average_macs: float) -> float:
        """The best accuracy that fits an average budget; zero if none does."""
        return max((row.accuracy for row in self.thresholds if row.average_macs <= average_macs), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        try:
            rows = tuple(
                Threshold(**{**row, "confidence": tuple(row["confidence"]), "exits": tuple(row["exits"])})
                for row in data["thresholds"]
            )
            lists = {field: tuple(int(value) for value in data[field]) for field in ("exits", "macs")}
            found = cls(point=data["point"], thresholds=rows, n=int(data["n"]), split=data["split"], **lists)
        except KeyError as error:
            raise UserError(f"its cascade has no {error.args[0]!r}; measure it again with: cnmm frontier RUN") from None
        except (TypeError, ValueError) as error:
            raise UserError(f"not a cascade: {error!r}") from None
        num = len(found.exits)
        if not rows or not num or len(found.macs) != num:
            raise UserError("not a cascade: it needs exits, their macs and thresholds")
        if any(len(row.confidence) != num - 1 or len(row.exits) != num for row in rows):
            raise UserError(f"not a cascade: thresholds of {num} exits have {num - 1} confidences and {num} shares")
        return found


def stage_macs(config: Any, point: OperatingPoint) -> dict[int, int]:
    """Macs that each exit of a cascade adds to those of the exits before it, its classifier included."""
    table, made = CostTable.of(config), cascade_graph(config, point)
    edges: set[tuple[int, int]] = set()
    spent, before = {}, 0
    for number, exit in enumerate(made.exits, start=1):
        edges |= table.lattice.exit_edges(exit, point.edges)
        total = table.total(edges, number).macs
        spent[exit], before = total - before, total
    return spent
