"""Measuring cascades: which one is best, and which confidences at its exits spend which average budget.

A price of macs, in right answers, makes the two comparable. Given a price and what later exits ask for, it is known of
every held-out image whether going on pays; an exit's confidence is the one that lets those go on for which it does, as
well as one threshold can tell. Prices from high to low give all average budgets.

Shapes: N images, E exits, the last of which takes all that come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cnmm.cascade import Cascade, Threshold, stage_macs
from cnmm.cost import CostTable
from cnmm.evaluation.batches import Batches
from cnmm.evaluation.kept import Kept
from cnmm.evaluation.quality import Floats
from cnmm.evaluation.task import task_of
from cnmm.lattice import OperatingPoint
from cnmm.mixture import Mixture
from cnmm.prune import cutting_order

Exits = npt.NDArray[np.intp]
"""At which exit each image leaves."""
NEVER = 1.0 + 1e-6
"""A confidence that no image reaches."""
PRICES = (*np.geomspace(100, 1e-3, 101).tolist(), 0.0)
"""Of all stages' macs, in right answers per image."""
QUANTILES = np.linspace(0, 1, 101)
"""Where an exit's confidence may lie, among those of the images that reach it."""
SWEEPS = 3
GAP = 0.01
"""Average macs between two rows at most, as a part of all stages': between rows, confidences are interpolated."""
SHARES = (1.0, 0.85, 0.7, 0.55, 0.4)
"""Macs of the cascades that are tried, as parts of the full mixture's."""
BUDGETS = tuple(k / 20 for k in range(3, 19))
"""Average macs at which cascades are compared, as parts of the full mixture's: 15 to 90 %."""


def measure_cascade(
    model: Mixture,
    validation: Batches[tuple[Tensor, Tensor]],
    settle: Callable[[OperatingPoint], Mixture],
    *,
    metric: str,
    split: str = "validation",
    kept: Kept | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Cascade, Mixture]:
    """The best of several cascades of a mixture, and the mixture with its statistics.

    They are cut by the flow averaged over the exits, to several sizes; the best has the highest mean quality over
    average budgets from 15 to 90 % of the full macs. `settle` gives the mixture with a point's own statistics.
    """
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
        found = _measured(settled, point, validation, metric, split, kept or Kept())
        score = sum(found.quality_at(part * full) for part in BUDGETS) / len(BUDGETS)
        if best is None or score > best[0]:
            best = score, found, settled
        on_progress(number + 1, len(candidates))
    assert best is not None
    return best[1], best[2]


def _measured(
    model: Mixture,
    point: OperatingPoint,
    batches: Batches[tuple[Tensor, Tensor]],
    metric: str,
    split: str,
    kept: Kept,
) -> Cascade:
    macs = stage_macs(model.config, point)
    choices = task_of(model.config).choices(model.config.num_classes, metric)
    with torch.no_grad():
        for _, (images, target) in kept.sweep(batches, choices.state, choices.restore):
            choices.add(list(model.forward_exits(images, point).values()), target)
    rows = calibrate(choices.confidence, choices.worth, tuple(macs.values()), choices.quality)
    return Cascade(
        point=point.name,
        exits=tuple(macs),
        macs=tuple(macs.values()),
        thresholds=rows,
        metric=metric,
        n=len(choices.confidence),
        split=split,
    )


def calibrate(
    confidence_NE: Floats, worth_NE: Floats, macs: Sequence[int], quality: Callable[[Exits], float] | None = None
) -> tuple[Threshold, ...]:
    """Thresholds from "leave at once" to "never early", with what they spend on these images, cheapest first.

    No exit asks for less where more may be spent. `worth_NE` is what answers are worth; `macs` are those of each stage;
    `quality` measures where images leave, by the mean worth of the answers they leave with unless told.
    """
    count = _Count(confidence_NE, worth_NE.astype(np.float64), np.cumsum(macs), quality)
    early = confidence_NE.shape[1] - 1
    confidence = np.zeros(early)
    rows = [count.row(confidence)]
    for price in PRICES:
        confidence = np.maximum(confidence, count.best(price))
        rows += count.between(rows[-1], count.row(confidence))
    rows += count.between(rows[-1], count.row(np.full(early, NEVER)))
    return tuple(rows)


class _Count:
    """What confidences spend and give.

    `worth_NE`: what answers are worth; `passed`: macs of an image that leaves at each exit.
    """

    def __init__(
        self,
        confidence_NE: Floats,
        worth_NE: Floats,
        passed: npt.NDArray[np.int64],
        quality: Callable[[Exits], float] | None,
    ) -> None:
        self.confidence_NE, self.worth_NE, self.passed = confidence_NE, worth_NE, passed
        self.quality = quality or self._mean_worth

    def _mean_worth(self, leaves: Exits) -> float:
        return float(self.worth_NE[np.arange(len(leaves)), leaves].mean())

    def row(self, confidence: Floats) -> Threshold:
        """What these confidences spend and give."""
        leaves, (num, exits) = self.leaves(confidence), self.worth_NE.shape
        return Threshold(
            confidence=tuple(confidence.tolist()),
            average_macs=float(self.passed[leaves].mean()),
            quality=self.quality(leaves),
            exits=tuple((np.bincount(leaves, minlength=exits) / num).tolist()),
        )

    def leaves(self, confidence: Floats, first: int = 0) -> Exits:
        """The exit at which each image leaves, of those from `first` on."""
        sure = self.confidence_NE[:, first:-1] >= confidence[first:]
        found: Exits = np.concatenate([sure, np.ones((len(sure), 1), bool)], 1).argmax(1)
        return found + first

    def best(self, price: float) -> Floats:
        """The confidence of every early exit that pays most at a price: from the last exit to the first, some times."""
        num, exits = self.worth_NE.shape
        worth_NE = self.worth_NE - price * self.passed / self.passed[-1]
        confidence = np.full(exits - 1, NEVER)
        for sweep in range(SWEEPS):
            for exit in reversed(range(exits - 1)):
                goes_on = worth_NE[np.arange(num), self.leaves(confidence, exit + 1)]
                # Of the images that come so far; at first, the earlier exits have no confidence yet.
                here = (self.confidence_NE[:, :exit] < confidence[:exit]).all(1) if sweep else np.ones(num, bool)
                if here.any():
                    gain = goes_on[here] - worth_NE[here, exit]
                    confidence[exit] = _best_level(self.confidence_NE[here, exit], gain)
        return confidence

    def between(self, low: Threshold, high: Threshold, depth: int = 16) -> list[Threshold]:
        """The rows after `low` up to `high`: with others in between, where they lie too far apart."""
        distance = high.average_macs - low.average_macs
        if distance <= GAP * self.passed[-1] or not depth:
            return [high] if distance > 0 else []
        middle = self.row(np.mean([low.confidence, high.confidence], 0))
        return self.between(low, middle, depth - 1) + self.between(middle, high, depth - 1)


def _best_level(confidence: Floats, gain: Floats) -> float:
    """The level below which going on gains most in all; `gain` is what each image gains by it."""
    levels = np.unique([0.0, NEVER, *np.quantile(confidence, QUANTILES)])
    order = np.argsort(confidence)
    below = np.concatenate([[0.0], np.cumsum(gain[order])])
    return float(levels[below[np.searchsorted(confidence[order], levels)].argmax()])
