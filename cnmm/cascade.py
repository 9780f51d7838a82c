"""Cascades: one set of surviving edges with the exits it reaches, run stage by stage until an exit is confident.

An image leaves at the first exit whose largest class probability reaches the threshold; the last exit takes all. Which
threshold spends which average budget is measured on held-out images, and stored with the cascade.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from cnmm.cost import CostTable
from cnmm.graph import cascade_graph
from cnmm.lattice import OperatingPoint
from cnmm.prune import cutting_order

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from cnmm.mixture import Mixture

NUM_THRESHOLDS = 101
SHARES = (1.0, 0.85, 0.7, 0.55, 0.4)
"""Macs of the cascades that are tried, as parts of the full mixture's."""
BUDGETS = tuple(k / 20 for k in range(3, 19))
"""Average macs at which cascades are compared, as parts of the full mixture's: 15 to 90 %."""


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """What one threshold spends and gives."""

    threshold: float
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
            rows = tuple(Threshold(**{**row, "exits": tuple(row["exits"])}) for row in data["thresholds"])
            lists = {field: tuple(int(value) for value in data[field]) for field in ("exits", "macs")}
            found = cls(point=data["point"], thresholds=rows, n=int(data["n"]), split=data["split"], **lists)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a cascade: {error!r}") from None
        if not rows or len(found.exits) != len(found.macs) or not found.exits:
            raise ValueError("not a cascade: it needs exits, their macs and thresholds")
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


def calibrate(
    confidence_NE: npt.NDArray[np.floating], right_NE: npt.NDArray[np.bool_], macs: Sequence[int]
) -> tuple[Threshold, ...]:
    """Thresholds from "leave at once" to "never early", with what they spend on these images, cheapest first."""
    import numpy as np

    num, exits = confidence_NE.shape
    passed = np.cumsum(macs)
    early = np.maximum.accumulate(confidence_NE[:, :-1], 1) if exits > 1 else confidence_NE[:, :0]
    levels = np.quantile(early, np.linspace(0, 1, NUM_THRESHOLDS)) if exits > 1 else np.array([0.0])
    rows = []
    for threshold in np.unique(np.concatenate([[0.0], levels, [1.0 + 1e-6]])):
        leaves = np.concatenate([confidence_NE[:, :-1] >= threshold, np.ones((num, 1), bool)], 1).argmax(1)
        rows.append(
            Threshold(
                threshold=float(threshold),
                average_macs=float(passed[leaves].mean()),
                accuracy=float(right_NE[np.arange(num), leaves].mean()),
                exits=tuple(np.bincount(leaves, minlength=exits) / num),
            )
        )
    return tuple(rows)


def measure_cascade(
    model: Mixture,
    validation: Iterable[tuple[Tensor, Tensor]],
    settle: Callable[[OperatingPoint], Mixture],
    *,
    split: str = "validation",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Cascade, Mixture]:
    """The best of several cascades of a mixture, and the mixture with its statistics.

    They are cut by the flow averaged over the exits, to several sizes; the best has the highest mean accuracy over
    average budgets from 15 to 90 % of the full macs. `settle` gives the mixture with a point's own statistics.
    """
    batches = list(validation)
    table = CostTable.of(model.config)
    full = table.exit().macs
    order = cutting_order(model, rule="mean_flow")
    candidates = []
    for share in SHARES:
        point = next((point for point in order if table.point(point).macs <= share * full), order[-1])
        if point not in candidates:
            candidates.append(point)
    best: tuple[float, Cascade, Mixture] | None = None
    for number, point in enumerate(candidates):
        settled = settle(point)
        found = _measured(settled, point, batches, split)
        score = sum(found.accuracy_at(part * full) for part in BUDGETS) / len(BUDGETS)
        if best is None or score > best[0]:
            best = score, found, settled
        on_progress(number + 1, len(candidates))
    assert best is not None
    return best[1], best[2]


def _measured(model: Mixture, point: OperatingPoint, batches: list[tuple[Tensor, Tensor]], split: str) -> Cascade:
    import torch

    macs = stage_macs(model.config, point)
    confidence, right = [], []
    with torch.no_grad():
        for images, labels in batches:
            scores = model.forward_exits(images, point)
            best = torch.stack([score.float().softmax(1) for score in scores.values()], 1).max(2)
            confidence.append(best.values)
            right.append(best.indices == labels[:, None])
    rows = calibrate(torch.cat(confidence).cpu().numpy(), torch.cat(right).cpu().numpy(), tuple(macs.values()))
    num = sum(len(labels) for _, labels in batches)
    return Cascade(point=point.name, exits=tuple(macs), macs=tuple(macs.values()), thresholds=rows, n=num, split=split)
